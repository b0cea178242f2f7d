"""Applications on every driver that we know."""

import os
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import aiosqlite
import asyncmy
import asyncpg
import psycopg
import psycopg2
import psycopg_pool
import pymysql
import sqlalchemy
from django.db import connections, transaction
from django.db.transaction import Atomic
from psycopg.rows import dict_row
from psycopg2.extras import DictCursor
from psycopg2.pool import ThreadedConnectionPool
from pymongo import AsyncMongoClient, MongoClient
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from pillarbox.conformance.driver_setup import Application, done
from pillarbox.drivers.django import Database
from tests.django_app.databases import add_database, remove_database


def _path(url: str) -> str:
    return url.removeprefix("sqlite:///")


def _mysql(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "password": unquote(parts.password or ""),
        "db": parts.path.strip("/"),
    }


class Sqlite3(Application):
    async def connect(self, autocommit: bool) -> sqlite3.Connection:
        connection = sqlite3.connect(_path(self.url), isolation_level=None if autocommit else "DEFERRED", timeout=10)
        connection.row_factory = lambda cursor, row: {
            column[0]: cell for column, cell in zip(cursor.description, row, strict=True)
        }
        return connection


class Sqlite3Cursor(Sqlite3):
    async def connect(self, autocommit: bool) -> Any:
        return (await super().connect(autocommit)).cursor()

    async def commit(self) -> None:
        self.handle.connection.commit()

    async def rollback(self) -> None:
        self.handle.connection.rollback()

    async def close(self) -> None:
        self.handle.connection.close()


class AioSqlite(Application):
    is_awaited = True

    async def connect(self, autocommit: bool) -> aiosqlite.Connection:
        return await aiosqlite.connect(_path(self.url), isolation_level=None if autocommit else "", timeout=10)


class Psycopg(Application):
    has_pool = True

    async def connect(self, autocommit: bool) -> Any:
        return psycopg.connect(self.url, autocommit=autocommit, row_factory=dict_row)

    async def pool(self) -> Any:
        return psycopg_pool.ConnectionPool(self.url, min_size=1, max_size=2, open=True)


class PsycopgAsync(Application):
    is_awaited = True
    has_pool = True

    async def connect(self, autocommit: bool) -> Any:
        return await psycopg.AsyncConnection.connect(self.url, autocommit=autocommit, row_factory=dict_row)

    async def pool(self) -> Any:
        pool = psycopg_pool.AsyncConnectionPool(self.url, min_size=1, max_size=2, open=False)
        await pool.open()
        return pool


class _OnCursors(Application):
    async def execute(self, text: str) -> None:
        cursor = self.handle.cursor()
        cursor.execute(text)
        cursor.close()


class Psycopg2(_OnCursors):
    has_pool = True

    async def connect(self, autocommit: bool) -> Any:
        connection = psycopg2.connect(self.url, cursor_factory=DictCursor)
        connection.autocommit = autocommit
        return connection

    async def pool(self) -> Any:
        return ThreadedConnectionPool(1, 2, self.url)

    async def close_pool(self, pool: Any) -> None:
        pool.closeall()


