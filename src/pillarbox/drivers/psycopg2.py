"""A psycopg2 connection, cursor or pool."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from psycopg2.extensions import TRANSACTION_STATUS_IDLE, connection, cursor
from psycopg2.pool import AbstractConnectionPool

from pillarbox.drivers.contract import Answer, Driver, PoolDriver, Statement, TextBlocks, unknown_handle
from pillarbox.sql.dialects import POSTGRES


class Psycopg2(TextBlocks):
    dialect = POSTGRES
    handle_name = "psycopg2 connection"
    remedy = "leave connection.autocommit at False"

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def in_transaction(self) -> bool:
        return bool(self.connection.get_transaction_status() != TRANSACTION_STATUS_IDLE)

    def begins_by_itself(self) -> bool:
        return not self.connection.autocommit

    def ask(self, statement: Statement) -> Answer:
        # A plain cursor, even if the connection's default is another kind.
        with self.connection.cursor(cursor_factory=cursor) as own:
            own.execute(statement.text, tuple(statement.values) or None)
            return Answer(own.fetchall() if statement.has_rows else (), own.rowcount)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        if self.begins_by_itself() and not self.in_transaction():
            # By its own methods: after the text COMMIT the driver would not begin again.
            with self.connection:
                yield self.connection
        else:
            async with super().begin() as begun:
                yield begun

    def is_closed(self) -> bool:
        return bool(self.connection.closed)


@contextmanager
def _acquired(pool: AbstractConnectionPool) -> Iterator[Any]:
    taken = pool.getconn()
    try:
        yield taken
    finally:
        pool.putconn(taken)


def driver(handle: Any) -> Driver:
    if isinstance(handle, AbstractConnectionPool):
        return PoolDriver(partial(_acquired, handle), Psycopg2, is_awaited=False, places=handle.maxconn)
    if isinstance(handle, cursor):
        handle = handle.connection
    if not isinstance(handle, connection):
        raise unknown_handle(handle, "pass one of its connections")
    return Psycopg2(handle)
