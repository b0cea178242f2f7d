"""An asyncmy connection, cursor or pool."""

from typing import Any

from asyncmy.cursors import Cursor
from asyncmy.pool import Pool

from pillarbox.drivers._mysql import MysqlDriver
from pillarbox.drivers.contract import Answer, Driver, PoolDriver, Statement, unknown_handle


class AsyncMy(MysqlDriver):
    is_awaited = True

    async def ask(self, statement: Statement) -> Answer:
        if statement.text in ("COMMIT", "ROLLBACK"):
            # Not by a cursor: after one, asyncmy keeps the connection's old status if the new one has no flags, and so
            # believes that the transaction is open.
            await getattr(self.connection, statement.text.lower())()
            return Answer((), 0)
        # A plain cursor, even if the connection's default is another kind.
        async with self.connection.cursor(Cursor) as cursor:
            await cursor.execute(statement.text, statement.values)
            return Answer(await cursor.fetchall() if statement.has_rows else (), cursor.rowcount)

    def is_closed(self) -> bool:
        return not self.connection.connected

    def abandon(self) -> None:
        self.connection.close()


def driver(handle: Any) -> Driver:
    if isinstance(handle, Pool):
        return PoolDriver(handle.acquire, AsyncMy)
    connection = getattr(handle, "connection", handle)  # of a cursor
    if not hasattr(connection, "get_autocommit"):
        raise unknown_handle(handle, "pass one of its connections")
    return AsyncMy(connection)
