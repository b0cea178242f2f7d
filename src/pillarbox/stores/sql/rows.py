"""Between rows and events: pure functions, shared by stores and writers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from pillarbox.event import NO_HEADERS, Event, Status, key_hash
from pillarbox.stores._errors import error_entry
from pillarbox.stores._uuids import uuid_of_text

# The places of cells in EVENT_COLUMNS; what a statement adds comes after them.
ID, PAYLOAD, CREATED_AT, OCCURRED_AT, HEADERS = 0, 10, 14, 17, 18
ADDED: Final = 19


def event_from_row(row: Sequence[Any], stream: str, status: Status) -> Event:
    """From EVENT_COLUMNS, where the driver gives Python's own types."""
    headers = row[HEADERS]
    # Past the constructor, whose keyword handling costs more than all else here.
    cells = (
        *row[:OCCURRED_AT],
        row[OCCURRED_AT] or row[CREATED_AT],
        json.loads(headers) if headers else NO_HEADERS,
        stream,
        status,
        None,
    )
    return tuple.__new__(Event, cells)


def events_from_rows(rows: Sequence[Sequence[Any]], stream: str, status: Status) -> list[Event]:
    """The same for a batch, half as dear for events that have no headers and no instant of their own."""
    new = tuple.__new__
    return [
        new(Event, (*row[:OCCURRED_AT], row[CREATED_AT], NO_HEADERS, stream, status, None))
        if row[OCCURRED_AT] is None and row[HEADERS] is None
        else event_from_row(row, stream, status)
        for row in rows
    ]


def event_from_text_row(row: Sequence[Any], stream: str, status: Status) -> Event:
    """The same where ids and instants come as text."""
    cells = list(row)
    cells[ID] = uuid_of_text(cells[ID])
    if cells[OCCURRED_AT] is not None:
        cells[OCCURRED_AT] = instant(cells[OCCURRED_AT])
    cells[CREATED_AT] = instant(cells[CREATED_AT])
    return event_from_row(cells, stream, status)


def cut(rows: Sequence[Sequence[Any]], max_bytes: int) -> list[list[Any]]:
    """The rows of a read whose payloads, those left behind included, have at most so many bytes; at least one."""
    kept: list[list[Any]] = []
    total = 0
    for row in rows:
        total += row[ADDED] or len(row[PAYLOAD])
        if kept and total > max_bytes:
            break
        kept.append(list(row))
    return kept


def events_from_text_rows(rows: Sequence[Sequence[Any]], stream: str, status: Status) -> list[Event]:
    """The same for a batch, half as dear for events that have no headers and no instant of their own."""
    new = tuple.__new__
    events = []
    for row in rows:
        if row[OCCURRED_AT] is not None or row[HEADERS] is not None:
            events.append(event_from_text_row(row, stream, status))
            continue
        at = instant(row[CREATED_AT])
        own = (uuid_of_text(row[ID]), *row[ID + 1 : CREATED_AT], at, *row[CREATED_AT + 1 : OCCURRED_AT], at)
        events.append(new(Event, (*own, NO_HEADERS, stream, status, None)))
    return events


def instant(text: str) -> datetime:
    """A UTC instant from the text that the database keeps."""
    return datetime.fromisoformat(f"{text}+00:00")


def write_row(event: Event) -> dict[str, Any]:
    """The parameters that insert an event."""
    return {
        "id": event.id,
        "stream": event.stream,
        "tenant": event.tenant,
        "topic": event.topic,
        "type": event.type,
        "aggregate_type": event.aggregate_type,
        "aggregate_id": event.aggregate_id,
        "aggregate_version": event.aggregate_version,
        "key": event.key,
        "key_hash": key_hash(event.id, event.key),
        "routing_key": event.routing_key,
        "payload": event.payload,
        "content_type": event.content_type,
        "headers": json.dumps(dict(event.headers), ensure_ascii=False) if event.headers else None,
        "schema_id": event.schema_id,
        "schema_version": event.schema_version,
        # Nothing where it is the instant of writing, which the database knows better.
        "occurred_at": None if event.occurred_at == event.created_at else event.occurred_at,
        "available_at": event.available_at,
        "next_attempt_at": event.available_at,
        "status": Status.PENDING if event.available_at is None else Status.SCHEDULED,
        "max_attempts": event.max_attempts,
    }


def error_line(error: str, attempts: int) -> str:
    """One entry of an event's error history."""
    return json.dumps(error_entry(error, attempts), ensure_ascii=False)


def error_history(text: str | None) -> list[Mapping[str, Any]]:
    """The entries, oldest first."""
    # Not splitlines: an error may contain other characters that end a line.
    return [json.loads(line) for line in (text or "").split("\n") if line]
