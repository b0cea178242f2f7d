"""Outboxes on real databases, for the tests of the relay."""

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from pillarbox.store import Store
from servers import Mongo, Postgres, Server
from tests.integration.commands import Command
from tests.integration.relays import (
    MongoOutbox,
    Outbox,
    RelayProcess,
    SqlOutbox,
    mongo_outbox,
    mysql_outbox,
    postgres_outbox,
    sqlite_outbox,
)

_numbers = itertools.count(1)
SQL = ("sqlite", "postgres", "mysql", "mariadb")


@pytest.fixture(params=[*SQL, "mongo"])
def outbox(request: pytest.FixtureRequest, tmp_path: Path) -> Outbox:
    """On each database."""
    if request.param == "mongo":
        return mongo_outbox(request.getfixturevalue("mongo").url)
    return _sql(request, tmp_path)


@pytest.fixture(params=SQL)
def sql(request: pytest.FixtureRequest, tmp_path: Path) -> SqlOutbox:
    """On each database that has tables to look into."""
    return _sql(request, tmp_path)


def _sql(request: pytest.FixtureRequest, folder: Path) -> SqlOutbox:
    if request.param == "sqlite":
        return sqlite_outbox(folder)
    server: Server = request.getfixturevalue(request.param)
    return postgres_outbox(server.url) if request.param == "postgres" else mysql_outbox(server.url)


@pytest.fixture
def sqlite(tmp_path: Path) -> SqlOutbox:
    return sqlite_outbox(tmp_path)


@pytest.fixture
def pg(postgres: Postgres) -> SqlOutbox:
    return postgres_outbox(postgres.url)


@pytest.fixture
def mg(mongo: Mongo) -> MongoOutbox:
    return mongo_outbox(mongo.url)


@pytest.fixture(params=["mysql", "mariadb"])
def my(request: pytest.FixtureRequest) -> SqlOutbox:
    server: Server = request.getfixturevalue(request.param)
    return mysql_outbox(server.url)


@pytest_asyncio.fixture
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """The test's own connection to its outbox, made and open: to write and to look, not for a relay."""
    name = next(each for each in ("outbox", "sql", "sqlite", "pg", "my", "mg") if each in request.fixturenames)
    connect: Outbox = request.getfixturevalue(name)
    store = connect()
    await store.migrate()
    await store.open()
    yield store
    await store.close()


@pytest.fixture(params=["sqlite", "postgres"])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Command:
    """The command on two databases, without tables."""
    if request.param == "sqlite":
        return Command(tmp_path, f"sqlite:///{tmp_path}/shop.db")
    server: Postgres = request.getfixturevalue("postgres")
    return Command(tmp_path, server.url, f"cli_{os.getpid()}_{next(_numbers)}")


@pytest.fixture
def pillarbox(bare: Command) -> Command:
    assert bare("init").code == 0
    return bare


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Command:
    command = Command(tmp_path, f"sqlite:///{tmp_path}/shop.db")
    assert command("init").code == 0
    return command


@pytest.fixture
def processes() -> Iterator[list[RelayProcess]]:
    """Ended with the test, whatever it did to them."""
    started: list[RelayProcess] = []
    yield started
    for each in started:
        each.close()
