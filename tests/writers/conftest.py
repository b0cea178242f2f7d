"""A database with an outbox and a table of the application's, and a driver to it."""

import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
import pytest_asyncio

from pillarbox import Event, Outbox, Status
from pillarbox.store import Failure, Settlement
from pillarbox.stores.mongo.documents import to_dead_letter, to_event
from pillarbox.stores.sql import SqlStore
from pillarbox.urls import store_from_url
from tests.mongo_outbox import MongoOutbox
from tests.servers import Mongo
from tests.writers.drivers import DRIVERS, Driver, PyMongo, done

_numbers = itertools.count(1)


class Shop:
    """The application: its outbox, its own table, and its driver."""

    def __init__(self, driver: Driver, outbox: Outbox, table: str) -> None:
        self.driver = driver
        self.outbox = outbox
        self.table = table
        self.orders = 0

    async def order(self) -> None:
        """Write a row of the application's own data."""
        self.orders += 1
        await self.insert(self.orders)

    async def add(self, type: str = "order.created", payload: Any = None, **fields: Any) -> Event:
        added: Event = await self.outbox.add(self.driver.handle, type, payload or {"id": 1}, **fields)
        return added

    async def insert(self, number: int) -> None:
        raise AssertionError(f"{type(self).__name__} must say how it inserts")

    async def data(self) -> int:
        """How many orders are committed."""
        raise AssertionError(f"{type(self).__name__} must say how it counts")

    async def events(self) -> Sequence[Event]:
        """All committed events that wait, in order of seq."""
        raise AssertionError(f"{type(self).__name__} must say how it reads")

    async def count(self) -> Mapping[Status, int]:
        """The committed events by status."""
        raise AssertionError(f"{type(self).__name__} must say how it counts")

    async def bury(self) -> None:
        """Make dead letters of all events that wait."""
        raise AssertionError(f"{type(self).__name__} must say how it buries")

    async def close(self) -> None:
        raise AssertionError(f"{type(self).__name__} must say how it closes")


class SqlShop(Shop):
    def __init__(self, driver: Driver, store: SqlStore) -> None:
        prefix = store._names.prefix
        super().__init__(driver, Outbox(prefix=prefix), f"{prefix}_order")
        self.store = store

    @classmethod
    async def open(cls, driver: Driver) -> Self:
        store = store_from_url(driver.url, prefix=f"shop_{os.getpid()}_{next(_numbers)}")
        assert isinstance(store, SqlStore)
        await store.migrate()
        await store.open()
        await store.join("default", "reader", 3600.0)
        shop = cls(driver, store)
        async with store.transaction() as tx:
            await tx.run(f"CREATE TABLE {shop.table} (id integer PRIMARY KEY)")
        return shop

    async def insert(self, number: int) -> None:
        await self.driver.execute(f"INSERT INTO {self.table} VALUES ({number})")

    async def data(self) -> int:
        async with self.store.transaction() as tx:
            statement = self.store._statement(f"SELECT count(*) FROM {self.table}")
            return int((await tx.fetch(statement))[0][0])

    async def events(self) -> Sequence[Event]:
        grants = await self.store.take("default", "reader", 100, 60.0)
        found: list[Event] = []
        for grant in grants:
            found += await self.store.read(grant, 10_000, 100_000_000)
        await self.store.give(grants)
        return sorted(found, key=lambda event: event.seq)

    async def count(self) -> Mapping[Status, int]:
        return await self.store.count("default")

    async def bury(self) -> None:
        grants = await self.store.take("default", "reader", 100, 60.0)
        for grant in grants:
            for found in await self.store.read(grant, 10, 1_000_000):
                await self.store.settle(grant, Settlement(dead=[Failure(found, "poison", 1)]))
        await self.store.give(grants)

    async def close(self) -> None:
        await self.store.close()


class MongoShop(Shop):
    def __init__(self, driver: Driver) -> None:
        self.made = MongoOutbox(driver.url)
        driver.url = self.made.url
        super().__init__(driver, Outbox(prefix=self.made.prefix), f"{self.made.prefix}_order")
        self.made.database.create_collection(self.table)

    async def insert(self, number: int) -> None:
        session = self.driver.handle
        orders = session.client.get_default_database()[self.table]
        await done(orders.insert_one({"_id": number}, session=session))

    async def data(self) -> int:
        return self.made.database[self.table].count_documents({})

    async def events(self) -> Sequence[Event]:
        return [to_event(document, Status.PENDING) for document in self.made.events(status="pending")]

    async def count(self) -> Mapping[Status, int]:
        return Counter(Status(document["status"]) for document in self.made.events())

    async def bury(self) -> None:
        for document in self.made.events(status="pending"):
            letter = to_dead_letter(document, 1, "poison", [])
            self.made["dead_letter"].insert_one({**letter, "died_at": document["created_at"]})
            self.made["event"].delete_one({"_id": document["_id"]})

    async def close(self) -> None:
        self.made.close()


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
    shop = MongoShop(driver) if isinstance(driver, PyMongo) else await SqlShop.open(driver)
    yield shop
    if driver.handle is not None:
        # A test may have ended the connection, or left a transaction open on it.
        with suppress(Exception):
            await done(driver.handle.rollback()) if hasattr(driver.handle, "rollback") else None
        with suppress(Exception):
            await driver.close()
    await shop.close()


@pytest.fixture
def made(mongo: Mongo) -> Iterator[MongoOutbox]:
    made = MongoOutbox(mongo.url)
    made.database.create_collection(f"{made.prefix}_order")
    yield made
    made.close()


@pytest.fixture
def outbox(made: MongoOutbox) -> Outbox:
    return Outbox(prefix=made.prefix)


@pytest.fixture
def loose(made: MongoOutbox) -> Outbox:
    return Outbox(prefix=made.prefix, transactions=False)
