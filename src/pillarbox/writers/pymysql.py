"""Events in the caller's transaction on a PyMySQL connection or cursor."""

from typing import Any

import pymysql
from pymysql.cursors import Cursor

from pillarbox.writers._mysql_rules import judge, refuse_autocommit
from pillarbox.writers._statements import MYSQL, question, statements, translated
from pillarbox.writing import Batch, Question


def _connection(handle: Any) -> "pymysql.Connection[Any]":
    connection: pymysql.Connection[Any] = handle.connection if isinstance(handle, Cursor) else handle
    return connection


def write(handle: Any, batch: Batch) -> None:
    """Insert events; they are there when the caller commits, and gone when it rolls back."""
    connection = _connection(handle)
    refuse_autocommit(connection)
    with translated(batch.names, batch, judge), connection.cursor(Cursor) as cursor:
        for text, values in statements(batch, MYSQL):
            cursor.execute(text, values)


def exists(handle: Any, asked: Question) -> bool:
    """Whether the outbox knows this event."""
    with translated(asked.names, None, judge), _connection(handle).cursor(Cursor) as cursor:
        cursor.execute(*question(asked, MYSQL))
        return cursor.fetchone() is not None
