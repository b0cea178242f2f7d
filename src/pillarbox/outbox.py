"""The outbox as its writers see it: makes events, and refuses what could not be delivered."""

import builtins
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from enum import Enum
from importlib import import_module
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict, Unpack
from uuid import UUID

from pillarbox.errors import ConfigError, InvalidEvent, NotInTransaction
from pillarbox.event import NO_HEADERS, Event, Status
from pillarbox.ids import uuid7
from pillarbox.names import Names
from pillarbox.payload import serialise
from pillarbox.validity import check
from pillarbox.writing import Added, AddedAll, Batch, Deferred, Exists, Pending, Question

# By the package that a handle's class comes from; imported when the first such handle is seen.
_WRITERS: Final = {
    "sqlalchemy": "pillarbox.writers.sqlalchemy",
    "psycopg": "pillarbox.writers.psycopg",
    "psycopg_pool": "pillarbox.writers.psycopg",
    "asyncpg": "pillarbox.writers.asyncpg",
    "sqlite3": "pillarbox.writers.sqlite3",
    "aiosqlite": "pillarbox.writers.aiosqlite",
    "pymysql": "pillarbox.writers.pymysql",
    "asyncmy": "pillarbox.writers.asyncmy",
    "pymongo": "pillarbox.writers.pymongo",
}

OnDuplicate: TypeAlias = Literal["raise", "ignore"]


class EventFields(TypedDict, total=False):
    """The optional fields of an event, see :meth:`Outbox.event`."""

    key: object
    topic: str
    stream: str | None
    tenant: str
    id: UUID | None
    aggregate_type: str | None
    aggregate_id: object
    aggregate_version: int | None
    routing_key: str | None
    content_type: str | None
    headers: Mapping[str, str] | None
    schema_id: str | None
    schema_version: str | None
    occurred_at: datetime | None
    available_at: datetime | None
    max_attempts: int | None


class _Capture(NamedTuple):
    events: list[Event]
    write: bool


class Outbox:
    """Makes the events of one outbox and writes them with the caller's own transaction.

    prefix, schema: where its tables are.
    payload_limit: the most bytes that a payload may have.
    streams: from a tenant to the stream of its events, for tenants that need a flow of their own.
    lock_keys: for applications whose transactions do not wait for each other when they change the same aggregate: those
    that write events of one key do then, from ``add`` to their commit.
    transactions: False for MongoDB without transactions: events are then written by themselves, after their data.
    """

    def __init__(
        self,
        *,
        prefix: str = "outbox",
        schema: str | None = None,
        payload_limit: int = 1_000_000,
        streams: Mapping[str, str] | None = None,
        lock_keys: bool = False,
        transactions: bool = True,
    ) -> None:
        if payload_limit < 1:
            raise ConfigError(f"payload_limit is {payload_limit}; use a number of bytes above 0")
        if lock_keys and not transactions:
            raise ConfigError("lock_keys lasts as long as a transaction; with transactions=False leave it out")
        self._names = Names(prefix, schema)
        self._payload_limit = payload_limit
        self._streams = dict(streams or {})
        self._lock_keys = lock_keys
        self._transactions = transactions
        self._captures: Sequence[_Capture] = ()
        if "sqlalchemy.orm" in sys.modules:
            # Before the first event, which may be added by a hook of a session, when it is too late to set ours.
            import_module("pillarbox.writers._sqlalchemy_session")

    def add(
        self,
        tx: Any,
        type: str,
        payload: Any,
        *,
        on_duplicate: OnDuplicate = "raise",
        **fields: Unpack[EventFields],
    ) -> Added:
        """Write an event in the transaction that ``tx`` has open; ``fields`` are those of :meth:`event`.

        tx: a connection, cursor or session of the application; it commits or rolls back, never this call. On drivers
        that have to be awaited (asyncpg, psycopg's AsyncConnection, aiosqlite, asyncmy, SQLAlchemy's
        AsyncConnection, PyMongo's AsyncClientSession) await the call; :meth:`transaction` leaves nothing to forget.
        on_duplicate: for an id that is in the outbox already: ``raise`` DuplicateEvent, or ``ignore`` the new event.
        """
        event = self.event(type, payload, **fields)
        return Added.of(event, self._write(tx, [event], on_duplicate))

    def add_all(self, tx: Any, events: Sequence[Event], *, on_duplicate: OnDuplicate = "raise") -> AddedAll:
        """Write events made by :meth:`event`, in this order, up to 1,000 in a statement; await it as :meth:`add`."""
        checked: list[Any] = list(events)
        for event in checked:
            if not isinstance(event, Event):
                kind = builtins.type(event).__name__
                raise InvalidEvent(f"add_all was given a value of type {kind}; pass events made by outbox.event")
            check(event)
        return AddedAll(self._write(tx, checked, on_duplicate))

    def _write(self, tx: Any, events: Sequence[Event], on_duplicate: OnDuplicate) -> Pending | None:
        if on_duplicate not in ("raise", "ignore"):
            raise ConfigError(f"on_duplicate is {on_duplicate!r}; use 'raise' or 'ignore'")
        if not events:
            return None
        is_written = True
        for capture in self._captures:
            capture.events.extend(events)
            is_written = is_written and capture.write
        if not is_written:
            return None
        batch = Batch(events, self._names, on_duplicate == "ignore", self._lock_keys, self._transactions)
        if isinstance(tx, Transaction):
            tx.buffer(batch)
            return None
        deferred: Deferred | None = self._writer(tx).write(tx, batch)
        return None if deferred is None else Pending(deferred, [event.type for event in events])

    def exists(self, tx: Any, id: UUID) -> Exists:
        """Whether the outbox knows an event with this id: waiting, published and not yet pruned, or dead."""
        if isinstance(tx, Transaction):
            tx = tx.connection
        return Exists(self._writer(tx).exists(tx, Question(id, self._names)))

    @asynccontextmanager
    async def transaction(self, handle: Any) -> AsyncIterator["Transaction"]:
        """A transaction on a raw asynchronous driver that writes its events just before it commits.

        handle: a pool or a connection of asyncpg, psycopg, aiosqlite or asyncmy, SQLAlchemy's AsyncEngine or
        AsyncConnection, or PyMongo's AsyncMongoClient or AsyncClientSession. In a transaction that is open already the
        block is a savepoint; MongoDB has none and refuses.
        """
        writer = self._writer(handle)
        async with writer.begin(handle) as connection:
            tx = Transaction(self, connection)
            try:
                yield tx
                for batch in tx.batches:
                    deferred = writer.write(connection, batch)
                    await deferred.run()
            finally:
                tx.is_open = False

    def _writer(self, handle: Any) -> Any:
        writer = _writer(handle)
        if not self._transactions and not hasattr(writer, "WITHOUT_TRANSACTIONS"):
            raise ConfigError(
                "transactions=False is for MongoDB; on this handle there is always a transaction: leave it out"
            )
        return writer

    @contextmanager
    def capture(self, *, write: bool = True) -> Iterator[Sequence[Event]]:
        """For tests of an application: the events that are added to this outbox meanwhile, in order, by any thread.

        They are there whether or not their transaction commits. write: False writes none and touches no transaction.
        """
        capture = _Capture([], write)
        self._captures = [*self._captures, capture]
        try:
            yield capture.events
        finally:
            self._captures = [each for each in self._captures if each is not capture]

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

        payload: bytes and text as they are, anything else as JSON: plain data, dataclasses, Pydantic or msgspec models.
        key: what orders it; default the aggregate_id; anything with a text form. available_at: not before this instant.
        headers: with the W3C trace context of the current OpenTelemetry span, unless it brings its own.
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
            id=uuid7() if id is None else id,
            seq=0,
            stream=stream if stream is not None else self._streams.get(tenant, "default"),
            tenant=tenant,
            topic=topic,
            type=type,
            aggregate_type=aggregate_type,
            aggregate_id=_text("aggregate_id", aggregate_id),
            aggregate_version=aggregate_version,
            key=_text("key", key),
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
            headers=_with_trace(headers),
            available_at=_utc("available_at", available_at),
        )
        check(event)
        return event


