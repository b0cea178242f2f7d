"""An ``aiosqlite`` connection."""

from contextlib import suppress
from sqlite3 import ProgrammingError
from threading import Thread
from time import sleep
from typing import Any

import aiosqlite

from pillarbox.drivers.contract import Answer, Driver, Statement, unknown_handle
from pillarbox.drivers.sqlite3 import Sqlite3


class AioSqlite(Sqlite3):
    is_awaited = True

    async def ask(self, statement: Statement) -> Answer:
        cursor = await self.connection.execute(statement.text, statement.values)
        if not statement.has_rows:
            return Answer((), cursor.rowcount)
        cursor.row_factory = None
        rows = list(await cursor.fetchall())
        return Answer(rows, len(rows))

    def abandon(self) -> None:
        # Asked from a thread without an event loop, the connection's thread answers to none: this one may be closed
        # by the time of the answer.
        asking = Thread(target=self.connection.stop)
        asking.start()
        asking.join()
        # The connection's thread closes it as soon as no statement runs. A close() of the caller before that waits
        # forever.
        with suppress(ValueError):
            for _ in range(1000):
                with suppress(ProgrammingError):  # closed a moment ago, and not yet known to be
                    self.in_transaction()
                sleep(0.001)


def driver(handle: Any) -> Driver:
    if not isinstance(handle, aiosqlite.Connection):
        raise unknown_handle(handle, "pass its connection")
    return AioSqlite(handle)
