"""Events for tests."""

import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, Literal
from uuid import UUID

from pillarbox.event import NO_HEADERS, Event, Status
from pillarbox.ids import uuid7

_seqs: Final = itertools.count(1)


def unique_key(prefix: str = "key") -> str:
    """A key that no other event has."""
    return f"{prefix}-{uuid7().hex}"


def make_event(
    *,
    id: UUID | None = None,
    seq: int | None = None,
    key: str | Literal["unique"] | None = "unique",
    type: str = "order.created",
    topic: str = "",
    payload: bytes = b'{"order_id": 7}',
    content_type: str = "application/json",
    headers: Mapping[str, str] = NO_HEADERS,
    stream: str = "default",
    tenant: str = "default",
    aggregate_type: str | None = None,
    aggregate_id: str | None = None,
    aggregate_version: int | None = None,
    routing_key: str | None = None,
    schema_id: str | None = None,
    schema_version: str | None = None,
    occurred_at: datetime | None = None,
    created_at: datetime | None = None,
    available_at: datetime | None = None,
    attempts: int = 0,
    max_attempts: int | None = None,
    status: Status = Status.PENDING,
) -> Event:
    """An event as a store would give it: a new id, a growing seq and, unless given, a key of its own."""
    now = datetime.now(UTC)
    return Event(
        id=id or uuid7(),
        seq=next(_seqs) if seq is None else seq,
        stream=stream,
        tenant=tenant,
        topic=topic,
        type=type,
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        aggregate_version=aggregate_version,
        key=unique_key() if key == "unique" else key,
        routing_key=routing_key,
        payload=payload,
        content_type=content_type,
        schema_id=schema_id,
        schema_version=schema_version,
        occurred_at=occurred_at or now,
        created_at=created_at or now,
        attempts=attempts,
        max_attempts=max_attempts,
        status=status,
        headers=headers,
        available_at=available_at,
    )
