"""The columns that a writer fills for an event, and the row of one."""

import json
from typing import Any, Final

from pillarbox.event import Event, Status, key_hash

_NAMES: Final = (
    "id, stream, tenant, topic, type, aggregate_type, aggregate_id, aggregate_version, key, key_hash, routing_key,"
    " payload, content_type, headers, schema_id, schema_version, occurred_at, available_at, next_attempt_at, status,"
    " max_attempts"
)
COLUMNS: Final = tuple(_NAMES.split(", "))
# Some databases take these values in another form: see sql/cells.py.
CONVERTED: Final = ("id", "occurred_at", "available_at", "next_attempt_at")
# PostgreSQL's types, for columns that are not text.
POSTGRES_TYPES: Final = {
    "id": "uuid",
    "aggregate_version": "bigint",
    "key_hash": "integer",
    "payload": "bytea",
    "occurred_at": "timestamptz",
    "available_at": "timestamptz",
    "next_attempt_at": "timestamptz",
    "max_attempts": "integer",
}


def event_row(event: Event) -> dict[str, Any]:
    """The values of COLUMNS, in their order."""
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
        # None: the database's clock sets the instant of writing.
        "occurred_at": None if event.occurred_at == event.created_at else event.occurred_at,
        "available_at": event.available_at,
        "next_attempt_at": event.available_at,
        "status": Status.PENDING if event.available_at is None else Status.SCHEDULED,
        "max_attempts": event.max_attempts,
    }
