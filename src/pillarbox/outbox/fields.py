"""The optional fields of an event, and the conversion of a caller's values."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from enum import Enum
from typing import Final, Literal, TypeAlias, TypedDict
from uuid import UUID

from pillarbox.errors import InvalidEvent
from pillarbox.event import NO_HEADERS

_LONGEST_NUMBER: Final = 800  # bits; a longer one has more digits than a key may have

OnDuplicate: TypeAlias = Literal["raise", "ignore"]


class DraftFields(TypedDict, total=False):
    """The optional fields of an event that an aggregate records, see :meth:`Outbox.event`."""

    key: object
    topic: str
    stream: str | None
    tenant: str
    id: UUID | None
    routing_key: str | None
    content_type: str | None
    headers: Mapping[str, str] | None
    schema_id: str | None
    schema_version: str | None
    occurred_at: datetime | None
    available_at: datetime | None
    max_attempts: int | None


class EventFields(DraftFields, total=False):
    """The optional fields of an event, see :meth:`Outbox.event`."""

    aggregate_type: str | None
    aggregate_id: object
    aggregate_version: int | None


def with_trace(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    """The headers, with the trace context of the current span."""
    # An application that traces has imported it already; others do not pay for the import.
    trace = sys.modules.get("opentelemetry.trace")
    if headers is not None and not isinstance(headers, Mapping):
        raise InvalidEvent(f"headers are of type {type(headers).__name__}; pass a mapping from str to str")
    if trace is None or (headers and "traceparent" in headers):
        return dict(headers) if headers else NO_HEADERS
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return dict(headers) if headers else NO_HEADERS
    context = {"traceparent": f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"}
    if span.trace_state:
        context["tracestate"] = span.trace_state.to_header()
    return {**(headers or {}), **context}


def text_of(name: str, value: object) -> str | None:
    """The text of a key or an id, of types that have one text for each value."""
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return None
    # Not by str(): a subclass may have a text of its own.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, UUID):
        return UUID.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= _LONGEST_NUMBER:
        return int.__repr__(value)
    if (type(value).__module__, type(value).__name__) == ("bson.objectid", "ObjectId"):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        raise InvalidEvent(f"{name} is of type {type(value).__name__}; decode it, or pass its hexadecimal form")
    raise InvalidEvent(f"{name} is of type {type(value).__name__}; pass text, a whole number or a UUID, such as its id")


def id_of(value: object) -> UUID:
    """The id of an event, given as a UUID or as its text."""
    if isinstance(value, UUID):
        return value
    if isinstance(value, str):
        with suppress(ValueError):
            return UUID(value)
    raise InvalidEvent("this is not an event's id; pass a uuid.UUID, or its text")


def utc_of(name: str, instant: datetime | None) -> datetime | None:
    if instant is None:
        return None
    if not isinstance(instant, datetime):
        raise InvalidEvent(f"{name} is of type {type(instant).__name__}; pass an aware datetime")
    try:
        offset = instant.utcoffset()
    except (TypeError, ValueError) as error:
        raise InvalidEvent(f"{name} has a wrong time zone: {error}; pass an aware datetime in UTC") from None
    if offset is None:
        raise InvalidEvent(f"{name} has no time zone; pass an aware datetime, for example datetime.now(UTC)")
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        raise InvalidEvent(f"{name} is before year 1 or after year 9999 in UTC; pass another instant") from None
