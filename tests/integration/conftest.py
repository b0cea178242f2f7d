"""Outboxes on real databases, for the tests of the relay."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from pillarbox.stores.sql import SqlStore
from tests.integration.relays import Outbox, RelayProcess, mysql_outbox, postgres_outbox, sqlite_outbox
from tests.servers import Postgres, Server


@pytest.fixture(params=["sqlite", "postgres", "mysql", "mariadb"])
def outbox(request: pytest.FixtureRequest, tmp_path: Path) -> Outbox:
    """On each database."""
    if request.param == "sqlite":
        return sqlite_outbox(tmp_path)
    server: Server = request.getfixturevalue(request.param)
    return postgres_outbox(server.url) if request.param == "postgres" else mysql_outbox(server.url)


@pytest.fixture
def sqlite(tmp_path: Path) -> Outbox:
    return sqlite_outbox(tmp_path)


@pytest.fixture
def pg(postgres: Postgres) -> Outbox:
    return postgres_outbox(postgres.url)


@pytest.fixture(params=["mysql", "mariadb"])
def my(request: pytest.FixtureRequest) -> Outbox:
    server: Server = request.getfixturevalue(request.param)
    return mysql_outbox(server.url)


@pytest_asyncio.fixture
async def store(request: pytest.FixtureRequest) -> AsyncIterator[SqlStore]:
    """The test's own connection to its outbox, made and open: to write and to look, not for a relay."""
    name = next(each for each in ("outbox", "sqlite", "pg", "my") if each in request.fixturenames)
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
