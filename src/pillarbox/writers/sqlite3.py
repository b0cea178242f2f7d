"""Events in the caller's transaction on a ``sqlite3`` connection or cursor."""

import sqlite3

from pillarbox.writers._sqlite_rules import judge, refuse_autocommit
from pillarbox.writers._statements import SQLITE, question, statements, translated
from pillarbox.writing import Batch, Question


def _connection(handle: sqlite3.Connection | sqlite3.Cursor) -> sqlite3.Connection:
    return handle.connection if isinstance(handle, sqlite3.Cursor) else handle


def write(handle: sqlite3.Connection | sqlite3.Cursor, batch: Batch) -> None:
    """Insert events; they are there when the caller commits, and gone when it rolls back."""
    connection = _connection(handle)
    refuse_autocommit(connection)
    with translated(batch.names, batch, judge):
        for text, values in statements(batch, SQLITE):
            connection.execute(text, values)


def exists(handle: sqlite3.Connection | sqlite3.Cursor, asked: Question) -> bool:
    """Whether the outbox knows this event."""
    with translated(asked.names, None, judge):
        return _connection(handle).execute(*question(asked, SQLITE)).fetchone() is not None
