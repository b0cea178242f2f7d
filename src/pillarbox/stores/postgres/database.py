"""asyncpg under the PostgreSQL store: statements, transactions, and the driver's errors as ours."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import asyncpg

from pillarbox.errors import ConfigError, DuplicateEvent, NotAllowed, SchemaError, StoreDown, StoreError
from pillarbox.sql.statements import SqlText
from pillarbox.stores.postgres.connections import COMMAND_SECONDS, Connections
from pillarbox.stores.sql.database import Connection
from pillarbox.tasks import PerLoop

T = TypeVar("T")

# The server or another transaction was in the way; the same statement can succeed a moment later.
_PASSING = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.LockNotAvailableError,
    asyncpg.InternalClientError,
)
_NO_TABLE = (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError, asyncpg.UndefinedColumnError)


class PostgresDatabase:
    """Runs statements on connections of any origin."""

    can_skip_locked = True

    def __init__(self, connections: Connections, name: str, url: str = "") -> None:
        self._connections = connections
        self.url = url
        self.name = name
        self.is_open = False
        self._opening = PerLoop(asyncio.Lock)

    async def open(self, *, create: bool = False) -> None:
        async with self._opening():
            with self._errors():
                await self._connections.open()
            self.is_open = True

    async def close(self) -> None:
        self.is_open = False
        await self._connections.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except asyncpg.UniqueViolationError as error:
            raise DuplicateEvent(
                "an event with this id is in this stream already; give another id, or leave it out"
            ) from error
        except _NO_TABLE as error:
            raise SchemaError(
                f"{self.name}: {error}; make the tables with `pillarbox init`, or `await store.migrate()`"
            ) from error
        except asyncpg.InvalidCatalogNameError as error:
            raise StoreError(f"{self.name}: there is no such database; create it, or correct the URL") from error
        except asyncpg.InvalidAuthorizationSpecificationError as error:
            raise StoreError(f"{self.name}: user or password refused; correct the URL") from error
        except asyncpg.CheckViolationError as error:
            # Without the driver's text: it quotes the row.
            raise StoreError(
                f"{self.name}: a row breaks the check {error.constraint_name}; write events with Pillarbox, "
                "or correct the row first"
            ) from None
        except OverflowError as error:
            raise StoreError(
                f"{self.name}: a row has an instant that Python cannot hold ({error}); correct it"
            ) from error
        except asyncpg.InsufficientPrivilegeError as error:
            raise NotAllowed(f"{self.name}: {error}; grant it to the user of the relay") from error
        except asyncpg.exceptions.ClientConfigurationError:
            # Without the driver's text: it can quote the URL.
            raise ConfigError(
                f"{self.name}: the driver does not understand the URL; check its options, such as sslmode"
            ) from None
        except (OSError, TimeoutError, asyncpg.InterfaceError, *_PASSING) as error:
            raise StoreDown(f"{self.name} cannot be used now ({type(error).__name__}: {error})") from error
        except asyncpg.PostgresError as error:
            raise StoreError(f"{self.name}: {type(error).__name__}: {error}") from error

    def _connection(self) -> AbstractAsyncContextManager[Any]:
        if not self.is_open:
            raise StoreDown(f"{self.name} is closed; open the store first")
        return self._connections.one()

    async def fetch(self, statement: SqlText, **values: Any) -> Sequence[Any]:
        with self._errors():
            async with self._connection() as connection:
                return await _Statements(connection).fetch(statement, **values)

    async def is_pooled(self) -> bool:
        """Whether a pooler stands between: the server says another process than the one that we logged in to."""
        with self._errors():
            async with self._connection() as connection:
                there = await connection.fetchval("SELECT pg_backend_pid()", timeout=COMMAND_SECONDS)
                return bool(connection.get_server_pid() != there)

    async def execute(self, statement: SqlText, **values: Any) -> int:
        with self._errors():
            async with self._connection() as connection:
                return await _Statements(connection).execute(statement, **values)

    async def execute_many(self, statement: SqlText, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._errors():
            async with self._connection() as connection:
                await _Statements(connection).execute_many(statement, rows)

    async def run(self, text: str) -> None:
        with self._errors():
            async with self._connection() as connection:
                await _Statements(connection).run(text)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        with self._errors():
            # Explicit, because the fences rely on it: each statement must see all commits before its start.
            async with self._connection() as connection, connection.transaction(isolation="read_committed"):
                yield _Statements(connection)

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        async with self.transaction() as tx:
            return await work(tx)


class _Statements:
    """Statements on one connection. Each has a time limit, because a pool of the application may have none."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def fetch(self, statement: SqlText, **values: Any) -> Sequence[Any]:
        arguments = [values[name] for name in statement.names]
        rows: Sequence[Any] = await self._connection.fetch(statement.text, *arguments, timeout=COMMAND_SECONDS)
        return rows

    async def execute(self, statement: SqlText, **values: Any) -> int:
        arguments = [values[name] for name in statement.names]
        answer: str = await self._connection.execute(statement.text, *arguments, timeout=COMMAND_SECONDS)
        return int(answer.rpartition(" ")[2]) if answer[-1].isdigit() else 0

    async def execute_many(self, statement: SqlText, rows: Sequence[Mapping[str, Any]]) -> None:
        arguments = [[row[name] for name in statement.names] for row in rows]
        await self._connection.executemany(statement.text, arguments, timeout=COMMAND_SECONDS)

    async def run(self, text: str) -> None:
        await self._connection.execute(text, timeout=COMMAND_SECONDS)
