"""What the writers for SQLite share."""

import sqlite3
from typing import Any

from pillarbox.writers._statements import not_in_transaction


def commits_by_itself(connection: Any) -> bool:
    """Whether an INSERT now is no part of a transaction. ``connection``: of sqlite3, or one that looks like it."""
    # Since Python 3.12 a connection can have autocommit, True or False, in place of an isolation level.
    autocommit = getattr(connection, "autocommit", None)
    begins_by_itself = not autocommit if isinstance(autocommit, bool) else connection.isolation_level is not None
    return not begins_by_itself and not connection.in_transaction


def refuse_autocommit(connection: Any) -> None:
    if commits_by_itself(connection):
        raise not_in_transaction("SQLite connection", 'run connection.execute("BEGIN") first')


def judge(error: Exception) -> str:
    if isinstance(error, sqlite3.IntegrityError):
        return "duplicate"
    return "no table" if isinstance(error, sqlite3.OperationalError) and "no such table" in str(error) else ""
