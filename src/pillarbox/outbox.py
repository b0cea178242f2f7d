"""The outbox as its writers see it: makes events, and refuses what could not be delivered."""

import builtins
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, Final
from uuid import UUID

from pillarbox.errors import ConfigError, InvalidEvent
from pillarbox.event import NO_HEADERS, Event, Status
from pillarbox.ids import uuid7
from pillarbox.names import Names
from pillarbox.payload import serialise

# Lengths in characters; a topic's is what Kafka allows.
_NAME_LIMITS: Final = {
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
}
_REQUIRED: Final = frozenset({"stream", "tenant", "type", "content_type"})
_HEADER_BYTES: Final = 32_768
# By the package that a handle's class comes from; imported when the first such handle is seen.
_WRITERS: Final = {"sqlite3": "pillarbox.writers.sqlite3"}


class Outbox:
    """Makes the events of one outbox and writes them with the caller's own transaction.

    prefix, schema: where its tables are.
    payload_limit: the most bytes that a payload may have.
    streams: from a tenant to the stream of its events, for tenants that need a flow of their own.
    """

    def __init__(
        self,
        *,
        prefix: str = "outbox",
        schema: str | None = None,
        payload_limit: int = 1_000_000,
        streams: Mapping[str, str] | None = None,
    ) -> None:
        if payload_limit < 1:
            raise ConfigError(f"payload_limit is {payload_limit}; use a number of bytes above 0")
        self._names = Names(prefix, schema)
        self._payload_limit = payload_limit
        self._streams = dict(streams or {})

    def add(self, tx: Any, type: str, payload: Any, **fields: Any) -> Event:
        """Write an event in the transaction that ``tx`` has open; ``fields`` are those of :meth:`event`."""
        event = self.event(type, payload, **fields)
        self.add_all(tx, [event])
        return event

    def add_all(self, tx: Any, events: Sequence[Event]) -> None:
        """Write events made by :meth:`event`, in this order."""
        module = next((_WRITERS[root] for kind in builtins.type(tx).__mro__ if (root := _root(kind)) in _WRITERS), None)
        if module is None:
            raise ConfigError(
                f"outbox.add cannot write with a {builtins.type(tx).__module__}.{builtins.type(tx).__qualname__}; "
                f"pass a connection of: {', '.join(_WRITERS)}"
            )
        import_module(module).write(tx, events, self._names)

    def event(
        self,
        type: str,
        payload: Any,
        *,
        key: object = None,
        topic: str = "",
        stream: str | None = None,
        tenant: str = "default",
        id: UUID | None = None,
        aggregate_type: str | None = None,
        aggregate_id: object = None,
        aggregate_version: int | None = None,
        routing_key: str | None = None,
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
        schema_id: str | None = None,
        schema_version: str | None = None,
        occurred_at: datetime | None = None,
        available_at: datetime | None = None,
        max_attempts: int | None = None,
    ) -> Event:
        """An event that can be delivered, or InvalidEvent.

        key: what orders it; default the aggregate_id; anything with a text form. available_at: not before this instant.
        """
        data, own_type = serialise(payload)
        if len(data) > self._payload_limit:
            raise InvalidEvent(
                f"the payload has {len(data):,} bytes, the limit is {self._payload_limit:,}; store it elsewhere and "
                "send a reference, or raise payload_limit"
            )
        if key is None:
            key = aggregate_id
        now = datetime.now(UTC)
        event = Event(
            id=id or uuid7(),
            seq=0,
            stream=stream if stream is not None else self._streams.get(tenant, "default"),
            tenant=tenant,
            topic=topic,
            type=type,
            aggregate_type=aggregate_type,
            aggregate_id=None if aggregate_id is None else str(aggregate_id),
            aggregate_version=aggregate_version,
            key=None if key is None else str(key),
            routing_key=routing_key,
            payload=data,
            content_type=content_type or own_type,
            schema_id=schema_id,
            schema_version=schema_version,
            occurred_at=_utc("occurred_at", occurred_at) or now,
            created_at=now,
            attempts=0,
            max_attempts=max_attempts,
            status=Status.PENDING if available_at is None else Status.SCHEDULED,
            headers=dict(headers) if headers else NO_HEADERS,
            available_at=_utc("available_at", available_at),
        )
        _check(event)
        return event


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _utc(name: str, instant: datetime | None) -> datetime | None:
    if instant is None:
        return None
    if instant.tzinfo is None:
        raise InvalidEvent(f"{name} has no time zone; pass an aware datetime, for example datetime.now(UTC)")
    return instant.astimezone(UTC)


def _check(event: Event) -> None:
    for name, limit in _NAME_LIMITS.items():
        value = getattr(event, name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidEvent(f"{name} is of type {type(value).__name__}; pass text")
        if not value and name in _REQUIRED:
            raise InvalidEvent(f"{name} is empty; give it a name")
        if len(value) > limit:
            raise InvalidEvent(f"{name} has {len(value)} characters, the limit is {limit}; shorten it")
        _check_text(name, value)
    if not isinstance(event.id, UUID):
        raise InvalidEvent(f"id is of type {type(event.id).__name__}; pass a uuid.UUID")
    for name, least, most in (("max_attempts", 1, 2**31 - 1), ("aggregate_version", -(2**63), 2**63 - 1)):
        number = getattr(event, name)
        if number is not None and (type(number) is not int or not least <= number <= most):
            raise InvalidEvent(f"{name} is {number!r}; pass a whole number from {least} to {most}")
    if event.headers:
        _check_headers(event.headers)


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
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidEvent(f"{what} contains a lone surrogate, which is no character; decode the text again") from None
    if "\0" in text:
        raise InvalidEvent(f"{what} contains a NUL character; remove it")
