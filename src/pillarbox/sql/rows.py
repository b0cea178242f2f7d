"""From rows to events. A row has the fields of ``Event`` up to ``headers``, in their order, and ``available_at``."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from pillarbox.event import NO_HEADERS, Event, Status
from pillarbox.unreadable import CANNOT_READ, NO_REASON, check_headers, read_partly

FIELDS: Final = (*Event._fields[: Event._fields.index("headers") + 1], "available_at")
ID, SEQ, PAYLOAD, CREATED_AT, OCCURRED_AT, HEADERS, AVAILABLE_AT = (
    FIELDS.index(name) for name in ("id", "seq", "payload", "created_at", "occurred_at", "headers", "available_at")
)
ADDED: Final = len(FIELDS)  # the first of the columns that a statement adds to those of an event


class Rows(NamedTuple):
    """Converts one driver's cells to Python's types."""

    event: Callable[[Sequence[Any], str, Status], Event]
    events: Callable[[Sequence[Sequence[Any]], str, Status], list[Event]]
    uuid: Callable[[Any], UUID]
    instant: Callable[[Any], datetime]


def _event(row: Sequence[Any], stream: str, status: Status) -> Event:
    headers, occurred_at, available_at = row[HEADERS], row[OCCURRED_AT], row[AVAILABLE_AT]
    # Without the constructor: its keywords cost more than all the rest.
    return tuple.__new__(
        Event,
        (
            *row[:OCCURRED_AT],
            row[CREATED_AT] if occurred_at is None else _aware(occurred_at),
            check_headers(json.loads(headers)) if headers else NO_HEADERS,
            stream,
            status,
            None if available_at is None else _aware(available_at),
        ),
    )


def _events(rows: Sequence[Sequence[Any]], stream: str, status: Status) -> list[Event]:
    # Most events have no headers and no instants of their own. This path costs half as much.
    new = tuple.__new__
    return [
        new(Event, (*row[:OCCURRED_AT], row[CREATED_AT], NO_HEADERS, stream, status, None))
        if row[OCCURRED_AT] is None and row[HEADERS] is None and row[AVAILABLE_AT] is None
        else _event(row, stream, status)
        for row in rows
    ]


def _same(value: Any) -> Any:
    return value


def _aware(value: datetime) -> datetime:
    # asyncpg writes the first and the last instant of Python as -infinity and infinity, and reads them without a zone.
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)


PLAIN: Final = Rows(_event, _events, _same, _aware)


def converted(uuid: Callable[[Any], UUID], instant: Callable[[Any], datetime]) -> Rows:
    """For a driver whose ids and instants are of other types."""

    def event(row: Sequence[Any], stream: str, status: Status) -> Event:
        cells = list(row)
        cells[ID] = uuid(cells[ID])
        cells[CREATED_AT] = instant(cells[CREATED_AT])
        for place in (OCCURRED_AT, AVAILABLE_AT):
            if cells[place] is not None:
                cells[place] = instant(cells[place])
        return _event(cells, stream, status)

    def events(rows: Sequence[Sequence[Any]], stream: str, status: Status) -> list[Event]:
        new = tuple.__new__
        made = []
        for row in rows:
            if row[OCCURRED_AT] is None and row[HEADERS] is None and row[AVAILABLE_AT] is None:
                at = instant(row[CREATED_AT])
                cells = (uuid(row[ID]), *row[1:CREATED_AT], at, *row[CREATED_AT + 1 : OCCURRED_AT], at)
                made.append(new(Event, (*cells, NO_HEADERS, stream, status, None)))
            else:
                made.append(event(row, stream, status))
        return made

    return Rows(event, events, uuid, instant)


def readable(
    rows: Rows, found: Sequence[Sequence[Any]], stream: str, status: Callable[[Sequence[Any]], Status]
) -> tuple[list[Event], str]:
    """The events before the first row that cannot be read. If it is the first, only that one, as far as it can be read,
    and the reason."""
    events: list[Event] = []
    for row in found:
        try:
            events.append(rows.event(row, stream, status(row)))
        except CANNOT_READ:
            if events:
                break
            event, reason = partly(rows, row, stream)
            return [event], reason or NO_REASON
    return events, ""


def partly(rows: Rows, row: Sequence[Any], stream: str, status: Any = Status.PENDING) -> tuple[Event, str]:
    """An event as far as its row can be read, and the reason why that is not all of it."""
    decode: dict[str, Callable[[Any], Any]] = {
        "id": rows.uuid,
        **dict.fromkeys(("created_at", "occurred_at", "available_at"), rows.instant),
        "headers": json.loads,
    }
    cells = dict(zip(FIELDS, row, strict=False))
    return read_partly({**cells, "stream": stream, "status": status}, decode)


def cut(rows: Sequence[Sequence[Any]], max_bytes: int) -> list[list[Any]]:
    """The first rows of a read, at least one, whose payloads (loaded or not) together fit into ``max_bytes``."""
    kept: list[list[Any]] = []
    total = 0
    for row in rows:
        total += row[ADDED] or len(row[PAYLOAD])
        if kept and total > max_bytes:
            break
        kept.append(list(row))
    return kept


def error_history(text: str | None) -> list[Mapping[str, Any]]:
    """The entries of an event's errors, oldest first: JSON lines."""
    # Not splitlines: it also splits at other characters, which an error may contain.
    lines = [line for line in (text or "").split("\n") if line]
    try:
        return [dict(json.loads(line)) for line in lines]
    except CANNOT_READ:
        return [{"error": "the history of errors cannot be read: not written by Pillarbox"}]
