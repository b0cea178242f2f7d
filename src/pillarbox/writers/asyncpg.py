"""Events in the caller's transaction on an asyncpg connection."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import asyncpg

from pillarbox.writers._statements import (
    POSTGRES_NUMBERED,
    no_transaction_on_a_pool,
    not_in_transaction,
    question,
    statements,
    translated,
)
from pillarbox.writing import Asked, Batch, Deferred, Question


def judge(error: Exception) -> str:
    if isinstance(error, asyncpg.UniqueViolationError):
        return "duplicate"
    return "no table" if isinstance(error, asyncpg.UndefinedTableError) else ""


def _refuse_pool(handle: Any) -> None:
    if isinstance(handle, asyncpg.Pool):
        raise no_transaction_on_a_pool()


def write(handle: Any, batch: Batch) -> Deferred:
    """Insert events when awaited."""
    _refuse_pool(handle)
    if not handle.is_in_transaction():
        raise not_in_transaction("asyncpg connection", "open a transaction with `async with connection.transaction():`")
    return Deferred(partial(_write, handle, batch), handle.is_in_transaction, handle.terminate)


async def _write(connection: Any, batch: Batch) -> None:
    with translated(batch.names, batch, judge):
        for text, values in statements(batch, POSTGRES_NUMBERED):
            await connection.execute(text, *values)


def exists(handle: Any, asked: Question) -> Asked:
    """Whether the outbox knows this event, when awaited."""
    _refuse_pool(handle)
    return partial(_exists, handle, asked)


async def _exists(connection: Any, asked: Question) -> bool:
    text, values = question(asked, POSTGRES_NUMBERED)
    with translated(asked.names, None, judge):
        return await connection.fetchrow(text, *values) is not None


@asynccontextmanager
async def begin(handle: Any) -> AsyncIterator[Any]:
    """A transaction on a connection of this pool or on this connection, or a savepoint in the one that is open."""
    async with AsyncExitStack() as stack:
        connection = handle
        if isinstance(handle, asyncpg.Pool):
            connection = await stack.enter_async_context(handle.acquire())
        await stack.enter_async_context(connection.transaction())
        yield connection
