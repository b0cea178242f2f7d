"""The event record and its states: pure code, no I/O."""

import json
import zlib
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

from pillarbox.errors import Reject


class Status(StrEnum):
    """The state of an event."""

    PENDING = "pending"
    SCHEDULED = "scheduled"  # waits for available_at
    PROCESSING = "processing"  # queue streams: a worker has it
    PUBLISHED = "published"
    FAILED = "failed"  # waits for its retry
    HELD = "held"  # waits behind a failed event of its key
    DEAD = "dead"


class Mode(StrEnum):
    """The mode of a stream: in order per key, or a queue of single events."""

    ORDERED = "ordered"
    QUEUE = "queue"


NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class Event(NamedTuple):
    """One event, as written and as delivered. Immutable; ``_replace`` gives a changed copy.

    A named tuple because the relay makes tens of thousands a second from database rows: a frozen dataclass costs
    several times as much to build.
    """

    id: UUID
    seq: int  # given by the store; 0 before that
    tenant: str
    topic: str  # empty: the publisher's default topic
    type: str
    aggregate_type: str | None
    aggregate_id: str | None
    aggregate_version: int | None
    key: str | None  # None: no order
    routing_key: str | None
    payload: bytes
    content_type: str
    schema_id: str | None
    schema_version: str | None
    created_at: datetime
    attempts: int
    max_attempts: int | None  # none: the stream's limit
    occurred_at: datetime  # as it was given, else when it was written
    headers: Mapping[str, str]
    stream: str
    status: Status
    available_at: datetime | None = None

    def json(self) -> Any:
        """The payload, read as JSON. Raises :class:`Reject` if it is none, because no retry would help."""
        try:
            return json.loads(self.payload)
        except (ValueError, RecursionError):
            raise Reject(
                f"the payload of event {self.id} ({self.content_type}) is not JSON; read event.payload instead"
            ) from None


def key_hash(event_id: UUID, key: str | None) -> int:
    """A stable number from 0 to 2^31-1; the store's shard is this modulo the table's number of shards.

    CRC-32, not Python's ``hash``: every process, version and language must agree on it forever.
    """
    return zlib.crc32(event_id.bytes if key is None else key.encode()) & 0x7FFF_FFFF
