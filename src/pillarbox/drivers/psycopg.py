"""A psycopg 3 connection or cursor, plain or asynchronous, or a pool of psycopg_pool."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from pillarbox.drivers.contract import Answer, Driver, PoolDriver, Statement, unknown_handle
from pillarbox.sql.dialects import POSTGRES


class Psycopg(Driver):
    dialect = POSTGRES
    handle_name = "psycopg connection"
    remedy = "open a transaction with `with connection.transaction():`"

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def in_transaction(self) -> bool:
        return bool(self.connection.info.transaction_status != TransactionStatus.IDLE)

    def begins_by_itself(self) -> bool:
        return not self.connection.autocommit

    def ask(self, statement: Statement) -> Any:
        cursor = self.connection.cursor(row_factory=tuple_row)
        cursor.execute(statement.text.encode(), statement.values)
        return Answer(cursor.fetchall() if statement.has_rows else (), cursor.rowcount)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        with self.connection.transaction():
            yield self.connection

    def is_closed(self) -> bool:
        return bool(self.connection.closed)


class PsycopgAsync(Psycopg):
    is_awaited = True
    remedy = "open a transaction with `async with connection.transaction():`"

    async def ask(self, statement: Statement) -> Answer:
        cursor = self.connection.cursor(row_factory=tuple_row)
        await cursor.execute(statement.text.encode(), statement.values)
        return Answer(await cursor.fetchall() if statement.has_rows else (), cursor.rowcount)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with self.connection.transaction():
            yield self.connection

    def abandon(self) -> None:
        self.connection.pgconn.finish()


def driver(handle: Any) -> Driver:
    if type(handle).__module__.startswith("psycopg_pool"):
        from psycopg_pool import AsyncConnectionPool, ConnectionPool  # not always installed

        if isinstance(handle, AsyncConnectionPool):
            return PoolDriver(handle.connection, PsycopgAsync, places=handle.max_size)
        if isinstance(handle, ConnectionPool):
            return PoolDriver(handle.connection, Psycopg, is_awaited=False, places=handle.max_size)
    connection = handle.connection if isinstance(handle, psycopg.Cursor | psycopg.AsyncCursor) else handle
    if isinstance(connection, psycopg.AsyncConnection):
        return PsycopgAsync(connection)
    if isinstance(connection, psycopg.Connection):
        return Psycopg(connection)
    raise unknown_handle(handle, "pass one of its connections")
