"""An asyncpg connection or pool."""

from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from pillarbox.drivers.contract import Answer, Driver, PoolDriver, Statement, unknown_handle
from pillarbox.sql.dialects import POSTGRES_NUMBERED


class Asyncpg(Driver):
    is_awaited = True
    dialect = POSTGRES_NUMBERED
    handle_name = "asyncpg connection"
    remedy = "open a transaction with `async with connection.transaction():`"

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def in_transaction(self) -> bool:
        return bool(self.connection.is_in_transaction())

    async def ask(self, statement: Statement) -> Answer:
        if statement.has_rows:
            rows = await self.connection.fetch(statement.text, *statement.values)
            return Answer(rows, len(rows))
        status = await self.connection.execute(statement.text, *statement.values)
        count = status.rpartition(" ")[2]  # as in "INSERT 0 3"
        return Answer((), int(count) if count.isdigit() else 0)

    @asynccontextmanager
    async def begin(self) -> Any:
        async with self.connection.transaction():
            yield self.connection

    def is_closed(self) -> bool:
        try:
            return bool(self.connection.is_closed())
        except asyncpg.InterfaceError:  # it was given back to its pool
            return False

    def abandon(self) -> None:
        self.connection.terminate()


def driver(handle: Any) -> Driver:
    if isinstance(handle, asyncpg.Pool):
        return PoolDriver(handle.acquire, Asyncpg, places=handle.get_max_size())
    if not hasattr(handle, "is_in_transaction"):
        raise unknown_handle(handle, "pass one of its connections")
    return Asyncpg(handle)
