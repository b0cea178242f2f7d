"""Between rows and events: pure functions, shared by stores and writers."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from pillarbox.event import NO_HEADERS, Event, Status, key_hash

_STATUS: Final = {status.value: status for status in Status}


def event_from_row(row: Sequence[Any]) -> Event:
    """From EVENT_COLUMNS and status, where the driver gives Python's own types."""
    headers = row[19]
    # Past the constructor, whose keyword handling costs more than all else here.
    cells = (*row[:19], _STATUS[row[20]], json.loads(headers) if headers else NO_HEADERS, None)
    return tuple.__new__(Event, cells)


def event_from_text_row(row: Sequence[Any]) -> Event:
    """The same where ids and instants come as text."""
    cells = list(row)
    cells[0] = UUID(cells[0])
    cells[15] = instant(cells[15])
    cells[16] = instant(cells[16])
    return event_from_row(cells)


def instant(text: str) -> datetime:
    """A UTC instant from the text that the database keeps."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


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
        "occurred_at": event.occurred_at,
        "available_at": event.available_at,
        "next_attempt_at": event.available_at,
        "status": Status.PENDING if event.available_at is None else Status.SCHEDULED,
        "max_attempts": event.max_attempts,
    }


def error_line(error: str, attempts: int) -> str:
    """One entry of an event's error history."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"at": now, "attempts": attempts, "error": error}, ensure_ascii=False)


def error_history(text: str | None) -> list[Mapping[str, Any]]:
    """The entries, oldest first."""
    return [json.loads(line) for line in (text or "").splitlines()]
