"""A database with an outbox and a table of the application's, and a connection to it."""

import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
import pytest_asyncio

from pillarbox import Event, Mode, Outbox, Status
from pillarbox.conformance.driver_setup import Application, done
from pillarbox.conformance.probes import probe_of
from pillarbox.conformance.store_setup import read, settle
from pillarbox.mongo.documents import to_dead_letter, to_event
from pillarbox.store import Failure, Settlement
from pillarbox.stores.sql import SqlStore
from pillarbox.urls import store_from_url
from servers import Mongo
from tests.drivers.applications import APPLICATIONS, REPEATED, PyMongo
from tests.drivers.desk import Desk
from tests.mongo_outbox import MongoOutbox
from tests.mongo_outbox import database_url as mongo_url

_numbers = itertools.count(1)


class Shop:
    """The application: its connection, its outbox and its own table."""

    def __init__(self, app: Application, outbox: Outbox, table: str) -> None:
        self.app = app
        self.outbox = outbox
        self.table = table
        self.orders = 0

    async def order(self) -> None:
        """Write a row of the application's own data."""
        self.orders += 1
        await self.insert(self.orders)

    async def add(self, type: str = "order.created", payload: Any = None, **fields: Any) -> Event:
        added: Event = await self.outbox.add(self.app.handle, type, payload or {"id": 1}, **fields)
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

    async def kill_all(self) -> None:
        """Make dead letters of all events that wait."""
        raise AssertionError(f"{type(self).__name__} must say how its events die")

    async def close(self) -> None:
        raise AssertionError(f"{type(self).__name__} must say how it closes")


class SqlShop(Shop):
    def __init__(self, app: Application, store: SqlStore) -> None:
        prefix = probe_of(store).prefix
        super().__init__(app, Outbox(prefix=prefix), f"{prefix}_order")
        self.store = store

    @classmethod
    async def open(cls, app: Application) -> Self:
        store = store_from_url(app.url, prefix=f"shop_{os.getpid()}_{next(_numbers)}")
        assert isinstance(store, SqlStore)
        await store.migrate()
        await store.open()
        await store.announce("default", Mode.ORDERED, "memory")
        await store.join("default", "reader", 3600.0)
        shop = cls(app, store)
        async with store.transaction() as tx:
            await tx.run(f"CREATE TABLE {shop.table} (id integer PRIMARY KEY)")
        return shop

    async def insert(self, number: int) -> None:
        await self.app.execute(f"INSERT INTO {self.table} VALUES ({number})")

    async def data(self) -> int:
        ((count,),) = await probe_of(self.store).query(f"SELECT count(*) FROM {self.table}")
        return int(count)

    async def events(self) -> Sequence[Event]:
        grants = await self.store.take("default", "reader", 100, 60.0)
        found: list[Event] = []
        for grant in grants:
            found += await read(self.store, grant, 10_000, 100_000_000)
        await self.store.give(grants)
        return sorted(found, key=lambda event: event.seq)

    async def count(self) -> Mapping[Status, int]:
        return await self.store.count("default")

    async def kill_all(self) -> None:
        grants = await self.store.take("default", "reader", 100, 60.0)
        for grant in grants:
            for found in await read(self.store, grant, 10, 1_000_000):
                await settle(self.store, Settlement(grant, dead=[Failure(found, "poison", 1)]))
        await self.store.give(grants)

    async def close(self) -> None:
        await self.store.close()


class MongoShop(Shop):
    def __init__(self, app: Application) -> None:
        self.made = MongoOutbox(app.url)
        app.url = self.made.url
        super().__init__(app, Outbox(prefix=self.made.prefix), f"{self.made.prefix}_order")
        self.made.database.create_collection(self.table)

    async def insert(self, number: int) -> None:
        session = self.app.handle
        orders = session.client.get_default_database()[self.table]
        await done(orders.insert_one({"_id": number}, session=session))

    async def data(self) -> int:
        return self.made.database[self.table].count_documents({})

    async def events(self) -> Sequence[Event]:
        return [to_event(document, Status.PENDING) for document in self.made.events(status="pending")]

    async def count(self) -> Mapping[Status, int]:
        return Counter(Status(document["status"]) for document in self.made.events())

    async def kill_all(self) -> None:
        for document in self.made.events(status="pending"):
            letter = to_dead_letter(document, 1, "poison", [])
            self.made["dead_letter"].insert_one({**letter, "died_at": document["created_at"]})
            self.made["event"].delete_one({"_id": document["_id"]})

    async def close(self) -> None:
        self.made.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every driver, or those that the test is marked for."""
    if "app" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("drivers")
        wanted = marker.args[0] if marker else lambda database, kind: True
        cases = [
            pytest.param((name, kind), id=f"{name}-{kind.__name__}", marks=marks)
            for name, kinds in APPLICATIONS.items()
            for kind in kinds
            for marks in [[pytest.mark.long] if (name, kind) in REPEATED else []]
            if wanted(name, kind)
        ]
        metafunc.parametrize("app", cases, indirect=True)


@pytest.fixture
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Application:
    database, kind = request.param
    made: Application = kind(database_url(database, request, tmp_path))
    return made


def database_url(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of the real server, or of a file."""
    return f"sqlite:///{tmp_path}/shop.db" if database == "sqlite" else str(request.getfixturevalue(database).url)


@pytest_asyncio.fixture
async def shop(app: Application) -> AsyncIterator[Shop]:
    shop = MongoShop(app) if isinstance(app, PyMongo) else await SqlShop.open(app)
    yield shop
    await hang_up(app)
    await shop.close()


@pytest_asyncio.fixture
async def desk(app: Application, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    if app.url.startswith("sqlite:"):
        app.url = f"sqlite:///{tmp_path_factory.getbasetemp()}/desk.db"
    elif isinstance(app, PyMongo):
        app.url = mongo_url(app.url, "desk")
    desk = await Desk.open(app)
    yield desk
    await hang_up(app)


async def hang_up(app: Application) -> None:
    """A test may have ended the connection, or left a transaction open on it."""
    if app.handle is not None:
        with suppress(Exception):
            await done(app.handle.rollback()) if hasattr(app.handle, "rollback") else None
        with suppress(Exception):
            await app.close()


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
