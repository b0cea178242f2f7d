"""Documents from events and events from documents: pure functions, shared by the store and the writer."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias
from uuid import UUID

from bson import Binary, MaxKey, Timestamp, encode
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument

from pillarbox.errors import InvalidEvent
from pillarbox.event import NO_HEADERS, Event, Status, key_hash
from pillarbox.uuids import uuid_of

Document: TypeAlias = dict[str, Any]

# Fields that a document leaves out if they are None.
_OPTIONAL: Final = (
    *("aggregate_type", "aggregate_id", "aggregate_version", "key", "routing_key"),
    *("schema_id", "schema_version", "available_at", "max_attempts"),
)
# Fields that a dead letter keeps of its event and gives back at a replay.
_MOVED: Final = (
    *("_id", "seq", "stream", "shard", "key_hash", "tenant", "topic", "type", "payload", "content_type"),
    *("created_at", "headers", "occurred_at", *_OPTIONAL),
)
_CODEC: Final[CodecOptions[Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
NEXT_SEQ: Final = Timestamp(0, 0)  # the server replaces it by its next cluster time at an insert
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# A longer history keeps its oldest errors, which help most. It fits beside the largest event.
MAX_ERRORS: Final = 20
MAX_ERROR_LENGTH: Final = 2000
# A document has at most 16 MB. The rest is for errors and leases.
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024 - 256 * 1024


def identity(event_id: UUID, stream: str) -> Document:
    """The ``_id`` of an event. MongoDB compares such documents field by field, so the ids come first."""
    return {"id": event_id, "stream": stream}


def identities(events: Iterable[Event], stream: str) -> RawBSONDocument:
    """The condition that an ``_id`` is one of these events of a stream. Encoded here, because every turn needs it and
    the driver takes four times as long.
    """
    name = stream.encode()
    tail = b"\x02stream\0" + _size(len(name) + 1) + name + b"\0\0"
    head = _size(4 + 9 + 16 + len(tail)) + b"\x05id\0" + _size(16) + b"\x04"
    places = b"".join([b"\x03%d\0%b%b%b" % (place, head, event.id.bytes, tail) for place, event in enumerate(events)])
    array = b"\x04$in\0" + _size(4 + len(places) + 1) + places + b"\0"
    return RawBSONDocument(_size(4 + len(array) + 1) + array + b"\0")


def _size(count: int) -> bytes:
    return count.to_bytes(4, "little")


def with_id(event_id: UUID) -> Document:
    """The condition that an ``_id`` has this id, in any stream; a range of the primary key."""
    return {"$gt": {"id": event_id}, "$lt": {"id": event_id, "stream": MaxKey()}}


def to_document(event: Event, shards: int) -> Document:
    """The document to insert. The server replaces the empty timestamp of a plain insert by its next one."""
    hashed = key_hash(event.id, event.key)
    document: Document = {
        "_id": identity(event.id, event.stream),
        "seq": NEXT_SEQ,
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
    """The document to insert, in bytes. An event that does not fit is refused before anything is sent."""
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
    """An event from its document, or from that of its dead letter.

    Instants are set to Python's own UTC: the driver's is slower, here and for whoever formats them."""
    get = document.get
    at = document["created_at"].replace(tzinfo=UTC)
    occurred_at, available_at = get("occurred_at"), get("available_at")
    stamp = document["seq"]
    # Without the constructor: its keywords cost more than all the rest.
    cells = (
        to_id(document["_id"]["id"]),
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
        at if occurred_at is None else occurred_at.replace(tzinfo=UTC),
        get("headers", NO_HEADERS),
        document["stream"],
        status,
        None if available_at is None else available_at.replace(tzinfo=UTC),
    )
    return tuple.__new__(Event, cells)


def to_dead_letter(document: Mapping[str, Any], attempts: int, error: str, errors: Sequence[Any]) -> Document:
    """The dead letter of an event that dies. The server adds the instant."""
    return {
        **{name: document[name] for name in _MOVED if name in document},
        "attempts": attempts,
        "error": error,
        "errors": [*document.get("errors", ())[: MAX_ERRORS - 1], *errors],
    }


def from_dead_letter(letter: Mapping[str, Any], status: Status) -> Document:
    """The document of an event that is replayed, in its old place."""
    return {
        **{name: letter[name] for name in _MOVED if name in letter},
        "status": status.value,
        "attempts": 0,
        "last_error": letter["error"],
        "last_error_at": letter["died_at"],
        "errors": letter["errors"],
    }


def to_id(value: UUID | Binary) -> UUID:
    """The id. Reads of a turn leave it as bytes: the driver's conversion costs more than the rest of an event."""
    return value if isinstance(value, UUID) else uuid_of(value)


def from_seq(seq: int) -> Timestamp:
    return Timestamp(seq >> 32, seq & 0xFFFF_FFFF)
