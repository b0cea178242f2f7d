"""The statements of the inbox on a SQL database."""

import sqlite3
from collections.abc import Sequence
from functools import cache
from typing import Any, Final
from uuid import UUID

from pillarbox.drivers.contract import Answer, Driver, Statement, Steps
from pillarbox.inbox.work import INBOX, MAX_ROWS, Entry, Place, Version
from pillarbox.names import Names
from pillarbox.outbox.work import explain
from pillarbox.sql.dialects import Dialect
from pillarbox.uuids import uuid_of, uuid_of_text

_COLUMNS: Final = {"consumer": "text", "event_id": "uuid", "aggregate_id": "text", "aggregate_version": "bigint"}
_WIDTH: Final = len(_COLUMNS)
_LOCK_TIMEOUT = "30s"  # of PostgreSQL, which else waits for as long as the other transaction lives
_HAS_RETURNING = sqlite3.sqlite_version_info >= (3, 35)


def record(place: Place, entry: Entry, is_limited: bool, driver: Driver) -> Steps[bool]:
    """Insert an event; false: it was there. is_limited: wait only so long for another transaction's copy."""
    driver.check(INBOX)
    dialect = driver.dialect
    limit = _LOCK_TIMEOUT if is_limited and dialect.database == "postgresql" else None
    text = _insert_text(place.names.parts["inbox"], dialect, 1, limit)
    answer = yield from _ask(driver, place.names, text, _row(place, entry, dialect))
    # MySQL counts a row that it updated as two.
    return answer.affected == 1


def record_all(place: Place, entries: Sequence[Entry], is_limited: bool, driver: Driver) -> Steps[set[UUID]]:
    """Insert events with different ids, in the order of their ids; the ids of those that were not there. is_limited:
    see ``record``."""
    driver.check(INBOX)
    new: set[UUID] = set()
    for start in range(0, len(entries), MAX_ROWS):
        new |= yield from _record_some(place, entries[start : start + MAX_ROWS], is_limited, driver)
    return new


def newer(place: Place, version: Version, driver: Driver) -> Steps[bool]:
    """Raise the version of an aggregate; false: it is as high already."""
    driver.check(INBOX)
    dialect = driver.dialect
    table = place.names.parts["inbox_version"]
    key = [place.consumer, version.digest]
    seen = [version.number, _cell(version.event_id, dialect)]
    if dialect.database != "mysql":
        answer = yield from _ask(driver, place.names, _upsert_text(table, dialect), [*key, version.name, *seen])
        return answer.affected == 1
    # MariaDB has no one statement for it in all of its modes. The first one locks the row, the second one decides.
    yield from _ask(
        driver,
        place.names,
        f"INSERT INTO {table} (consumer, aggregate, name) VALUES (%s, %s, %s) "
        "ON DUPLICATE KEY UPDATE consumer = consumer",
        [*key, version.name],
    )
    answer = yield from _ask(
        driver,
        place.names,
        f"UPDATE {table} SET version = %s, event_id = %s WHERE consumer = %s AND aggregate = %s "
        "AND (version IS NULL OR version < %s OR version = %s AND event_id < %s)",
        [*seen, *key, version.number, *seen],
    )
    return answer.affected == 1


def forget(place: Place, entry: Entry, driver: Driver) -> Steps[bool]:
    """Delete an event; false: it was not there."""
    driver.check(INBOX)
    dialect = driver.dialect
    consumer, event_id = dialect.marks(2)
    text = f"DELETE FROM {place.names.parts['inbox']} WHERE consumer = {consumer} AND event_id = {event_id}"
    answer = yield from _ask(driver, place.names, text, [place.consumer, _cell(entry.id, dialect)])
    return answer.affected == 1


