"""Events in the caller's transaction on a psycopg 3 connection or cursor, plain or asynchronous."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus

from pillarbox.errors import ConfigError
from pillarbox.writers._statements import POSTGRES, not_in_transaction, question, statements, translated
from pillarbox.writing import Asked, Batch, Deferred, Question

_Plain: TypeAlias = psycopg.Connection[Any]
_Awaited: TypeAlias = psycopg.AsyncConnection[Any]


def judge(error: Exception) -> str:
    if isinstance(error, psycopg.errors.UniqueViolation):
        return "duplicate"
    return "no table" if isinstance(error, psycopg.errors.UndefinedTable) else ""


def _connection(handle: Any) -> _Plain | _Awaited:
    connection = handle.connection if isinstance(handle, psycopg.Cursor | psycopg.AsyncCursor) else handle
    if not isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        raise ConfigError(f"the outbox cannot write with a {type(handle).__qualname__}; pass one of its connections")
    return connection


def _in_transaction(connection: _Plain | _Awaited) -> bool:
    return connection.info.transaction_status != TransactionStatus.IDLE


def write(handle: Any, batch: Batch) -> Deferred | None:
    """Insert events, at once or when awaited."""
    connection = _connection(handle)
    if connection.autocommit and not _in_transaction(connection):
        raise not_in_transaction("psycopg connection", "open a transaction with `with connection.transaction():`")
    if isinstance(connection, psycopg.AsyncConnection):
        return Deferred(
            partial(_write, connection, batch), partial(_in_transaction, connection), connection.pgconn.finish
        )
    with translated(batch.names, batch, judge):
        for text, values in statements(batch, POSTGRES):
            connection.execute(text.encode(), values)
    return None


async def _write(connection: _Awaited, batch: Batch) -> None:
    with translated(batch.names, batch, judge):
        for text, values in statements(batch, POSTGRES):
            await connection.execute(text.encode(), values)


def exists(handle: Any, asked: Question) -> bool | Asked:
    """Whether the outbox knows this event, at once or when awaited."""
    connection = _connection(handle)
    if isinstance(connection, psycopg.AsyncConnection):
        return partial(_exists, connection, asked)
    text, values = question(asked, POSTGRES)
    with translated(asked.names, None, judge):
        return connection.execute(text.encode(), values).fetchone() is not None


async def _exists(connection: _Awaited, asked: Question) -> bool:
    text, values = question(asked, POSTGRES)
    with translated(asked.names, None, judge):
        return await (await connection.execute(text.encode(), values)).fetchone() is not None


@asynccontextmanager
async def begin(handle: Any) -> AsyncIterator[_Awaited]:
    """A transaction on a connection of this pool or on this connection, or a savepoint in the one that is open."""
    async with AsyncExitStack() as stack:
        # psycopg_pool is a package of its own, which need not be there.
        connection = handle
        if type(handle).__module__.startswith("psycopg_pool"):
            connection = await stack.enter_async_context(handle.connection())
        connection = _connection(connection)
        if not isinstance(connection, psycopg.AsyncConnection):
            raise ConfigError(
                "outbox.transaction is for drivers that have to be awaited; on this connection call outbox.add"
            )
        await stack.enter_async_context(connection.transaction())
        yield connection
