"""The statements of events on a SQL database: as few as possible, in the dialect of the driver."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final

from pillarbox.drivers.contract import Answer, Driver, Statement, Steps
from pillarbox.event import Event, key_hash
from pillarbox.outbox.work import Question, Write, explain
from pillarbox.sql.columns import COLUMNS, CONVERTED, POSTGRES_TYPES, event_row
from pillarbox.sql.dialects import Dialect

# far below the limits of every database
_MAX_ROWS: Final = 1000
_MAX_BYTES: Final = 4_000_000
_LOCK_BUCKETS: Final = 512  # the same number as in the migration


def add(write: Write, driver: Driver) -> Steps[None]:
    """Write events."""
    driver.check()
    try:
        dialect = driver.dialect
        if write.lock_keys:
            yield from _lock_keys(write, dialect)
        for events in _chunks(write.events):
            yield _insert(events, write, dialect)
    except Exception as error:
        explain(driver, error, write.names, write.events)
        raise


def exists(question: Question, driver: Driver) -> Steps[bool]:
    """Ask for an event that waits, was published, or is dead."""
    if question.is_in(driver):
        return True
    dialect = driver.dialect
    event_id = dialect.cell(question.id) if dialect.cell else question.id
    values = [event_id] if question.stream is None else [event_id, question.stream]
    marks = iter(dialect.marks(2 * len(values)))
    known = " UNION ALL ".join(
        f"SELECT 1 FROM {question.names.parts[table]} WHERE "
        + " AND ".join(f"{column} = {next(marks)}" for column in ("id", "stream")[: len(values)])
        + condition
        # The dead letter of a consumer says nothing about this outbox.
        for table, condition in (("event", ""), ("dead_letter", " AND consumer = ''"))
    )
    try:
        answer: Answer = yield Statement(known, [*values, *values], has_rows=True)
    except Exception as error:
        explain(driver, error, question.names)
        raise
    return bool(answer.rows)


def _chunks(events: Sequence[Event]) -> Iterable[Sequence[Event]]:
    return _cut(events) if len(events) > 1 else (events,) if events else ()


def _cut(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    chunk: list[Event] = []
    size = 0
    for event in events:
        if chunk and (len(chunk) == _MAX_ROWS or size + len(event.payload) > _MAX_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(event)
        size += len(event.payload)
    yield chunk


def _insert(events: Sequence[Event], write: Write, dialect: Dialect) -> Statement:
    rows = [_cells(event, dialect) for event in events]
    count = len(rows)
    # PostgreSQL takes columns as arrays: one text for any number of rows, without a limit on parameters.
    has_arrays = dialect.database == "postgresql" and count > 1
    text = _insert_text(write.names.parts["event"], dialect, None if has_arrays else count, write.ignore_duplicates)
    if count == 1:
        return Statement(text, rows[0])
    if has_arrays:
        return Statement(text, [list(column) for column in zip(*rows, strict=True)])
    return Statement(text, [value for row in rows for value in row])


def _cells(event: Event, dialect: Dialect) -> list[Any]:
    row = event_row(event)
    if dialect.cell is not None:
        # Only these columns: a call for each column would double the cost of this function.
        for name in CONVERTED:
            if row[name] is not None:
                row[name] = dialect.cell(row[name])
    return list(row.values())


@cache
def _insert_text(table: str, dialect: Dialect, count: int | None, ignore_duplicates: bool) -> str:
    """The INSERT for ``count`` rows; None: for any number of rows, as arrays."""
    columns = ", ".join(dialect.quoted(name) for name in COLUMNS)
    text = f"INSERT INTO {table} ({columns})"
    width = len(COLUMNS)
    if count is None:
        arrays = [
            f"{mark}::{POSTGRES_TYPES.get(name, 'text')}[]"
            for mark, name in zip(dialect.marks(width), COLUMNS, strict=True)
        ]
        # The order of the list becomes the order of seq, and so of publication.
        rows = f"unnest({', '.join(arrays)}) WITH ORDINALITY AS added ({columns}, place)"
        text += f" SELECT {columns} FROM {rows} ORDER BY place"
    else:
        marks = [f"({', '.join(dialect.marks(width, 1 + row * width))})" for row in range(count)]
        text += f" VALUES {', '.join(marks)}"
    if not ignore_duplicates:
        return text
    # Not INSERT IGNORE: it hides other errors too.
    return text + (" ON DUPLICATE KEY UPDATE id = id" if dialect.database == "mysql" else " ON CONFLICT DO NOTHING")


def _lock_keys(write: Write, dialect: Dialect) -> Steps[None]:
    # Sorted, so that two writers lock several keys in the same order.
    keyed = [event for event in write.events if event.key is not None]
    if not keyed or dialect.database == "sqlite":  # its writers wait for each other anyway
        return
    if dialect.database == "mysql":
        buckets = sorted({key_hash(event.id, event.key) % _LOCK_BUCKETS for event in keyed})
        marks = ", ".join(dialect.marks(len(buckets)))
        table = write.names.parts["key_lock"]
        text = f"SELECT bucket FROM {table} WHERE bucket IN ({marks}) ORDER BY bucket FOR UPDATE"
        yield Statement(text, buckets, has_rows=True)
        return
    outbox = write.names.parts["event"]
    keys = sorted({f"{outbox} {event.stream} {event.key}" for event in keyed})
    (mark,) = dialect.marks(1)
    text = (
        "SELECT pg_advisory_xact_lock(hashtextextended(name, 0)) "
        f"FROM unnest({mark}::text[]) WITH ORDINALITY AS keys (name, place) ORDER BY place"
    )
    yield Statement(text, [keys], has_rows=True)
