"""Decoders: functions from a message to its event.

``decode`` reads what Pillarbox writes (raw, legacy, CloudEvents in binary and in structured mode), what Debezium's
outbox router writes, and what a plain producer writes with an id in a header.
"""

from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args
from uuid import UUID

from pillarbox.consumer.documents import CLOUD_IDS, CONTENT_TYPES, read_cloud, read_legacy
from pillarbox.consumer.unreadable import id_of_place, key_text, text_of
from pillarbox.envelopes.headers import RESERVED
from pillarbox.errors import ConfigError, InvalidEvent, Reject
from pillarbox.event import NO_HEADERS, Event, Status
from pillarbox.hints import hint
from pillarbox.ids import stable_id
from pillarbox.limits import LAST_YEAR, LEAST_VERSION, MOST_VERSION, OLDEST_YEAR, check_kinds
from pillarbox.source import Message
from pillarbox.uuids import uuid_of, uuid_of_text

# From a message to its event. Raises Reject, with a sentence, for a message that is no event.
Decoder: TypeAlias = Callable[[Message], Event]

# What a message without an id gets.
Ids: TypeAlias = Literal["required", "place"]

UNKNOWN_TYPE: Final = "message"  # of an event whose message names no type
_JSON: Final = "application/json"
_STRUCTURED: Final = "application/cloudevents+json"
# In this order. Debezium's router writes `id`.
_IDS: Final = ("event_id", "id", "message_id")
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
    *CONTENT_TYPES, *_IDS, "tenant", "type", "aggregate_type", "aggregate_id", "aggregate_version", "key", "schema_id",
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
        try:
            check_kinds(event)
        except InvalidEvent as error:
            # Mostly a value of the message that the decoder has put into a field as it was.
            raise Reject(f"the decoder made an event that cannot be: {error}") from None
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
        if name in _IDS or name in CONTENT_TYPES:
            places[name] = place
        elif field is not None:
            places[field] = place
        elif name not in RESERVED and name not in CLOUD_IDS:
            own.append((name, place))
    pick = itemgetter(*(places.get(name, -1) for name in _PICKED))
    return _Shape(pick, own, not CLOUD_IDS.isdisjoint(names))


def _decode(message: Message, *, by_place: bool) -> Event:
    # The last value of a name that comes twice.
    headers: dict[str, Any] = dict(message.headers)
    texts: list[Any]
    try:
        texts = [*map(bytes.decode, headers.values()), None]
    except UnicodeDecodeError:
        # A foreign header that is no text is left out; the message may be read without it.
        pairs = [(name, text) for name, value in message.headers if (text := text_of(value)) is not None]
        headers = dict(pairs)
        texts = [*headers.values(), None]
    shape = _shape_of(tuple(headers))
    values = shape.pick(texts)
    content_type = message.content_type or values[0] or values[1]
    is_structured = bool(content_type) and content_type != _JSON and content_type.lower().startswith(_STRUCTURED)
    if is_structured or shape.is_cloud:
        cloud = read_cloud(message, dict(zip(headers, texts, strict=False)), content_type, is_structured)
        if cloud is not None:
            id_text, payload, fields, cloud_own = cloud
            id_ = _id(message, id_text, by_place=by_place)
            return _event(message, id_, payload, fields.get("content_type"), [*map(fields.get, _PICKED)], cloud_own)
    id_text, payload = values[2] or values[3] or values[4] or message.message_id, message.body
    if payload[:8] == b'{"_id":"':
        id_text, payload = read_legacy(message, id_text)
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


def _number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise Reject("the aggregate version of the message is no whole number; correct its producer") from None
    if not LEAST_VERSION <= number <= MOST_VERSION:
        raise Reject("the aggregate version of the message has more than 64 bits; correct its producer")
    return number


def _instant(text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = _instant_of_number(text)
    if not OLDEST_YEAR <= instant.year <= LAST_YEAR:
        raise Reject(f"the instant of the message is in the year {instant.year}; correct its producer")
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)


def _instant_of_number(text: str) -> datetime:
    """Debezium writes microseconds since 1970."""
    try:
        return datetime.fromtimestamp(int(text) / 1_000_000, UTC)
    except (ValueError, OverflowError, OSError):
        raise Reject("the instant of the message is not ISO 8601; correct its producer") from None
