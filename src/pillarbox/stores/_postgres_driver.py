"""asyncpg under the PostgreSQL store: a pool of connections, and one that listens."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

from pillarbox.errors import ConfigError, DuplicateEvent, MissingExtra, SchemaError, StoreDown, StoreError
from pillarbox.stores.sql import Connection, Statement

try:
    import asyncpg
except ModuleNotFoundError as error:
    raise MissingExtra("PostgresStore", "postgres") from error

log = logging.getLogger("pillarbox.stores.postgres")

_CONNECT_SECONDS = 10.0
_COMMAND_SECONDS = 60.0
_KEPT_SECONDS = 60.0
_LISTEN_RETRY_SECONDS = 2.0
# The server or another transaction was in the way; the same statement can succeed a moment later.
_PASSING = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.LockNotAvailableError,
    asyncpg.InternalClientError,
)


class _Connections:
    """Connections of a pool that are kept at hand between statements: to take one from the pool and to give it back
    costs twice as much as a small statement."""

    def __init__(self, pool: "asyncpg.Pool[asyncpg.Record]") -> None:
        self._pool = pool
        self._kept: list[tuple[Any, float]] = []  # with the instant of their last use, the latest at the end
        self._waiting = 0
        self._closing = False

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Any]:
        """A connection of one's own for the block."""
        connection = await self._take()
        try:
            yield connection
        except BaseException:
            # The pool knows what to do with a connection whose statement was cut short.
            await self._release(connection)
            raise
        now = time.monotonic()
        if self._waiting or self._closing or connection.is_closed():
            await self._release(connection)
            return
        self._kept.append((connection, now))
        # Not needed lately: the pool will close it.
        if self._kept[0][1] < now - _KEPT_SECONDS:
            await self._release(self._kept.pop(0)[0])

    async def close(self) -> None:
        self._closing = True
        while self._kept:
            await self._release(self._kept.pop()[0])
        await self._pool.close()

    async def _take(self) -> Any:
        while self._kept:
            connection, _ = self._kept.pop()
            if not connection.is_closed():
                return connection
            await self._release(connection)
        self._waiting += 1
        try:
            return await self._pool.acquire(timeout=_CONNECT_SECONDS)
        finally:
            self._waiting -= 1

    async def _release(self, connection: Any) -> None:
        # Within a time: after a statement that timed out the driver asks the server to end it, and in a network that
        # swallows everything it would wait for an answer once more as long.
        await self._pool.release(connection, timeout=_CONNECT_SECONDS)

    def terminate(self) -> None:
        self._pool.terminate()


