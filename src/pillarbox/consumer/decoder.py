"""Decoders: functions from a message to its event.

``decode`` reads what Pillarbox writes (raw, legacy, CloudEvents in binary and in structured mode), what Debezium's
outbox router writes, and what a plain producer writes with an id in a header.
"""

import json
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args
from uuid import UUID

from pillarbox.envelopes.headers import RESERVED
from pillarbox.errors import ConfigError, Reject
from pillarbox.event import NO_HEADERS, Event, Status
from pillarbox.hints import hint
from pillarbox.ids import stable_id
from pillarbox.source import Message
from pillarbox.uuids import uuid_of, uuid_of_text

# From a message to its event. Raises Reject, with a sentence, for a message that is no event.
Decoder: TypeAlias = Callable[[Message], Event]

# What a message without an id gets.
Ids: TypeAlias = Literal["required", "place"]

UNKNOWN_TYPE: Final = "message"  # of an event whose message names no type
UNREADABLE_TYPE: Final = "pillarbox.unreadable"  # of the dead letter of a message that no decoder could read
_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
_STRUCTURED: Final = "application/cloudevents+json"
_CONTENT_TYPES: Final = ("content-type", "content_type")
# In this order. Debezium's router writes `id`.
_IDS: Final = ("event_id", "id", "message_id")
_CLOUD_IDS: Final = frozenset({"ce_id", "ce-id"})
_CLOUD_FIELDS: Final = {
    "type": "type",
    "tenant": "tenant",
    "subject": "aggregate_id",
    "aggregatetype": "aggregate_type",
    "aggregateversion": "aggregate_version",
    "partitionkey": "key",
    "dataschema": "schema_id",
    "schemaid": "schema_id",
    "schemaversion": "schema_version",
    "time": "occurred_at",
    "datacontenttype": "content_type",
}
_CLOUD_UNUSED: Final = frozenset({"specversion", "id", "source", "data", "data_base64"})
_NAMES: Final = {
    "event_type": "type",
    "eventType": "type",
    "type": "type",
    "tenant": "tenant",
    "occurred_at": "occurred_at",
    "aggregate_type": "aggregate_type",
    "aggregateType": "aggregate_type",
    "aggregate_id": "aggregate_id",
    "aggregateId": "aggregate_id",
    "aggregate_version": "aggregate_version",
    "aggregateVersion": "aggregate_version",
    "schema_id": "schema_id",
    "schema_version": "schema_version",
    "event_key": "key",
}
# The values that make an event, in this order: of headers with these names, then of fields.
_PICKED: Final = (
    *_CONTENT_TYPES, *_IDS, "tenant", "type", "aggregate_type", "aggregate_id", "aggregate_version", "key", "schema_id",
    "schema_version", "occurred_at",
)  # fmt: skip


def make_decoder(*, ids: Ids = "required") -> Decoder:
    """The decoder for what Pillarbox, CloudEvents, Debezium's outbox router and plain producers write.

    ids: a message without an id is refused (``required``), or its place gives it an id that each delivery has again
    (``place``).
    """
    if ids not in get_args(Ids):
        raise ConfigError(f"ids={ids!r}: {hint(str(ids), get_args(Ids))}")
    by_place = ids == "place"

    def decode(message: Message) -> Event:
        return _decode(message, by_place=by_place)

    return decode


decode: Final = make_decoder()


def checked(decoder: Decoder) -> Decoder:
    """A decoder of the user, with an error for a result that is no event."""

    def decode(message: Message) -> Event:
        event: object = decoder(message)
        if not isinstance(event, Event):
            raise TypeError(
                f"the decoder returned a {type(event).__name__}; return an Event, or raise Reject for a message that "
                "is none"
            )
        return event

    return decode


class _Shape(NamedTuple):
    """What the headers of a message mean, by their names. All messages of a producer have the same names, so that this
    is worked out once.

    pick: takes the values, with a None behind them, and returns those of ``_PICKED``. own: names of the event's own
    headers, and the places of their values. is_cloud: it may be a CloudEvent.
    """

    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    own: Sequence[tuple[str, int]]
    is_cloud: bool


@lru_cache(maxsize=1024)
def _shape_of(names: tuple[str, ...]) -> _Shape:
    places: dict[str, int] = {}
    own = []
    for place, name in enumerate(names):
        field = _NAMES.get(name)
        if name in _IDS or name in _CONTENT_TYPES:
            places[name] = place
        elif field is not None:
            places[field] = place
        elif name not in RESERVED and name not in _CLOUD_IDS:
            own.append((name, place))
    pick = itemgetter(*(places.get(name, -1) for name in _PICKED))
    return _Shape(pick, own, not _CLOUD_IDS.isdisjoint(names))


