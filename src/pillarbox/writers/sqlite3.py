"""Events in the caller's transaction on a ``sqlite3`` connection or cursor."""

import sqlite3
from collections.abc import Sequence
from functools import cache

from pillarbox.errors import DuplicateEvent, NotInTransaction, SchemaError
from pillarbox.event import Event
from pillarbox.names import Names
from pillarbox.stores.sql.rows import write_row
from pillarbox.stores.sql.statements import SHARED, Statement
from pillarbox.stores.sqlite import DIALECT, cell


@cache
def _insert(names: Names) -> str:
    return Statement(SHARED["add"], DIALECT, names.parts).text


def write(handle: sqlite3.Connection | sqlite3.Cursor, events: Sequence[Event], names: Names) -> None:
    """Insert events; they are there when the caller commits, and gone when it rolls back."""
    connection = handle.connection if isinstance(handle, sqlite3.Cursor) else handle
    # With an isolation level, sqlite3 opens the transaction itself before the first INSERT.
    if connection.isolation_level is None and not connection.in_transaction:
        raise NotInTransaction(
            "outbox.add needs an open transaction on this sqlite3 connection; "
            'run connection.execute("BEGIN") first, so that the event and your data commit together'
        )
    rows = [{name: cell(value) for name, value in write_row(event).items()} for event in events]
    try:
        connection.executemany(_insert(names), rows)
    except sqlite3.IntegrityError as error:
        raise DuplicateEvent(
            "an event with this id is in the outbox already; give another id, or leave it out"
        ) from error
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            raise SchemaError(
                f"this database has no outbox '{names.prefix}' yet; make its tables with `await store.migrate()`"
            ) from error
        raise
