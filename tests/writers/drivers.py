"""Every driver that a writer knows, in one shape: what an application does with it besides calling the outbox."""

import inspect
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import aiosqlite
import asyncmy
import asyncpg
import psycopg
import psycopg_pool
import pymysql
import sqlalchemy
from pymongo import AsyncMongoClient, MongoClient
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session


async def done(result: Any) -> Any:
    """The result, awaited if it has to be."""
    return await result if inspect.isawaitable(result) else result


class Driver:
    """A driver with one connection: ``handle`` is what the application passes to the outbox."""

    is_awaited = False  # whether a forgotten await is possible
    is_buffered = False  # whether events are written with a flush
    has_pool = False
    has_savepoints = True

    def __init__(self, url: str) -> None:
        self.url = url
        self.handle: Any = None

    async def open(self, *, autocommit: bool = False) -> Any:
        """Connect; with autocommit every statement commits by itself."""
        self.handle = await self.connect(autocommit)
        return self.handle

    async def connect(self, autocommit: bool) -> Any:
        raise AssertionError(f"{type(self).__name__} must say how it connects")

    async def begin(self) -> None:
        """Open a transaction, where that is not done by the first statement."""

    async def execute(self, text: str) -> None:
        await done(self.handle.execute(text))

    async def commit(self) -> None:
        await done(self.handle.commit())

    async def rollback(self) -> None:
        await done(self.handle.rollback())

    async def close(self) -> None:
        await done(self.handle.close())

    async def pool(self) -> Any:
        """What ``outbox.transaction`` takes besides a connection."""
        raise AssertionError(f"{type(self).__name__} has no pool")

    async def close_pool(self, pool: Any) -> None:
        await done(pool.close())


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


class Sqlite3(Driver):
    async def connect(self, autocommit: bool) -> sqlite3.Connection:
        return sqlite3.connect(_path(self.url), isolation_level=None if autocommit else "DEFERRED", timeout=10)


class Sqlite3Cursor(Sqlite3):
    async def connect(self, autocommit: bool) -> Any:
        return (await super().connect(autocommit)).cursor()

    async def commit(self) -> None:
        self.handle.connection.commit()

    async def rollback(self) -> None:
        self.handle.connection.rollback()

    async def close(self) -> None:
        self.handle.connection.close()


class AioSqlite(Driver):
    is_awaited = True

    async def connect(self, autocommit: bool) -> aiosqlite.Connection:
        return await aiosqlite.connect(_path(self.url), isolation_level=None if autocommit else "", timeout=10)


class Psycopg(Driver):
    async def connect(self, autocommit: bool) -> Any:
        return psycopg.connect(self.url, autocommit=autocommit)


class PsycopgAsync(Driver):
    is_awaited = True
    has_pool = True

    async def connect(self, autocommit: bool) -> Any:
        return await psycopg.AsyncConnection.connect(self.url, autocommit=autocommit)

    async def pool(self) -> Any:
        pool = psycopg_pool.AsyncConnectionPool(self.url, min_size=1, max_size=2, open=False)
        await pool.open()
        return pool


class Asyncpg(Driver):
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


class _OnCursors(Driver):
    async def execute(self, text: str) -> None:
        cursor = self.handle.cursor()
        cursor.execute(text)
        cursor.close()


class PyMysql(_OnCursors):
    async def connect(self, autocommit: bool) -> Any:
        options = _mysql(self.url)
        options["database"] = options.pop("db")
        return pymysql.connect(**options, autocommit=autocommit, cursorclass=pymysql.cursors.DictCursor)


class AsyncMy(Driver):
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


class PyMongo(Driver):
    """A ClientSession."""

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


class PyMongoAsync(PyMongo):
    """An AsyncClientSession."""

    is_awaited = True
    has_pool = True
    create = AsyncMongoClient

    async def pool(self) -> Any:
        return AsyncMongoClient(self.url)


class SqlAlchemy(Driver):
    """A Connection."""

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


class SqlAlchemyAsync(SqlAlchemy):
    """An AsyncConnection."""

    is_awaited = True
    has_pool = True
    driver: Mapping[str, str] = {
        "postgresql": "postgresql+asyncpg",
        "mysql": "mysql+asyncmy",
        "sqlite": "sqlite+aiosqlite",
    }
    create = staticmethod(create_async_engine)

    async def pool(self) -> Any:
        return self.engine()

    async def close_pool(self, pool: Any) -> None:
        await pool.dispose()


class SqlAlchemySession(SqlAlchemy):
    """A Session."""

    is_buffered = True

    async def connect(self, autocommit: bool) -> Any:
        self._engine = self.engine(autocommit=autocommit)
        return Session(self._engine)


class SqlAlchemyAsyncSession(SqlAlchemyAsync):
    """An AsyncSession."""

    is_awaited = False
    is_buffered = True
    has_pool = False

    async def connect(self, autocommit: bool) -> Any:
        self._engine = self.engine(autocommit=autocommit)
        return AsyncSession(self._engine)


_SQLALCHEMY = [SqlAlchemy, SqlAlchemyAsync, SqlAlchemySession, SqlAlchemyAsyncSession]
DRIVERS: Mapping[str, list[type[Driver]]] = {
    "sqlite": [Sqlite3, Sqlite3Cursor, AioSqlite, *_SQLALCHEMY],
    "postgres": [Psycopg, PsycopgAsync, Asyncpg, *_SQLALCHEMY],
    "mysql": [PyMysql, AsyncMy, *_SQLALCHEMY],
    "mariadb": [PyMysql, AsyncMy, *_SQLALCHEMY],
    "mongo": [PyMongo, PyMongoAsync],
}
