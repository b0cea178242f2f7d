"""Events in the caller's transaction on an ``aiosqlite`` connection."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from time import sleep

import aiosqlite

from pillarbox.writers._sqlite_rules import judge, refuse_autocommit
from pillarbox.writers._statements import SQLITE, question, statements, translated
from pillarbox.writing import Asked, Batch, Deferred, Question


def write(handle: aiosqlite.Connection, batch: Batch) -> Deferred:
    """Insert events when awaited."""
    refuse_autocommit(handle)
    return Deferred(partial(_write, handle, batch), lambda: handle.in_transaction, partial(_abandon, handle))


def _abandon(connection: aiosqlite.Connection) -> None:
    connection.stop()
    # Its thread closes it as soon as no statement is running; a caller's close() before that would wait for ever.
    with suppress(ValueError):
        for _ in range(1000):
            _ = connection.in_transaction
            sleep(0.001)


async def _write(connection: aiosqlite.Connection, batch: Batch) -> None:
    with translated(batch.names, batch, judge):
        for text, values in statements(batch, SQLITE):
            await connection.execute(text, values)


def exists(handle: aiosqlite.Connection, asked: Question) -> Asked:
    """Whether the outbox knows this event, when awaited."""
    return partial(_exists, handle, asked)


async def _exists(connection: aiosqlite.Connection, asked: Question) -> bool:
    with translated(asked.names, None, judge):
        async with connection.execute(*question(asked, SQLITE)) as cursor:
            return await cursor.fetchone() is not None


@asynccontextmanager
async def begin(handle: aiosqlite.Connection) -> AsyncIterator[aiosqlite.Connection]:
    """A transaction, or a savepoint in the one that is open."""
    # IMMEDIATE: a transaction that reads first and writes later would fail when another has written.
    begin, commit, rollback = ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK")
    if handle.in_transaction:
        begin, commit, rollback = ("SAVEPOINT pillarbox", "RELEASE pillarbox", "ROLLBACK TO pillarbox")
    await handle.execute(begin)
    try:
        yield handle
        await handle.execute(commit)
    except BaseException:
        if handle.in_transaction:
            await handle.execute(rollback)
        raise
