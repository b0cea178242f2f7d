"""An asyncmy connection, cursor or pool."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asyncmy.cursors import Cursor
from asyncmy.pool import Pool

from pillarbox.drivers._mysql import MysqlDriver
from pillarbox.drivers.contract import Answer, Driver, PoolDriver, Statement, unknown_handle


class AsyncMy(MysqlDriver):
    is_awaited = True

    async def ask(self, statement: Statement) -> Answer:
        # A plain cursor, even if the connection's default is another kind.
        async with self.connection.cursor(Cursor) as cursor:
            await cursor.execute(statement.text, statement.values)
            return Answer(await cursor.fetchall() if statement.has_rows else (), cursor.rowcount)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        if self.in_transaction() and self.begins_by_itself():
            # asyncmy does not store a status without any flag, such as that of a COMMIT without autocommit. So its flag
            # may be old, and the block would be a savepoint that nobody commits. It stores the status of a ping.
            await self.connection.ping(reconnect=False)
        async with super().begin() as connection:
            yield connection

    def is_closed(self) -> bool:
        return not self.connection.connected

    def abandon(self) -> None:
        self.connection.close()


def driver(handle: Any) -> Driver:
    if isinstance(handle, Pool):
        return PoolDriver(handle.acquire, AsyncMy, places=handle.maxsize)
    connection = getattr(handle, "connection", handle)  # of a cursor
    if not hasattr(connection, "get_autocommit"):
        raise unknown_handle(handle, "pass one of its connections")
    return AsyncMy(connection)