class Transaction:
    """The transaction of an :meth:`Outbox.transaction` block; everything but its own methods is the connection's."""

    def __init__(self, outbox: Outbox, connection: Any) -> None:
        self.connection = connection
        self.batches: list[Batch] = []
        self.is_open = True
        self._outbox = outbox

    def add(
        self,
        type: str,
        payload: Any,
        *,
        on_duplicate: OnDuplicate = "raise",
        **fields: Unpack[EventFields],
    ) -> Event:
        """Have an event written before the block commits."""
        return self._outbox.add(self, type, payload, on_duplicate=on_duplicate, **fields)

    def add_all(self, events: Sequence[Event], *, on_duplicate: OnDuplicate = "raise") -> None:
        """Have events written before the block commits, in this order."""
        self._outbox.add_all(self, events, on_duplicate=on_duplicate)

    def buffer(self, batch: Batch) -> None:
        if not self.is_open:
            raise NotInTransaction("this outbox.transaction block has ended; add events inside of it")
        if not self.batches or self.batches[-1]._replace(events=()) != batch._replace(events=()):
            self._events: list[Event] = []
            self.batches.append(batch._replace(events=self._events))
        self._events.extend(batch.events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


_found: dict[type, Any] = {}


def _writer(tx: Any) -> Any:
    kind = builtins.type(tx)
    if kind not in _found:
        _found[kind] = _find_writer(kind)
    return _found[kind]


def _find_writer(kind: type) -> Any:
    kinds = kind.__mro__
    module = next((_WRITERS[root] for each in kinds if (root := _root(each)) in _WRITERS), None)
    if module is None:
        raise ConfigError(
            f"the outbox cannot write with a {kind.__module__}.{kind.__qualname__}; "
            f"pass a connection, cursor or session of: {', '.join(_WRITERS)}"
        )
    return import_module(module)


def _with_trace(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    # An application that traces has imported it; one that does not must not pay for it.
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


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _text(name: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bytes | bytearray | memoryview):
        raise InvalidEvent(f"{name} is of type {type(value).__name__}; decode it, or pass its hexadecimal form")
    return str(value.value if isinstance(value, Enum) else value)


def _utc(name: str, instant: datetime | None) -> datetime | None:
    if instant is None:
        return None
    if not isinstance(instant, datetime):
        raise InvalidEvent(f"{name} is of type {type(instant).__name__}; pass an aware datetime")
    if instant.utcoffset() is None:
        raise InvalidEvent(f"{name} has no time zone; pass an aware datetime, for example datetime.now(UTC)")
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        raise InvalidEvent(f"{name} is before year 1 or after year 9999 in UTC; pass another instant") from None
