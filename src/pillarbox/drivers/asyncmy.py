"""An asyncmy connection, cursor or pool."""

from contextlib import asynccontextmanager, suppress
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
    async def begin(self) -> Any:
        # Without autocommit any statement of the caller may have begun a transaction.
        nested = self.in_transaction()
        await self.ask(Statement("SAVEPOINT pillarbox" if nested else "BEGIN"))
        try:
            yield self.connection
            await self.ask(Statement("RELEASE SAVEPOINT pillarbox" if nested else "COMMIT"))
        except BaseException:
            # It fails where nothing is left to roll back: a cancelled statement closes the connection, and a deadlock
            # ends the transaction with its savepoints. The caller has to see the first error.
            with suppress(Exception):
                await self.ask(Statement("ROLLBACK TO SAVEPOINT pillarbox" if nested else "ROLLBACK"))
            raise

    def abandon(self) -> None:
        self.connection.close()


def driver(handle: Any) -> Driver:
    if isinstance(handle, Pool):
        return PoolDriver(handle.acquire, AsyncMy)
    connection = getattr(handle, "connection", handle)  # of a cursor
    if not hasattr(connection, "get_autocommit"):
        raise unknown_handle(handle, "pass one of its connections")
    return AsyncMy(connection)
