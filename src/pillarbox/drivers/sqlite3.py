"""A ``sqlite3`` connection or cursor."""

import sqlite3
from typing import Any

from pillarbox.drivers.contract import Answer, Driver, Statement, TextBlocks
from pillarbox.sql.dialects import SQLITE


class Sqlite3(TextBlocks):
    """``connection``: of sqlite3, or with the same interface."""

    dialect = SQLITE
    handle_name = "SQLite connection"
    remedy = 'run connection.execute("BEGIN") first'
    # A transaction that reads first and writes later fails if another has written in between.
    begin_text = "BEGIN IMMEDIATE"

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def in_transaction(self) -> bool:
        return bool(self.connection.in_transaction)

    def begins_by_itself(self) -> bool:
        # Since Python 3.12 a connection can have autocommit, True or False, in place of an isolation level.
        autocommit = getattr(self.connection, "autocommit", None)
        return not autocommit if isinstance(autocommit, bool) else self.connection.isolation_level is not None

    def ask(self, statement: Statement) -> Any:
        cursor = self.connection.execute(statement.text, statement.values)
        if not statement.has_rows:
            return Answer((), cursor.rowcount)
        cursor.row_factory = None
        rows = cursor.fetchall()
        return Answer(rows, len(rows))


def driver(handle: sqlite3.Connection | sqlite3.Cursor) -> Driver:
    return Sqlite3(handle.connection if isinstance(handle, sqlite3.Cursor) else handle)
