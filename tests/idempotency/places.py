"""A database with an outbox and a table of orders, for tests of idempotency keys."""

import asyncio
import itertools
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiosqlite
import pymysql
import pytest
import sqlalchemy
from pymongo import AsyncMongoClient, MongoClient
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from pillarbox import Outbox
from pillarbox.conformance.driver_setup import Application, done
from pillarbox.drivers import driver_of
from pillarbox.drivers.contract import Driver, Statement, Steps
from pillarbox.drivers.pymongo import Call
from pillarbox.idempotency import Request
from pillarbox.urls import store_from_url
from tests.drivers.applications import SqlAlchemy, SqlAlchemyAsync, _mysql
from tests.mongo_outbox import database_url

DATABASES = ("postgres", "mysql", "mariadb", "sqlite", "mongo")
_numbers = itertools.count(1)


class Place:
    """Its tables are made once for all tests; each test has keys and orders with labels of its own."""

    def __init__(self, database: str, url: str, prefix: str) -> None:
        self.database = database
        self.url = url
        self.prefix = prefix
        self.table = f"{prefix}_order"
        self.outbox = Outbox(prefix=prefix)

    def make(self) -> None:
        """Make its tables, and connect to count orders."""
        # In a thread: the test may have an event loop of its own.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, self._migrate()).result()
        if self.database == "mongo":
            self._client: MongoClient[dict[str, Any]] = MongoClient(self.url)
            self._client.get_default_database().create_collection(self.table)
        else:
            self._engine = SqlAlchemy(self.url).engine()
            with self._engine.begin() as connection:
                connection.exec_driver_sql(f"CREATE TABLE {self.table} (label varchar(80))")

    async def _migrate(self) -> None:
        store = store_from_url(self.url, prefix=self.prefix)
        await store.migrate()
        await store.close()

    async def order(self, tx: Any, label: str) -> None:
        """Write an order and its event with the handle of a transaction."""
        await done(driver_of(tx).run(self._insert(label)))
        await done_if_awaited(self.outbox.add(tx, "order.created", {"label": label}))

    def order_plainly(self, tx: Any, label: str) -> None:
        driver_of(tx).run(self._insert(label))
        self.outbox.add(tx, "order.created", {"label": label})

    def _insert(self, label: str) -> Callable[[Driver], Steps[Any]]:
        def steps(driver: Driver) -> Steps[Any]:
            if driver.family == "mongo":
                return (yield Call(None, self.table, "insert_one", [{"label": label}]))
            (mark,) = driver.dialect.marks(1)
            return (yield Statement(f"INSERT INTO {self.table} VALUES ({mark})", [label]))

        return steps

    def orders(self, label: str) -> int:
        """How many orders with this label are committed, each with its event."""
        if self.database == "mongo":
            shop = self._client.get_default_database()
            count = shop[self.table].count_documents({"label": label})
            payload = f'{{"label":"{label}"}}'.encode()
            events = shop[f"{self.prefix}_event"].count_documents({"payload": payload})
        else:
            count = self._count(f"{self.table} WHERE label = :value", label)
            events = self._count(f"{self.prefix}_event WHERE payload = :value", f'{{"label":"{label}"}}'.encode())
        assert events == count, "an order without its event"
        return count

    def end_transactions_of_the_dead(self) -> None:
        """Do at once what MongoDB does after a minute. The others see that the connection is gone."""
        if self.database == "mongo":
            self._client.admin.command("killAllSessions", [])

    def _count(self, rest: str, value: Any) -> int:
        with self._engine.begin() as connection:
            found = connection.execute(sqlalchemy.text(f"SELECT count(*) FROM {rest}"), {"value": value})
            return int(found.scalar_one())

    def handle(self, **options: Any) -> Any:
        """What an asynchronous application passes: an async_sessionmaker, or the client of MongoDB."""
        if self.database == "mongo":
            return AsyncMongoClient(self.url)
        scheme, rest = self.url.split(":", 1)
        return async_sessionmaker(create_async_engine(f"{SqlAlchemyAsync.driver[scheme]}:{rest}", **options))

    async def close(self, handle: Any) -> None:
        await (handle.kw["bind"].dispose() if isinstance(handle, async_sessionmaker) else handle.close())

    def dispose(self) -> None:
        if self.database == "mongo":
            self._client.close()
        else:
            self._engine.dispose()


async def done_if_awaited(added: Any) -> None:
    if added.pending is not None:
        await added


def place_on(database: str, request: pytest.FixtureRequest, folder: Path) -> Place:
    url = f"sqlite:///{folder}/shop.db" if database == "sqlite" else str(request.getfixturevalue(database).url)
    place = Place(database, database_url(url) if database == "mongo" else url, f"idem_{os.getpid()}_{next(_numbers)}")
    place.make()
    return place


async def sessions_of(app: Application) -> Any:
    """The handle of an application that begins transactions."""
    if app.has_pool:
        return await app.pool()
    path = app.url.removeprefix("sqlite:///")

    async def open_aiosqlite() -> aiosqlite.Connection:
        return await aiosqlite.connect(path, timeout=30)

    def open_pymysql() -> Any:
        options = _mysql(app.url)
        return pymysql.connect(**{**options, "database": options.pop("db")})

    def open_sqlite3() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=30)

    openers: dict[str, Any] = {"AioSqlite": open_aiosqlite, "PyMysql": open_pymysql, "Sqlite3": open_sqlite3}
    return openers[type(app).__name__]


def post(key: str | None, body: bytes = b"{}", path: str = "/orders") -> Request:
    return Request("POST", path, body=body, key=() if key is None else (key,))


def new_key() -> str:
    return str(uuid4())