class Asyncpg(Application):
    is_awaited = True
    has_pool = True

    async def connect(self, autocommit: bool) -> Any:
        return await asyncpg.connect(self.url)

    async def begin(self) -> None:
        self._transaction = self.handle.transaction()
        await self._transaction.start()

    async def commit(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        await self._transaction.rollback()

    async def pool(self) -> Any:
        return await asyncpg.create_pool(self.url, min_size=1, max_size=2)


class PyMysql(_OnCursors):
    async def connect(self, autocommit: bool) -> Any:
        options = _mysql(self.url)
        options["database"] = options.pop("db")
        return pymysql.connect(**options, autocommit=autocommit, cursorclass=pymysql.cursors.DictCursor)


class AsyncMy(Application):
    is_awaited = True
    has_pool = True

    async def connect(self, autocommit: bool) -> Any:
        return await asyncmy.connect(**_mysql(self.url), autocommit=autocommit)

    async def execute(self, text: str) -> None:
        async with self.handle.cursor() as cursor:
            await cursor.execute(text)

    async def close(self) -> None:
        await self.handle.ensure_closed()

    async def pool(self) -> Any:
        return await asyncmy.create_pool(**_mysql(self.url), minsize=1, maxsize=2)

    async def close_pool(self, pool: Any) -> None:
        pool.close()
        await pool.wait_closed()


class Django(Application):
    """A connection of Django. Two applications of one thread are two aliases."""

    has_pool = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        # The tests run where an event loop runs.
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"

    async def connect(self, autocommit: bool) -> Any:
        self._alias = add_database(self.url)
        self._block: Atomic | None = None
        return connections[self._alias]

    async def begin(self) -> None:
        # Where an event loop runs, each context has its own connections; those of fixtures and tests are not the same.
        connections[self._alias] = self.handle
        self._block = transaction.atomic(using=self._alias)
        self._block.__enter__()

    async def execute(self, text: str) -> None:
        with self.handle.cursor() as cursor:
            cursor.execute(text)

    async def commit(self) -> None:
        self._end(None)

    async def rollback(self) -> None:
        self._end(ZeroDivisionError())

    def _end(self, error: Exception | None) -> None:
        block, self._block = self._block, None
        if block is not None:
            connections[self._alias] = self.handle
            block.__exit__(type(error) if error else None, error, None)

    async def close(self) -> None:
        self.handle.close()
        remove_database(self._alias)

    async def pool(self) -> Any:
        self._pool_alias = add_database(self.url)
        return Database(self._pool_alias)

    async def close_pool(self, pool: Any) -> None:
        remove_database(self._pool_alias)


class PyMongo(Application):
    """A ClientSession."""

    has_pool = True
    has_savepoints = False
    create: Callable[[str], Any] = MongoClient

    async def connect(self, autocommit: bool) -> Any:
        self._client = type(self).create(self.url)
        return self._client.start_session()

    async def begin(self) -> None:
        await done(self.handle.start_transaction())

    async def commit(self) -> None:
        await done(self.handle.commit_transaction())

    async def rollback(self) -> None:
        await done(self.handle.abort_transaction())

    async def close(self) -> None:
        await done(self.handle.end_session())
        await done(self._client.close())

    async def pool(self) -> Any:
        return type(self).create(self.url)


class PyMongoAsync(PyMongo):
    """An AsyncClientSession."""

    is_awaited = True
    create = AsyncMongoClient


class SqlAlchemy(Application):
    """A Connection."""

    has_pool = True
    driver: Mapping[str, str] = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite"}
    create: Callable[..., Any] = staticmethod(sqlalchemy.create_engine)

    def engine(self, *, autocommit: bool = False) -> Any:
        scheme, rest = self.url.split(":", 1)
        options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
        return type(self).create(f"{self.driver[scheme]}:{rest}", **options)

    async def connect(self, autocommit: bool) -> Any:
        self._engine = self.engine(autocommit=autocommit)
        return await done(self._engine.connect())

    async def execute(self, text: str) -> None:
        await done(self.handle.execute(sqlalchemy.text(text)))

    async def close(self) -> None:
        await super().close()
        await done(self._engine.dispose())

    async def pool(self) -> Any:
        return self.engine()

    async def close_pool(self, pool: Any) -> None:
        await done(pool.dispose())


class SqlAlchemyAsync(SqlAlchemy):
    """An AsyncConnection."""

    is_awaited = True
    driver: Mapping[str, str] = {
        "postgresql": "postgresql+asyncpg",
        "mysql": "mysql+asyncmy",
        "sqlite": "sqlite+aiosqlite",
    }
    create = staticmethod(create_async_engine)


class SqlAlchemySession(SqlAlchemy):
    """A Session."""

    is_buffered = True

    async def connect(self, autocommit: bool) -> Any:
        self._engine = self.engine(autocommit=autocommit)
        return Session(self._engine)

    async def pool(self) -> Any:
        return sessionmaker(self.engine())

    async def close_pool(self, pool: Any) -> None:
        pool.kw["bind"].dispose()


class SqlAlchemyAsyncSession(SqlAlchemyAsync):
    """An AsyncSession."""

    is_awaited = False
    is_buffered = True

    async def connect(self, autocommit: bool) -> Any:
        self._engine = self.engine(autocommit=autocommit)
        return AsyncSession(self._engine)

    async def pool(self) -> Any:
        return async_sessionmaker(self.engine())

    async def close_pool(self, pool: Any) -> None:
        await pool.kw["bind"].dispose()


_SQLALCHEMY = [SqlAlchemy, SqlAlchemyAsync, SqlAlchemySession, SqlAlchemyAsyncSession]
APPLICATIONS: Mapping[str, list[type[Application]]] = {
    "sqlite": [Sqlite3, Sqlite3Cursor, AioSqlite, *_SQLALCHEMY, Django],
    "postgres": [Psycopg, PsycopgAsync, Psycopg2, Asyncpg, *_SQLALCHEMY, Django],
    "mysql": [PyMysql, AsyncMy, *_SQLALCHEMY, Django],
    "mariadb": [PyMysql, AsyncMy, *_SQLALCHEMY, Django],
    "mongo": [PyMongo, PyMongoAsync],
}
# They repeat what other cases test: on MySQL Django sets flags of its own, and the contract runs on every database.
REPEATED = [("sqlite", Django), ("postgres", Django), ("mariadb", Django)]
