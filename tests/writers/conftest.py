"""A database with an outbox and a table of the application's, and a driver to it."""

import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pillarbox import Event, Outbox
from pillarbox.stores.sql import SqlStore
from pillarbox.urls import store_from_url
from tests.writers.drivers import DRIVERS, Driver, done

_numbers = itertools.count(1)


class Shop:
    """The application: its outbox, its own table, and its driver."""

    def __init__(self, driver: Driver, store: SqlStore, outbox: Outbox, table: str) -> None:
        self.driver = driver
        self.store = store
        self.outbox = outbox
        self.table = table
        self.orders = 0

    async def order(self) -> None:
        """Write a row of the application's own data."""
        self.orders += 1
        await self.driver.execute(f"INSERT INTO {self.table} VALUES ({self.orders})")

    async def add(self, type: str = "order.created", payload: Any = None, **fields: Any) -> Event:
        added: Event = await self.outbox.add(self.driver.handle, type, payload or {"id": 1}, **fields)
        return added

    async def data(self) -> int:
        """How many orders are committed."""
        async with self.store.transaction() as tx:
            statement = self.store._statement(f"SELECT count(*) FROM {self.table}")
            return int((await tx.fetch(statement))[0][0])

    async def events(self) -> Sequence[Event]:
        """All committed events that wait, in order of seq."""
        grants = await self.store.take("default", "reader", 100, 60.0)
        found: list[Event] = []
        for grant in grants:
            found += await self.store.read(grant, 10_000, 100_000_000)
        await self.store.give(grants)
        return sorted(found, key=lambda event: event.seq)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every driver, or those that the test is marked for."""
    if "driver" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("drivers")
        wanted = marker.args[0] if marker else lambda database, kind: True
        cases = [(name, kind) for name, kinds in DRIVERS.items() for kind in kinds if wanted(name, kind)]
        metafunc.parametrize("driver", cases, ids=[f"{name}-{kind.__name__}" for name, kind in cases], indirect=True)


@pytest.fixture
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    database, kind = request.param
    made: Driver = kind(database_url(database, request, tmp_path))
    return made


def database_url(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of the real server, or of a file."""
    return f"sqlite:///{tmp_path}/shop.db" if database == "sqlite" else str(request.getfixturevalue(database).url)


@pytest_asyncio.fixture
async def shop(driver: Driver) -> AsyncIterator[Shop]:
    prefix = f"shop_{os.getpid()}_{next(_numbers)}"
    store = store_from_url(driver.url, prefix=prefix)
    assert isinstance(store, SqlStore)
    await store.migrate()
    await store.open()
    await store.join("default", "reader", 3600.0)
    async with store.transaction() as tx:
        await tx.run(f"CREATE TABLE {prefix}_order (id integer PRIMARY KEY)")
    yield Shop(driver, store, Outbox(prefix=prefix), f"{prefix}_order")
    if driver.handle is not None:
        # A test may have ended the connection, or left a transaction open on it.
        with suppress(Exception):
            await done(driver.handle.rollback()) if hasattr(driver.handle, "rollback") else None
        with suppress(Exception):
            await driver.close()
    await store.close()