def _decode(message: Message, *, by_place: bool) -> Event:
    # The last value of a name that comes twice.
    headers: dict[str, Any] = dict(message.headers)
    texts: list[Any]
    try:
        texts = [*map(bytes.decode, headers.values()), None]
    except UnicodeDecodeError:
        # A foreign header that is no text is left out; the message may be read without it.
        pairs = [(name, text) for name, value in message.headers if (text := _text(value)) is not None]
        headers = dict(pairs)
        texts = [*headers.values(), None]
    shape = _shape_of(tuple(headers))
    values = shape.pick(texts)
    content_type = message.content_type or values[0] or values[1]
    is_structured = bool(content_type) and content_type != _JSON and content_type.lower().startswith(_STRUCTURED)
    if is_structured or shape.is_cloud:
        cloud = _read_cloud(message, dict(zip(headers, texts, strict=False)), content_type, is_structured)
        if cloud is not None:
            id_text, payload, fields, cloud_own = cloud
            id_ = _id(message, id_text, by_place=by_place)
            return _event(message, id_, payload, fields.get("content_type"), [*map(fields.get, _PICKED)], cloud_own)
    id_text, payload = values[2] or values[3] or values[4] or message.message_id, message.body
    if payload[:8] == b'{"_id":"':
        id_text, payload = _read_legacy(message, id_text)
    id_ = _id(message, id_text, by_place=by_place)
    own = {name: texts[place] for name, place in shape.own} if shape.own else None
    return _event(message, id_, payload, content_type, values, own)


def _event(
    message: Message,
    id: UUID,
    payload: bytes,
    content_type: str | None,
    values: Sequence[Any],
    own: Mapping[str, str] | None,
) -> Event:
    # fmt: off
    (_, _, _, _, _, tenant, type_, aggregate_type, aggregate_id, version, event_key, schema_id, schema_version,
     occurred_at) = values
    # fmt: on
    key = message.key
    now = message.written_at or datetime.now(UTC)
    # Without the constructor, which costs as much again.
    return tuple.__new__(
        Event,
        (
            id,
            0,
            tenant or "default",
            message.topic,
            type_ or UNKNOWN_TYPE,
            aggregate_type,
            aggregate_id,
            None if version is None else _number(version),
            event_key if key is None else key_text(key),
            None,
            payload,
            content_type or _JSON,
            schema_id,
            schema_version,
            now,
            0,
            None,
            now if occurred_at is None else _instant(occurred_at),
            own or NO_HEADERS,
            "default",
            Status.PENDING,
            None,
        ),
    )


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def key_text(key: bytes) -> str:
    """A key as text: equal keys have equal texts, and a key that is no text has that of its bytes."""
    text = _text(key)
    return "0x" + key.hex() if text is None or "\0" in text else text


def _id(message: Message, text: str | None, *, by_place: bool) -> UUID:
    if text:
        try:
            if len(text) == 36:
                return uuid_of_text(text)
            return UUID(text)
        except ValueError:
            if len(text) == 24 and text.endswith("==") and (found := _id_of_base64(text)) is not None:
                return found
            # Any other identity of a producer: the same text is the same event.
            return stable_id("message", message.topic, text)
    if by_place:
        return id_of_place(message)
    raise Reject(
        "the message has no id, so a second delivery could not be told from the first; let its producer write an "
        'event_id header, or take its place as its id with ids="place"'
    )


def _id_of_base64(text: str) -> UUID | None:
    """The id, if Kafka Connect wrote its 16 bytes."""
    try:
        return uuid_of(b64decode(text, validate=True))
    except ValueError:
        return None


def id_of_place(message: Message) -> UUID:
    """An id that each delivery of this message has again, if the broker has places for messages."""
    return stable_id("place", message.topic, message.place or f"{message.lane.name}/{message.position}")


def _cloud_attribute(name: str, value: Any, fields: dict[str, Any], own: dict[str, str]) -> None:
    if name in ("traceparent", "tracestate"):
        own[name] = str(value)
    elif (field := _CLOUD_FIELDS.get(name)) is not None:
        fields[field] = value
    elif name not in _CLOUD_UNUSED:
        own[f"ce_{name}"] = value if isinstance(value, str) else json.dumps(value)


