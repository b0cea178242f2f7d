"""The connections of the PostgreSQL store: from a pool of its own, or from a handle of the application."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, urlsplit

from pillarbox.errors import MissingExtra
from pillarbox.stores.postgres.url import plain_url, where

try:
    import asyncpg
except ModuleNotFoundError as error:
    raise MissingExtra("PostgresStore", "postgres") from error

CONNECT_SECONDS = 10.0
COMMAND_SECONDS = 60.0
_KEPT_SECONDS = 60.0


class Connections(Protocol):
    """Gives connections of asyncpg for the duration of a block."""

    async def open(self) -> None:
        """Safe to call twice."""

    def one(self) -> AbstractAsyncContextManager[Any]: ...

    async def close(self) -> None: ...


class Source(NamedTuple):
    """A place with an outbox: its connections, how to connect for LISTEN, and its name without secrets."""

    connections: Connections
    listen: Callable[[], Awaitable[Any]] | None
    where: str
    url: str = ""  # empty: the application opens and closes the connections


def source_of(place: Any, listen_url: str | None, *, pool_size: int, statement_cache: int) -> Source:
    """From a URL, a pool of asyncpg or an engine of SQLAlchemy."""
    if listen_url:
        listen_url = plain_url(listen_url)
        where(listen_url)  # refuses a wrong one now, not when the relay first sleeps
    if isinstance(place, str):
        url = plain_url(place)
        return Source(OwnPool(url, pool_size, statement_cache), _connector(listen_url or url), where(url), url)
    listen = _connector(listen_url) if listen_url else None
    if isinstance(place, asyncpg.Pool):
        dsn = next(iter(getattr(place, "_connect_args", ())), None)
        name = where(dsn) if isinstance(dsn, str) and "://" in dsn else "postgresql (a pool of the application)"
        return Source(BorrowedPool(place), listen or _pool_connector(place), name)
    url = plain_url(place.url.render_as_string(hide_password=False))
    if place.url.get_driver_name() != "asyncpg":
        return source_of(url, listen_url, pool_size=pool_size, statement_cache=statement_cache)
    return Source(BorrowedEngine(place), listen or _connector(url), where(url))


def _connector(url: str) -> Callable[[], Awaitable[Any]]:
    return partial(asyncpg.connect, url, timeout=CONNECT_SECONDS, server_settings=_session_settings(url))


def _session_settings(url: str) -> dict[str, str]:
    """The name under which the server lists a connection, unless the URL has one. Other settings would be refused by a
    pooler."""
    named = "application_name" in dict(parse_qsl(urlsplit(url).query))
    return {} if named else {"application_name": "pillarbox"}


def _pool_connector(pool: Any) -> Callable[[], Awaitable[Any]] | None:
    """The connection settings of a pool. They are private: another version of asyncpg may not have them."""
    try:
        return partial(pool._connect, *pool._connect_args, **pool._connect_kwargs)
    except AttributeError:
        return None


def _is_closed(connection: Any) -> bool:
    """Also when the pool has taken it back because it was lost."""
    try:
        return bool(connection.is_closed())
    except asyncpg.InterfaceError:
        return True


async def _nothing(connection: Any) -> None:
    """Replaces the round trip that resets a connection: the store leaves no state on it."""


class OwnPool:
    """A pool of the store's own. Idle connections are kept outside the pool: acquire and release cost twice as much as
    a small statement."""

    def __init__(self, url: str, size: int, statement_cache: int) -> None:
        self._url, self._size, self._statement_cache = url, size, statement_cache
        self._pool: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kept: list[tuple[Any, float]] = []  # with the instant of their last use, the latest at the end
        self._waiting = 0

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._pool is None or self._loop is not loop:
            self._kept.clear()  # a pool belongs to its event loop
            self._loop = loop
            self._pool = await asyncpg.create_pool(
                self._url,
                min_size=1,
                max_size=self._size,
                timeout=CONNECT_SECONDS,
                # A connection that is cut silently must not hold a slot forever.
                command_timeout=COMMAND_SECONDS,
                statement_cache_size=self._statement_cache,
                server_settings=_session_settings(self._url),
                reset=_nothing,
            )

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            kept, self._kept = self._kept, []
            with suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    for connection, _ in kept:
                        await self._release(pool, connection)
                    await pool.close()
            pool.terminate()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Any]:
        pool = self._pool
        connection = await self._take(pool)
        try:
            yield connection
        except BaseException:
            # The pool handles an interrupted statement, but logs an error about an open transaction.
            if not _is_closed(connection) and connection.is_in_transaction():
                connection.terminate()
                await asyncio.sleep(0)  # the event loop closes the socket in its next round
            await self._release(pool, connection)
            raise
        now = time.monotonic()
        if self._waiting or pool is not self._pool or _is_closed(connection):
            await self._release(pool, connection)
            return
        self._kept.append((connection, now))
        # Not needed lately: the pool will close it.
        if self._kept[0][1] < now - _KEPT_SECONDS:
            await self._release(pool, self._kept.pop(0)[0])

    async def _take(self, pool: Any) -> Any:
        while self._kept:
            connection, _ = self._kept.pop()
            if not _is_closed(connection):
                return connection
            await self._release(pool, connection)
        self._waiting += 1
        try:
            return await pool.acquire(timeout=CONNECT_SECONDS)
        finally:
            self._waiting -= 1

    async def _release(self, pool: Any, connection: Any) -> None:
        if _is_closed(connection):
            # asyncpg before 0.32 keeps the place of a connection that it has closed by itself.
            with suppress(asyncpg.InterfaceError):  # the pool has it back
                connection.terminate()
            return
        # With a time limit: after a timeout the driver asks the server to end the statement. In a network that drops
        # everything it would wait for that answer just as long.
        await pool.release(connection, timeout=CONNECT_SECONDS)


class _Borrowed:
    """A handle that the application opens and closes."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def open(self) -> None: ...

    async def close(self) -> None: ...


class BorrowedPool(_Borrowed):
    """A pool of the application. Each connection goes back to it at once."""

    def one(self) -> AbstractAsyncContextManager[Any]:
        found: AbstractAsyncContextManager[Any] = self._handle.acquire(timeout=CONNECT_SECONDS)
        return found


class BorrowedEngine(_Borrowed):
    """An SQLAlchemy engine of the application: uses the asyncpg connections inside its pool."""

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Any]:
        async with self._handle.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            try:
                yield driver
            finally:
                if driver.is_closed():
                    await connection.invalidate()
