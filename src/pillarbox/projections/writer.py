"""Writes the row of a projection: the function that applications use."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from pillarbox.drivers import driver_of
from pillarbox.drivers.awaiting import YesOrNo
from pillarbox.event import Event
from pillarbox.outbox.transaction import Transaction
from pillarbox.projections import sql
from pillarbox.projections.row import Row, Version


def upsert(
    tx: Any,
    table: str,
    key: Mapping[str, Any],
    values: Mapping[str, Any],
    version: int | Event | None = None,
    *,
    version_column: str = "version",
    id_column: str = "event_id",
) -> YesOrNo:
    """Insert a row, or change these values of the row with this key. Returns whether it was written.

    tx: a connection, cursor or session of the application; on MongoDB also a client, a database or a collection. The
    write is one statement in the transaction that ``tx`` has open, and exact without one. Await the call on drivers
    that have to be awaited.
    table: its name as the database has it, also ``schema.table``; on MongoDB a collection.
    key: the columns of the primary key or of a unique index, with their values.
    version: the newer one wins. A row with the same or a newer version stays as it is, and the answer is false. A whole
    number is kept in ``version_column``; an event's aggregate_version is kept there and its id in ``id_column``, which
    decides between events with the same version.
    """
    made = None if version is None else Version.of(version)
    row = Row(table, dict(key), dict(values), made, version_column, id_column)
    row.check()
    driver = driver_of(tx.connection if isinstance(tx, Transaction) else tx)
    steps = sql if driver.family == "sql" else import_module("pillarbox.projections.mongo")
    steps.check(row)
    if driver.is_pool and driver.family == "sql":
        driver.check()  # raises: a pool has no connection of its own
    return YesOrNo(driver, partial(steps.upsert, row), "upsert")