def _read_cloud(
    message: Message, headers: Mapping[str, str], content_type: str | None, is_structured: bool
) -> tuple[str | None, bytes, dict[str, Any], dict[str, str]] | None:
    """Id, payload, fields and own headers of a CloudEvent; None: it is none."""
    fields: dict[str, Any] = {}
    own: dict[str, str] = {}
    if is_structured:
        id_text, payload = _read_structured(message, fields, own)
        own |= {name: value for name, value in headers.items() if name not in _CONTENT_TYPES}
        return id_text, payload, fields, own
    id_text = headers.get("ce_id") or headers.get("ce-id")
    if id_text is None:
        return None
    for name, value in headers.items():
        if name[:3] in ("ce_", "ce-"):
            _cloud_attribute(name[3:], value, fields, own)
        elif name not in _CONTENT_TYPES:
            own[name] = value
    fields["content_type"] = content_type
    return id_text, message.body, fields, own


def _read_structured(message: Message, fields: dict[str, Any], own: dict[str, str]) -> tuple[str | None, bytes]:
    document = _json_object(message.body, "a structured CloudEvent")
    for name, value in document.items():
        if value is not None:
            _cloud_attribute(name, value, fields, own)
    if "data_base64" in document:
        payload = _from_base64(document["data_base64"])
    elif "data" not in document:
        payload = b""
    else:
        payload = _member(message.body, "data", document["data"])
    id_text = document.get("id")
    return None if id_text is None else str(id_text), payload


def _read_legacy(message: Message, id_text: str | None) -> tuple[str | None, bytes]:
    try:
        document = json.loads(message.body)
    except ValueError:
        return id_text, message.body
    if not isinstance(document, dict) or not document.keys() & {"payload", "payload_base64"}:
        return id_text, message.body
    if "payload_base64" in document:
        return id_text or str(document["_id"]), _from_base64(document["payload_base64"])
    return id_text or str(document["_id"]), _member(message.body, "payload", document["payload"])


def _member(body: bytes, name: str, value: Any) -> bytes:
    """The bytes of a member of a JSON object: as they stand there, if it is where Pillarbox writes it; else written
    anew."""
    text = body.decode()
    marker = f'"{name}":'
    start = text.find(marker)
    if start >= 0:
        start += len(marker)
        begin = start + len(text[start:]) - len(text[start:].lstrip())
        try:
            found, end = json.JSONDecoder().raw_decode(text, begin)
        except ValueError:
            found, end = None, begin
        if found == value and end > begin:
            return text[start:end].encode()
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _json_object(body: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise Reject(f"{what} is not JSON; correct its producer") from None
    if not isinstance(document, dict):
        raise Reject(f"{what} is no JSON object; correct its producer")
    return document


def _from_base64(value: Any) -> bytes:
    try:
        return b64decode(value, validate=True)
    except (Base64Error, TypeError, ValueError):
        raise Reject("the payload of the message is not base64; correct its producer") from None


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise Reject("the aggregate version of the message is no whole number; correct its producer") from None


def _instant(value: Any) -> datetime:
    try:
        instant = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return _instant_of_number(value)
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)


def _instant_of_number(value: Any) -> datetime:
    """Debezium writes microseconds since 1970."""
    try:
        return datetime.fromtimestamp(int(value) / 1_000_000, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        raise Reject("the instant of the message is not ISO 8601; correct its producer") from None


def unreadable(message: Message) -> Event:
    """The event that stands for a message that no decoder could read, so that it can be a dead letter."""
    headers = {
        name: text
        for name, value in message.headers
        if (text := _text(value)) is not None and "\0" not in text and "\0" not in name
    }
    now = message.written_at or datetime.now(UTC)
    key = None if message.key is None else key_text(message.key)
    return Event(
        id_of_place(message), 0, "default", message.topic, UNREADABLE_TYPE, None, None, None, key, None,
        message.body, message.content_type or _BINARY, None, None, now, 0, None, now, headers, "default",
        Status.PENDING, None,
    )  # fmt: skip


def message_of(event: Event, lane: Any, position: int) -> Message:
    """The message that an unreadable event stands for, to be read once more."""
    return Message(
        lane,
        position,
        event.topic,
        None if event.key is None else event.key.encode(),
        event.payload,
        [(name, value.encode()) for name, value in event.headers.items()],
        None if event.content_type == _BINARY else event.content_type,
        written_at=event.created_at,
    )
