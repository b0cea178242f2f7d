"""Events in the caller's transaction on an asyncmy connection or cursor."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

from asyncmy.cursors import Cursor

from pillarbox.writers._mysql_rules import in_transaction, judge, refuse_autocommit
from pillarbox.writers._statements import MYSQL, no_transaction_on_a_pool, question, statements, translated
from pillarbox.writing import Asked, Batch, Deferred, Question


def _connection(handle: Any) -> Any:
    # A cursor has the connection that made it; a pool has none yet.
    connection = getattr(handle, "connection", handle)
    if not hasattr(connection, "get_autocommit"):
        raise no_transaction_on_a_pool()
    return connection


def _cursor(connection: Any) -> Any:
    """A plain one, whatever kind the connection makes by default."""
    return connection.cursor(Cursor)


def write(handle: Any, batch: Batch) -> Deferred:
    """Insert events when awaited."""
    connection = _connection(handle)
    refuse_autocommit(connection)
    return Deferred(partial(_write, connection, batch), partial(in_transaction, connection), connection.close)


async def _write(connection: Any, batch: Batch) -> None:
    with translated(batch.names, batch, judge):
        async with _cursor(connection) as cursor:
            for text, values in statements(batch, MYSQL):
                await cursor.execute(text, values)


def exists(handle: Any, asked: Question) -> Asked:
    """Whether the outbox knows this event, when awaited."""
    connection = _connection(handle)
    return partial(_exists, connection, asked)


async def _exists(connection: Any, asked: Question) -> bool:
    with translated(asked.names, None, judge):
        async with _cursor(connection) as cursor:
            await cursor.execute(*question(asked, MYSQL))
            return await cursor.fetchone() is not None


@asynccontextmanager
async def begin(handle: Any) -> AsyncIterator[Any]:
    """A transaction on a connection of this pool or on this connection, or a savepoint in the one that is open."""
    async with AsyncExitStack() as stack:
        connection = handle
        if not hasattr(handle, "get_autocommit"):
            connection = await stack.enter_async_context(handle.acquire())
        # Without autocommit a transaction of the caller's may have begun with any statement.
        nested = in_transaction(connection)
        await _run(connection, "SAVEPOINT pillarbox" if nested else "BEGIN")
        try:
            yield connection
            await _run(connection, "RELEASE SAVEPOINT pillarbox" if nested else "COMMIT")
        except BaseException:
            # It fails where nothing is left to roll back: a cancelled statement closes the connection, and a deadlock
            # ends the transaction with its savepoints. What the caller has to see is the first error.
            with suppress(Exception):
                await _run(connection, "ROLLBACK TO SAVEPOINT pillarbox" if nested else "ROLLBACK")
            raise


async def _run(connection: Any, text: str) -> None:
    async with _cursor(connection) as cursor:
        await cursor.execute(text)