def _record_some(place: Place, entries: Sequence[Entry], is_limited: bool, driver: Driver) -> Steps[set[UUID]]:
    dialect, table = driver.dialect, place.names.parts["inbox"]
    rows = [_row(place, entry, dialect) for entry in entries]
    if dialect.database == "mysql":
        text = _insert_text(table, dialect, len(rows), None)
        answer = yield from _ask(driver, place.names, text, _cells(rows))
        ids = {entry.id for entry in entries}
        if answer.affected == len(rows):
            return ids
        marks = ", ".join(dialect.marks(len(rows)))
        text = f"SELECT event_id FROM {table} WHERE consumer = %s AND event_id IN ({marks}) AND copies > 0"
        values = [place.consumer, *(row[1] for row in rows)]
        answer = yield from _ask(driver, place.names, text, values, has_rows=True)
        return ids - {_id(row[0]) for row in answer.rows}
    if dialect.database == "postgresql":
        # Arrays: one text for any number of rows, without a limit on parameters.
        arrays = [list(column) for column in zip(*rows, strict=True)][1:]
        limit = _LOCK_TIMEOUT if is_limited else None
        text, values = _insert_text(table, dialect, None, limit), [place.consumer, *arrays]
    elif _HAS_RETURNING:
        text, values = _insert_text(table, dialect, len(rows), None), _cells(rows)
    else:
        new = set()
        for entry, row in zip(entries, rows, strict=True):
            answer = yield from _ask(driver, place.names, _insert_text(table, dialect, 1, None), row)
            if answer.affected:
                new.add(entry.id)
        return new
    answer = yield from _ask(driver, place.names, f"{text} RETURNING event_id", values, has_rows=True)
    return {_id(row[0]) for row in answer.rows}


def _ask(driver: Driver, names: Names, text: str, values: Sequence[Any], *, has_rows: bool = False) -> Steps[Answer]:
    try:
        answer: Answer = yield Statement(text, values, has_rows)
    except Exception as error:
        explain(driver, error, names)
        raise
    return answer


def _cell(value: UUID, dialect: Dialect) -> Any:
    return dialect.cell(value) if dialect.cell else value


def _row(place: Place, entry: Entry, dialect: Dialect) -> list[Any]:
    return [place.consumer, _cell(entry.id, dialect), entry.aggregate_id, entry.aggregate_version]


def _cells(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [cell for row in rows for cell in row]


def _id(value: Any) -> UUID:
    """From the form in which the driver gives it."""
    if isinstance(value, UUID):
        return value
    return uuid_of_text(value) if isinstance(value, str) else uuid_of(value)


@cache
def _insert_text(table: str, dialect: Dialect, count: int | None, limit: str | None) -> str:
    """The INSERT of ``count`` events; None: of any number, as arrays. limit: the longest wait of PostgreSQL."""
    names = ", ".join(_COLUMNS)
    if count is None or limit is not None:
        first, *others = [
            f"{mark}::{kind}" for mark, kind in zip(dialect.marks(_WIDTH), _COLUMNS.values(), strict=True)
        ]
        # In the same statement: one of its own would cost another round trip.
        sources = [] if limit is None else [f"(SELECT set_config('lock_timeout', '{limit}', true)) AS waiting"]
        if count is None:
            arrays = ", ".join(f"{each}[]" for each in others)
            sources.append(f"unnest({arrays}) AS added (event_id, aggregate, version)")
            text = f"SELECT {first}, added.* FROM {', '.join(sources)} ORDER BY event_id"
        else:
            text = f"SELECT {', '.join([first, *others])} FROM {', '.join(sources)}"
    else:
        rows = ", ".join(f"({', '.join(dialect.marks(_WIDTH, 1 + row * _WIDTH))})" for row in range(count))
        text = f"VALUES {rows}"
    # Not INSERT IGNORE, and not an update that changes nothing: with the flag CLIENT_FOUND_ROWS, which SQLAlchemy and
    # Django set, both count a copy as one row, like a new event.
    copy = "ON DUPLICATE KEY UPDATE copies = copies + 1" if dialect.database == "mysql" else "ON CONFLICT DO NOTHING"
    return f"INSERT INTO {table} ({names}) {text} {copy}"


@cache
def _upsert_text(table: str, dialect: Dialect) -> str:
    return (
        f"INSERT INTO {table} AS seen (consumer, aggregate, name, version, event_id) "
        f"VALUES ({', '.join(dialect.marks(5))}) ON CONFLICT (consumer, aggregate) DO UPDATE "
        "SET version = excluded.version, event_id = excluded.event_id "
        "WHERE (seen.version, seen.event_id) < (excluded.version, excluded.event_id)"
    )
