"""Outboxes on real databases, for the tests of the relay."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from pillarbox.store import Store
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
from tests.servers import Mongo, Postgres, Server

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


@pytest.fixture
def processes() -> Iterator[list[RelayProcess]]:
    """Ended with the test, whatever it did to them."""
    started: list[RelayProcess] = []
    yield started
    for each in started:
        each.close()
