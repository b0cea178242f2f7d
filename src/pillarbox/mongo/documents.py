"""Documents from events and events from documents: pure functions, shared by the store and the writer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias
from uuid import UUID

from bson import Binary, DatetimeMS, Int64, MaxKey, Timestamp, encode
from bson.binary import UUID_SUBTYPE, UuidRepresentation
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument

from pillarbox.errors import InvalidEvent
from pillarbox.event import NO_HEADERS, Event, Status, key_hash
from pillarbox.unreadable import CANNOT_READ, NO_REASON, check_headers, read_partly
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
    *("created_at", "headers", "occurred_at", "occurred_us", *_OPTIONAL),
)
_OPTIONAL_TEXTS: Final = ("aggregate_type", "aggregate_id", "schema_id", "schema_version")
_CODEC: Final[CodecOptions[Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
NEXT_SEQ: Final = Timestamp(0, 0)  # the server replaces it by its next cluster time at an insert
MOST_ATTEMPTS: Final = 2**40  # far below the number at which a settle could not add one more
EARLIEST: Final = DatetimeMS(-(2**63))
# A longer history keeps its oldest errors, which help most. It fits beside the largest event.
MAX_ERRORS: Final = 20
MAX_ERROR_LENGTH: Final = 2000
# A document has at most 16 MB. The rest is for errors and leases.
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024 - 256 * 1024


def identity(event_id: UUID, stream: str, consumer: str = "") -> Document:
    """The ``_id`` of an event, or of a consumer's dead letter. MongoDB compares such documents field by field, so the
    ids come first."""
    return {"id": event_id, "stream": stream} | ({"consumer": consumer} if consumer else {})


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
        # A date of MongoDB has milliseconds.
        if rest := event.occurred_at.microsecond % 1000:
            document["occurred_us"] = rest
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
    available_at, headers, payload, attempts = get("available_at"), get("headers"), get("payload", b""), get("attempts")
    stamp = document["seq"]
    # Without the constructor: its keywords cost more than all the rest.
    cells: tuple[Any, ...] = (
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
        payload,
        document["content_type"],
        get("schema_id"),
        get("schema_version"),
        at,
        attempts,
        get("max_attempts"),
        _occurred_at(document) if "occurred_at" in document else at,
        NO_HEADERS if headers is None else check_headers(headers),
        document["stream"],
        status,
        None if available_at is None else available_at.replace(tzinfo=UTC),
    )
    # A document can have any type in any field. Texts that are joined have to be texts.
    "".join([text for place in _TEXTS if (text := cells[place]) is not None])
    if not isinstance(payload, bytes) or _checked_attempts(attempts) != attempts:
        raise TypeError("payload")
    return tuple.__new__(Event, cells)


def _checked_attempts(value: Any) -> int:
    """The number, if a settle can add one to it."""
    if type(value) not in (int, Int64) or not 0 <= value <= MOST_ATTEMPTS:
        raise ValueError("attempts")
    return int(value)


def _occurred_at(document: Mapping[str, Any]) -> datetime:
    instant: datetime = document["occurred_at"]
    return instant.replace(microsecond=instant.microsecond + document.get("occurred_us", 0), tzinfo=UTC)


def partly(document: Mapping[str, Any], status: Any) -> tuple[Event, str]:
    """An event as far as its document can be read, and the reason why that is not all of it."""
    identity = document.get("_id")
    cells = {
        **document,
        "id": identity.get("id") if isinstance(identity, Mapping) else identity,
        "occurred_at": document if "occurred_at" in document else None,
        "status": status,
        "payload": document.get("payload", b""),
    }
    return read_partly(cells, _DECODE)


def readable(documents: Sequence[Mapping[str, Any]], status: Status | None) -> tuple[list[Event], str]:
    """The events of documents before the first that cannot be read. If it is the first, only that one, as far as it can
    be read, and the reason. status: None takes that of each document."""
    events: list[Event] = []
    for document in documents:
        try:
            events.append(to_event(document, status or Status(document["status"])))
        except CANNOT_READ:
            if events:
                break
            event, reason = partly(document, status or document.get("status"))
            return [event], reason or NO_REASON
    return events, ""


def to_dead_letter(document: Mapping[str, Any], attempts: int, error: str, errors: Sequence[Any]) -> Document:
    """The dead letter of an event that dies. The server adds the instant."""
    return {
        **{name: document[name] for name in _MOVED if name in document},
        "attempts": attempts,
        "error": error,
        "errors": [*error_history(document)[: MAX_ERRORS - 1], *errors],
        "consumer": "",
    }


def to_consumers_letter(
    event: Event, shards: int, consumer: str, attempts: int, error: str, errors: Sequence[Any]
) -> Document:
    """The dead letter of an event that a consumer could not apply. The server adds the seq."""
    document = to_document(event, shards)
    return {
        **{name: document[name] for name in _MOVED if name in document},
        "_id": identity(event.id, event.stream, consumer),
        "attempts": attempts,
        "error": error,
        "errors": list(errors[:MAX_ERRORS]),
        "consumer": consumer,
    }


def error_history(document: Mapping[str, Any]) -> Sequence[Any]:
    """The errors of an event, oldest first."""
    errors = document.get("errors")
    return [each for each in errors if isinstance(each, dict)] if isinstance(errors, list) else []


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
    if isinstance(value, UUID):
        return value
    if value.subtype != UUID_SUBTYPE or len(value) != 16:
        raise ValueError("no UUID")
    return uuid_of(value)


_TEXTS: Final = [
    Event._fields.index(name)
    for name in (*("tenant", "topic", "type", "content_type", "stream", "key", "routing_key"), *_OPTIONAL_TEXTS)
]
_DECODE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "id": to_id,
    "attempts": _checked_attempts,
    "seq": lambda stamp: stamp.time << 32 | stamp.inc,
    "created_at": lambda instant: instant.replace(tzinfo=UTC),
    "occurred_at": _occurred_at,
    "available_at": lambda instant: instant.replace(tzinfo=UTC),
}


def from_seq(seq: int) -> Timestamp:
    return Timestamp(seq >> 32, seq & 0xFFFF_FFFF)
