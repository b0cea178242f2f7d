"""The limits of an event's fields."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from pillarbox.errors import InvalidEvent
from pillarbox.event import Event

# Lengths in characters; a topic's is what Kafka allows.
NAME_LIMITS: Final = {
    "stream": 100,
    "tenant": 100,
    "topic": 249,
    "type": 255,
    "key": 255,
    "routing_key": 255,
    "aggregate_type": 255,
    "aggregate_id": 255,
    "content_type": 255,
    "schema_id": 255,
    "schema_version": 100,
    "consumer": 100,  # not a field: the name of an inbox
}
_FIELDS: Final = tuple(name for name in NAME_LIMITS if name in Event._fields)
_REQUIRED: Final = frozenset({"stream", "tenant", "type", "content_type", "consumer"})
_OPTIONAL: Final = NAME_LIMITS.keys() - _REQUIRED - {"topic"}  # may be none
_HEADER_BYTES: Final = 32_768
# MySQL keeps no instant before the year 1000, MongoDB finds no due event before 1971, and asyncpg reads the end of the
# year 9999 as infinity.
OLDEST_YEAR: Final = 1000
_FIRST_YEAR: Final = 1971
LAST_YEAR: Final = 9998
LEAST_VERSION: Final = -(2**63)
MOST_VERSION: Final = 2**63 - 1
MOST_ATTEMPTS: Final = 2**31 - 1  # a column holds no more; the count stops there
_NUMBERS: Final = (("max_attempts", 1, MOST_ATTEMPTS), ("aggregate_version", LEAST_VERSION, MOST_VERSION))


def check(event: Event) -> None:
    """Raise InvalidEvent for a field that a store or a destination could not take."""
    for name in _FIELDS:
        value = getattr(event, name)
        if value is not None or name not in _OPTIONAL:
            check_name(name, value)
    _check_others(event)
    if event.available_at is not None:
        _check_instant("available_at", event.available_at, _FIRST_YEAR)
    if event.headers:
        _check_headers(event.headers)


def check_kinds(event: Event) -> None:
    """Raise InvalidEvent for a field of a wrong type, or a text that has no bytes. Texts of a foreign event may be long
    or empty, and have characters that only some databases refuse."""
    for name in _FIELDS:
        value = getattr(event, name)
        if value is not None or name not in _OPTIONAL:
            _check_encodable(name, value)
    _check_others(event)
    if not isinstance(event.headers, Mapping):
        raise InvalidEvent(f"headers are of type {type(event.headers).__name__}; pass a mapping from str to str")
    for name, value in event.headers.items():
        _check_encodable("a header's name", name)
        _check_encodable(f"header {name[:50]!r}", value)


def _check_others(event: Event) -> None:
    """The fields that are no texts."""
    if not isinstance(event.id, UUID):
        raise InvalidEvent(f"id is of type {type(event.id).__name__}; pass a uuid.UUID")
    for name, least, most in _NUMBERS:
        number = getattr(event, name)
        if number is not None and (type(number) is not int or not least <= number <= most):
            raise InvalidEvent(f"{name} is {_shown(number)}; pass a whole number from {least} to {most}")
    if not isinstance(event.payload, bytes):
        raise InvalidEvent(f"the payload of an event is of type {type(event.payload).__name__}; pass bytes")
    _check_instant("occurred_at", event.occurred_at, OLDEST_YEAR)


def _check_encodable(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise InvalidEvent(f"{name} is of type {type(value).__name__}; pass text")
    if not value.isascii():
        _check_surrogates(name, value)


def check_name(name: str, value: Any) -> None:
    """Raise InvalidEvent for a text that this field of an event, or this name, cannot have."""
    if not isinstance(value, str):
        raise InvalidEvent(f"{name} is of type {type(value).__name__}; pass text")
    if not value and name in _REQUIRED:
        raise InvalidEvent(f"{name} is empty; give it a name")
    if len(value) > NAME_LIMITS[name]:
        raise InvalidEvent(f"{name} has {len(value)} characters, the limit is {NAME_LIMITS[name]}; shorten it")
    _check_text(name, value)


def _check_instant(name: str, instant: Any, first_year: int) -> None:
    if not isinstance(instant, datetime) or instant.tzinfo is None:
        raise InvalidEvent(f"{name} is no aware datetime; pass one, for example datetime.now(UTC)")
    if not first_year <= instant.year <= LAST_YEAR:
        raise InvalidEvent(f"{name} is in the year {instant.year}; pass an instant from {first_year} to {LAST_YEAR}")


def _shown(value: Any) -> str:
    """A number, unless it is too long; of anything else the type."""
    if value is None or (isinstance(value, int | float) and abs(value) < 10**30):
        return repr(value)
    return "a number of more than 30 digits" if isinstance(value, int) else f"of type {type(value).__name__}"


def _check_headers(headers: Mapping[Any, Any]) -> None:
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidEvent("a header's name or value is not text; pass a mapping from str to str")
        _check_text("a header's name", name)
        _check_text(f"header {name[:50]!r}", value)
        size += len(name.encode()) + len(value.encode())
    if size > _HEADER_BYTES:
        raise InvalidEvent(f"the headers have {size:,} bytes, the limit is {_HEADER_BYTES:,}; put it into the payload")


def _check_text(what: str, text: str) -> None:
    if text.isascii():
        if "\0" in text:
            raise InvalidEvent(f"{what} contains a NUL character; remove it")
        return
    _check_surrogates(what, text)
    if "\0" in text:
        raise InvalidEvent(f"{what} contains a NUL character; remove it")


def _check_surrogates(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidEvent(f"{what} contains a lone surrogate, which is no character; decode the text again") from None
