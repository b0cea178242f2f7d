"""Between documents and events: pure functions, shared by the store and the writer."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias
from uuid import UUID

from bson import Binary, Timestamp, encode
from bson.binary import UUID_SUBTYPE, UuidRepresentation
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument

from pillarbox.errors import InvalidEvent
from pillarbox.event import NO_HEADERS, Event, Status, key_hash
from pillarbox.stores._uuids import uuid_of

Document: TypeAlias = dict[str, Any]

# What of an event is left out of its document where it is none.
_OPTIONAL: Final = (
    "aggregate_type",
    "aggregate_id",
    "aggregate_version",
    "key",
    "routing_key",
    "schema_id",
    "schema_version",
    "available_at",
    "max_attempts",
)
# What a dead letter keeps of its event, and gives back at a replay.
_MOVED: Final = (
    "_id",
    "seq",
    "stream",
    "shard",
    "key_hash",
    "tenant",
    "topic",
    "type",
    "payload",
    "content_type",
    "created_at",
    "headers",
    "occurred_at",
    "lease_token",
    *_OPTIONAL,
)
_CODEC: Final[CodecOptions[Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# The most of an error history that is kept; the oldest are worth most. All of it fits beside the largest event.
MAX_ERRORS: Final = 20
MAX_ERROR_LENGTH: Final = 2000
# What an event may have for itself of the 16 MB of a document: the rest is for what becomes of it.
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024 - 256 * 1024


def to_document(event: Event, shards: int) -> Document:
    """What to insert, as it stands: the server gives a plain insert's empty timestamp its next one."""
    hashed = key_hash(event.id, event.key)
    document: Document = {
        "_id": event.id,
        "seq": Timestamp(0, 0),
        "stream": event.stream,
        "shard": hashed % shards,
        "key_hash": hashed,
        "status": "pending" if event.available_at is None else "scheduled",
        "tenant": event.tenant,
        "topic": event.topic,
        "type": event.type,
        "payload": event.payload,
        "content_type": event.content_type,
        "created_at": event.created_at,
        "attempts": 0,
    }
    for name in _OPTIONAL:
        value = getattr(event, name)
        if value is not None:
            document[name] = value
    if event.headers:
        document["headers"] = dict(event.headers)
    if event.occurred_at != event.created_at:
        document["occurred_at"] = event.occurred_at
    if event.available_at is not None:
        document["next_attempt_at"] = event.available_at
    return document


def encoded(event: Event, shards: int) -> RawBSONDocument:
    """What to insert, in bytes: what does not fit is refused before anything is sent, and no codec has a say."""
    try:
        data = encode(to_document(event, shards), codec_options=_CODEC)
    except (BSONError, OverflowError) as error:
        raise InvalidEvent(f"event {event.id} cannot be a document of MongoDB: {type(error).__name__}") from None
    if len(data) > MAX_EVENT_BYTES:
        raise InvalidEvent(
            f"event {event.id} has {len(data):,} bytes as a document of MongoDB, the limit is {MAX_EVENT_BYTES:,}; "
            "store the payload elsewhere and send a reference"
        )
    return RawBSONDocument(data)


def to_event(document: Mapping[str, Any], status: Status) -> Event:
    """An event from its document, or from that of its dead letter."""
    get = document.get
    at = document["created_at"]
    stamp = document["seq"]
    # Past the constructor, whose keyword handling costs more than all else here.
    cells = (
        to_id(document["_id"]),
        stamp.time << 32 | stamp.inc,
        document["tenant"],
        document["topic"],
        document["type"],
        get("aggregate_type"),
        get("aggregate_id"),
        get("aggregate_version"),
        get("key"),
        get("routing_key"),
        get("payload", b""),
        document["content_type"],
        get("schema_id"),
        get("schema_version"),
        at,
        document["attempts"],
        get("max_attempts"),
        get("occurred_at", at),
        get("headers", NO_HEADERS),
        document["stream"],
        status,
        get("available_at"),
    )
    return tuple.__new__(Event, cells)


def to_dead_letter(document: Mapping[str, Any], attempts: int, error: str, errors: Sequence[Any]) -> Document:
    """What an event's document becomes when it dies; the server adds the instant."""
    return {
        **{name: document[name] for name in _MOVED if name in document},
        "attempts": attempts,
        "error": error,
        "errors": [*document.get("errors", ())[: MAX_ERRORS - 1], *errors],
    }


def from_dead_letter(letter: Mapping[str, Any], status: Status) -> Document:
    """The document of an event that is replayed."""
    return {
        **{name: letter[name] for name in _MOVED if name in letter},
        "status": status.value,
        "attempts": 0,
        "last_error": letter["error"],
        "last_error_at": letter["died_at"],
        "errors": letter["errors"],
    }


def to_id(value: UUID | Binary) -> UUID:
    """The driver's own way from bytes to an id and back costs more than all the rest of an event."""
    return value if isinstance(value, UUID) else uuid_of(value)


def from_ids(events: Iterable[Event]) -> list[Binary]:
    return [Binary(event.id.bytes, UUID_SUBTYPE) for event in events]


def from_seq(seq: int) -> Timestamp:
    return Timestamp(seq >> 32, seq & 0xFFFF_FFFF)
