"""What every SQL writer sends: as few statements as possible, in the words of its database and driver."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

from pillarbox.errors import ConfigError, DuplicateEvent, NotInTransaction, PillarboxError, SchemaError
from pillarbox.event import Event, key_hash
from pillarbox.names import Names
from pillarbox.stores._mysql_dialect import cell as mysql_cell
from pillarbox.stores.sql.rows import write_row
from pillarbox.stores.sql.statements import WRITE_COLUMNS
from pillarbox.stores.sqlite import cell as sqlite_cell
from pillarbox.writing import Batch, Question

_COLUMNS: Final = [name.strip() for name in WRITE_COLUMNS.split(",")]
# A statement stays far below what any of the databases takes.
_MAX_ROWS: Final = 1000
_MAX_BYTES: Final = 4_000_000
_LOCK_BUCKETS: Final = 512  # as many as the migration makes
_CONVERTED: Final = ("id", "occurred_at", "available_at", "next_attempt_at")
# PostgreSQL's types, where a column is not text.
_TYPES: Final = {
    "id": "uuid",
    "aggregate_version": "bigint",
    "key_hash": "integer",
    "payload": "bytea",
    "occurred_at": "timestamptz",
    "available_at": "timestamptz",
    "next_attempt_at": "timestamptz",
    "max_attempts": "integer",
}


class Flavour(NamedTuple):
    """How one database, by one kind of driver, wants statements and values."""

    database: str  # postgresql, mysql or sqlite
    mark: str  # of a parameter: "?", "%s", or "$" with its number
    cell: Callable[[Any], Any] | None = None  # from Python's own types; none: they are taken as they are


def _text_id(value: Any) -> Any:
    return str(value) if type(value).__name__ == "UUID" else value


# Drivers that write %s differ in whether they know a UUID; all of them know text.
POSTGRES: Final = Flavour("postgresql", "%s", _text_id)
POSTGRES_NUMBERED: Final = Flavour("postgresql", "$")
MYSQL: Final = Flavour("mysql", "%s", mysql_cell)
SQLITE: Final = Flavour("sqlite", "?", sqlite_cell)


Sent = tuple[str, Sequence[Any]]


def statements(batch: Batch, flavour: Flavour) -> Iterator[Sent]:
    """The texts and parameters that write a batch, in order."""
    if batch.lock_keys:
        yield from _locks(batch, flavour)
    for events in _chunks(batch.events):
        rows = [_cells(event, flavour) for event in events]
        count = len(rows)
        text = _insert(batch.names, flavour, 1 if count == 1 else None if _uses_arrays(flavour) else count)
        if batch.ignore_duplicates:
            text += _ignore(flavour)
        if count == 1:
            yield text, rows[0]
        elif _uses_arrays(flavour):
            yield text, [list(column) for column in zip(*rows, strict=True)]
        else:
            yield text, [value for row in rows for value in row]


def question(asked: Question, flavour: Flavour) -> Sent:
    """The text and parameters that ask for an event; a row is a yes."""
    event_id = flavour.cell(asked.id) if flavour.cell else asked.id
    first, second = _marks(flavour, 2)
    parts = asked.names.parts
    text = (
        f"SELECT 1 FROM {parts['event']} WHERE id = {first} "
        f"UNION ALL SELECT 1 FROM {parts['dead_letter']} WHERE id = {second}"
    )
    return text, [event_id, event_id]


def _chunks(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    chunk: list[Event] = []
    size = 0
    for event in events:
        if chunk and (len(chunk) == _MAX_ROWS or size + len(event.payload) > _MAX_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(event)
        size += len(event.payload)
    yield chunk


def _cells(event: Event, flavour: Flavour) -> list[Any]:
    row = write_row(event)
    if flavour.cell is not None:
        # Only these: a call for each of the columns would cost as much as all else here.
        for name in _CONVERTED:
            if row[name] is not None:
                row[name] = flavour.cell(row[name])
    return [row[name] for name in _COLUMNS]


def _uses_arrays(flavour: Flavour) -> bool:
    # One text for any number of rows, and no limit to the parameters.
    return flavour.database == "postgresql"


def _marks(flavour: Flavour, count: int, start: int = 1) -> list[str]:
    if flavour.mark == "$":
        return [f"${number}" for number in range(start, start + count)]
    return [flavour.mark] * count


def _quoted(name: str, flavour: Flavour) -> str:
    return f"`{name}`" if flavour.database == "mysql" and name == "key" else name


@cache
def _insert(names: Names, flavour: Flavour, count: int | None) -> str:
    """For so many rows, or for any number of them as arrays."""
    columns = ", ".join(_quoted(name, flavour) for name in _COLUMNS)
    into = f"INSERT INTO {names.parts['event']} ({columns})"
    if count is None:
        arrays = [
            f"{mark}::{_TYPES.get(name, 'text')}[]"
            for mark, name in zip(_marks(flavour, len(_COLUMNS)), _COLUMNS, strict=True)
        ]
        # In the order of the list: it is the order of seq, and so of publication.
        rows = f"unnest({', '.join(arrays)}) WITH ORDINALITY AS added ({columns}, place)"
        return f"{into} SELECT {columns} FROM {rows} ORDER BY place"
    width = len(_COLUMNS)
    marks = ", ".join(f"({', '.join(_marks(flavour, width, 1 + row * width))})" for row in range(count))
    return f"{into} VALUES {marks}"


def _ignore(flavour: Flavour) -> str:
    # Not INSERT IGNORE, which would let other mistakes pass too.
    return " ON DUPLICATE KEY UPDATE id = id" if flavour.database == "mysql" else " ON CONFLICT DO NOTHING"


def _locks(batch: Batch, flavour: Flavour) -> Iterator[Sent]:
    # Sorted: two writers that take several keys take them in the same order.
    keyed = [event for event in batch.events if event.key is not None]
    if not keyed or flavour.database == "sqlite":  # whose writers wait for each other anyway
        return
    if flavour.database == "mysql":
        buckets = sorted({key_hash(event.id, event.key) % _LOCK_BUCKETS for event in keyed})
        marks = ", ".join(_marks(flavour, len(buckets)))
        table = batch.names.parts["key_lock"]
        yield f"SELECT bucket FROM {table} WHERE bucket IN ({marks}) ORDER BY bucket FOR UPDATE", buckets
        return
    outbox = batch.names.parts["event"]
    keys = sorted({f"{outbox} {event.stream} {event.key}" for event in keyed})
    (mark,) = _marks(flavour, 1)
    yield (
        f"SELECT pg_advisory_xact_lock(hashtextextended(name, 0)) "
        f"FROM unnest({mark}::text[]) WITH ORDINALITY AS keys (name, place) ORDER BY place",
        [keys],
    )


def duplicate(batch: Batch) -> DuplicateEvent:
    """For the driver's own error about a key that exists."""
    which = f"event {batch.events[0].id}" if len(batch.events) == 1 else f"one of these {len(batch.events)} events"
    return DuplicateEvent(
        f"{which} is in the outbox already; give another id, leave it out, or pass on_duplicate='ignore'"
    )


def no_tables(names: Names) -> SchemaError:
    """For the driver's own error about a table that does not exist."""
    return SchemaError(f"this database has no outbox '{names.prefix}' yet; make its tables with `pillarbox init`")


def not_in_transaction(handle: str, remedy: str) -> NotInTransaction:
    return NotInTransaction(
        f"this {handle} commits every statement by itself, so that your data and its event would not commit together; "
        f"{remedy}"
    )


def no_transaction_on_a_pool() -> ConfigError:
    return ConfigError(
        "a pool has no transaction; use `async with outbox.transaction(pool) as tx:` and tx.add, or pass a connection"
    )


@contextmanager
def translated(names: Names, batch: Batch | None, judge: Callable[[Exception], str]) -> Iterator[None]:
    """The driver's errors in our words: ``judge`` says "duplicate", "no table" or "" of one."""
    try:
        yield
    except PillarboxError:
        raise
    except Exception as error:
        verdict = judge(error)
        if verdict == "duplicate" and batch is not None:
            raise duplicate(batch) from error
        if verdict == "no table":
            raise no_tables(names) from error
        raise