class PostgresDatabase:
    """A pool of connections."""

    def __init__(self, url: str, name: str, *, pool_size: int, statement_cache: int) -> None:
        self._url = url
        self.name = name
        self._pool_size = pool_size
        self._statement_cache = statement_cache
        self._connections: _Connections | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        async with self._opening:
            if self._connections is not None:
                return
            with self.errors():
                pool = await asyncpg.create_pool(
                    self._url,
                    min_size=1,
                    max_size=self._pool_size,
                    timeout=_CONNECT_SECONDS,
                    # A connection that is cut without a word must not hold a slot for ever.
                    command_timeout=_COMMAND_SECONDS,
                    statement_cache_size=self._statement_cache,
                    # The store leaves nothing behind on a connection, so that a round trip to clean it is saved.
                    reset=_nothing,
                )
            self._connections = _Connections(pool)

    async def close(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(connections.close(), _CONNECT_SECONDS)
            connections.terminate()

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except asyncpg.UniqueViolationError as error:
            raise DuplicateEvent(
                "an event with this id is in the outbox already; give another id, or leave it out"
            ) from error
        except (
            asyncpg.UndefinedTableError,
            asyncpg.InvalidSchemaNameError,
            asyncpg.UndefinedColumnError,
        ) as error:
            raise SchemaError(
                f"{self.name}: {error}; make the tables with `pillarbox init`, or `await store.migrate()`"
            ) from error
        except asyncpg.InvalidCatalogNameError as error:
            raise StoreError(f"{self.name}: there is no such database; create it, or correct the URL") from error
        except asyncpg.InvalidAuthorizationSpecificationError as error:
            raise StoreError(f"{self.name}: user or password refused; correct the URL") from error
        except asyncpg.InsufficientPrivilegeError as error:
            raise StoreError(f"{self.name}: {error}; grant it to the user of the relay") from error
        except asyncpg.exceptions.ClientConfigurationError:
            # Without its words: they can quote the URL.
            raise ConfigError(
                f"{self.name}: the driver does not understand the URL; check its options, such as sslmode"
            ) from None
        except (OSError, TimeoutError, asyncpg.InterfaceError, *_PASSING) as error:
            raise StoreDown(f"{self.name} cannot be used now ({type(error).__name__}: {error})") from error
        except asyncpg.PostgresError as error:
            raise StoreError(f"{self.name}: {type(error).__name__}: {error}") from error

    def _connection(self) -> AbstractAsyncContextManager[Any]:
        if self._connections is None:
            raise StoreDown(f"{self.name} is closed; open the store first")
        return self._connections.one()

    async def fetch(self, statement: Statement, **values: Any) -> Sequence[Any]:
        with self.errors():
            async with self._connection() as connection:
                return await _Transaction(connection).fetch(statement, **values)

    async def execute(self, statement: Statement, **values: Any) -> int:
        with self.errors():
            async with self._connection() as connection:
                return await _Transaction(connection).execute(statement, **values)

    async def execute_many(self, statement: Statement, rows: Sequence[Mapping[str, Any]]) -> None:
        with self.errors():
            async with self._connection() as connection:
                await _Transaction(connection).execute_many(statement, rows)

    async def run(self, text: str) -> None:
        with self.errors():
            async with self._connection() as connection:
                await connection.execute(text)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        with self.errors():
            # Named, because the fences rely on it: each statement must see what was committed before it began.
            async with (
                self._connection() as connection,
                connection.transaction(isolation="read_committed"),
            ):
                yield _Transaction(connection)


class _Transaction:
    """Statements on one connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def fetch(self, statement: Statement, **values: Any) -> Sequence[Any]:
        rows: Sequence[Any] = await self._connection.fetch(statement.text, *[values[name] for name in statement.names])
        return rows

    async def execute(self, statement: Statement, **values: Any) -> int:
        answer: str = await self._connection.execute(statement.text, *[values[name] for name in statement.names])
        return int(answer.rpartition(" ")[2]) if answer[-1].isdigit() else 0

    async def execute_many(self, statement: Statement, rows: Sequence[Mapping[str, Any]]) -> None:
        await self._connection.executemany(statement.text, [[row[name] for name in statement.names] for row in rows])

    async def run(self, text: str) -> None:
        await self._connection.execute(text)


def _set(event: asyncio.Event, connection: Any) -> None:
    event.set()


async def _nothing(connection: Any) -> None:
    """What a connection needs before it goes back to the pool."""


class PostgresListener:
    """Listens on a connection of its own, and connects again when it is cut: polling covers the gap."""

    def __init__(self, url: str, name: str, channel: str) -> None:
        self._url = url
        self._name = name
        self._channel = channel
        self._on_wake: list[Callable[[str], None]] = []
        self._task: asyncio.Task[None] | None = None

    def start(self, on_wake: Callable[[str], None]) -> None:
        self._on_wake.append(on_wake)
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name="pillarbox-listen")

    async def stop(self) -> None:
        task, self._task = self._task, None
        self._on_wake.clear()
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _told(self, connection: Any, pid: int, channel: str, stream: object) -> None:
        for on_wake in self._on_wake:
            on_wake(str(stream))

    async def _listen(self) -> None:
        while True:
            closed = asyncio.Event()
            try:
                connection = await asyncpg.connect(self._url, timeout=_CONNECT_SECONDS)
                try:
                    connection.add_termination_listener(partial(_set, closed))
                    await connection.add_listener(self._channel, self._told)
                    await closed.wait()
                finally:
                    connection.terminate()
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.warning(
                    "%s: cannot listen for wake-ups (%s); polling goes on",
                    self._name,
                    type(error).__name__,
                    extra={"action": "listen_failed"},
                )
            await asyncio.sleep(_LISTEN_RETRY_SECONDS)
