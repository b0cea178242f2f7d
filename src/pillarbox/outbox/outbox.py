"""Makes events and writes them: the class that applications use."""

import builtins
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from typing import Any, Unpack
from uuid import UUID

from pillarbox.drivers import Driver, driver_of
from pillarbox.drivers.awaiting import YesOrNo
from pillarbox.drivers.contract import Build, settled
from pillarbox.drivers.registry import prepare
from pillarbox.errors import ConfigError, InvalidEvent
from pillarbox.event import Event, Status
from pillarbox.ids import uuid7
from pillarbox.limits import check, check_name
from pillarbox.names import Names
from pillarbox.observe import Observer, Observers
from pillarbox.outbox import sql
from pillarbox.outbox.awaiting import Added, AddedAll, PendingWrite
from pillarbox.outbox.blocks import Block, Capture
from pillarbox.outbox.fields import EventFields, OnDuplicate, id_of, text_of, utc_of, with_trace
from pillarbox.outbox.models import Models
from pillarbox.outbox.routes import DEFAULT, Routed, Routes, in_each_stream, rule_of
from pillarbox.outbox.sink import BoundOutbox, EventSink
from pillarbox.outbox.transaction import Transaction
from pillarbox.outbox.work import Late, Question, Write
from pillarbox.payload import Encoder, serialise


class Outbox:
    """Makes the events of one outbox and writes them with the caller's own transaction.

    prefix, schema: where its tables are. payload_limit: the most bytes that a payload may have. routes: the streams of
    events that name none: a mapping such as ``{"order.*": ["default", "search"]}`` from types to streams, of which the
    first that fits counts, or a function from an event to its streams. An event with several streams is written once
    for each. lock_keys: transactions that write events of one key wait for each other, from ``add`` to their commit.
    For applications that can change the same aggregate in two transactions at once. transactions: False for MongoDB
    without transactions: events are written on their own, after their data. types: the model of each type of events; a
    payload that does not fit is refused. A model is a Pydantic model, a msgspec Struct, a dataclass, a TypedDict, a
    function that raises ValueError or TypeError, or None for any payload. strict: refuse types that are not in
    ``types``. encoder: a function from a value that JSON does not have, such as an ObjectId, to plain data; it raises
    TypeError for values that it leaves to Pillarbox. observers: learn which events are added.
    """

    def __init__(
        self,
        *,
        prefix: str = "outbox",
        schema: str | None = None,
        payload_limit: int = 1_000_000,
        routes: Routes | None = None,
        lock_keys: bool = False,
        transactions: bool = True,
        types: Mapping[str, Any] | None = None,
        strict: bool = False,
        encoder: Encoder | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        if payload_limit < 1:
            raise ConfigError(f"payload_limit is {payload_limit}; use a number of bytes above 0")
        if lock_keys and not transactions:
            raise ConfigError("lock_keys lasts as long as a transaction; with transactions=False leave it out")
        self._names = Names(prefix, schema)
        self._payload_limit = payload_limit
        self._rule = rule_of(routes)
        self._lock_keys = lock_keys
        self._transactions = transactions
        if strict and not types:
            raise ConfigError("strict refuses every type that is not in types; pass types={...} too")
        self._models = Models(types, is_strict=strict) if types else None
        if encoder is not None and not callable(encoder):
            raise ConfigError(
                f"encoder is a {builtins.type(encoder).__name__}; pass a function from a value to plain data"
            )
        self._encoder = encoder
        self._captures: Sequence[Capture] = ()
        self._observers = Observers(observers)
        prepare()

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

        If its route has several streams, the first one is in the event that is returned.

        tx: a connection, cursor or session of the application. This call never commits or rolls back. On drivers
        that have to be awaited (asyncpg, psycopg's AsyncConnection, aiosqlite, asyncmy, SQLAlchemy's
        AsyncConnection, PyMongo's AsyncClientSession) await the call; :meth:`transaction` leaves nothing to forget.
        on_duplicate: if the id is in the outbox already, ``raise`` DuplicateEvent or ``ignore`` the new event.
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

    def _write(self, tx: Any, events: Sequence[Event], on_duplicate: OnDuplicate) -> PendingWrite | None:
        if on_duplicate not in ("raise", "ignore"):
            raise ConfigError(f"on_duplicate is {on_duplicate!r}; use 'raise' or 'ignore'")
        # A late event gets its streams when it is complete.
        events = [copy for event in events for copy in ([event] if isinstance(event, Late) else in_each_stream(event))]
        if (self._captures or Capture.of_all) and not self._capture(
            [event for event in events if not isinstance(event, Late)]
        ):
            events = [event for event in events if isinstance(event, Late)]
        if not events:
            return None
        write = Write(events, self._names, on_duplicate == "ignore", self._lock_keys, self._transactions)
        pending = self._handed(tx, write)
        self._observers.added(events)
        return pending

    def _handed(self, tx: Any, write: Write) -> PendingWrite | None:
        events = write.events
        if isinstance(tx, Transaction):
            tx.buffer(write)
            return None
        driver = self._driver(tx)
        if driver.is_buffered:
            driver.defer(events, write._replace(events=()), self._build_later)
            return None
        build = _build(driver, "add", write)
        if not driver.is_awaited:
            driver.run(build)
            return None
        if self._transactions:
            driver.check()
        return PendingWrite(driver, build, [event.type for event in events])

    def exists(self, tx: Any, id: UUID | str, stream: str | None = None) -> YesOrNo:
        """Whether the outbox has an event with this id: waiting, published and not yet pruned, or dead.

        stream: the one to look in; None: any.
        """
        if stream is not None:
            check_name("stream", stream)
        if isinstance(tx, Transaction):
            tx = tx.connection
        driver = self._driver(tx)
        return YesOrNo(driver, _build(driver, "exists", Question(id_of(id), stream, self._names)), "outbox.exists")

    def sink(self, tx: Any) -> EventSink:
        """This outbox with a session or connection, for services that should not know of it.

        On drivers that have to be awaited use :meth:`transaction` or a unit of work.
        """
        driver = self._driver(tx)
        if driver.is_awaited and not driver.is_buffered:
            raise ConfigError(
                "this handle has to be awaited; use `async with outbox.transaction(...) as tx:`, and pass tx"
            )
        return BoundOutbox(self, tx)

    def transaction(self, handle: Any) -> Block[Transaction]:
        """A transaction that writes its events just before it commits: ``async with outbox.transaction(pool) as tx:``,
        or ``with`` on drivers that are not awaited.

        handle: a pool, a connection or an engine, a client of MongoDB or a session of it, or a function that opens a
        connection. In a transaction that is open already the block is a savepoint; MongoDB has none and refuses.
        """
        driver = self._driver(handle)
        if driver.is_buffered:
            raise ConfigError(
                "outbox.transaction takes an engine or a connection; on a session call outbox.add(session, ...)"
            )
        return Block("outbox.transaction", driver.is_awaited, self._opened(driver))

    @asynccontextmanager
    async def _opened(self, driver: Driver) -> AsyncIterator[Transaction]:
        async with self._begun(driver) as tx:
            if not isinstance(tx, Transaction):
                raise ConfigError(
                    "outbox.transaction takes an engine, not a sessionmaker; write `with sessions.begin() as session:` "
                    "and outbox.add(session, ...)"
                )
            yield tx

    @asynccontextmanager
    async def _begun(self, driver: Driver) -> AsyncIterator[Any]:
        """A transaction that writes its events before it commits. On a plain driver it awaits nothing."""
        async with driver.begin() as handle:
            driver = self._driver(handle)
            if driver.is_buffered:
                yield handle
                return
            tx = Transaction(self, handle)
            try:
                yield tx
                for write in tx.writes:
                    events = self._completed(write.events)
                    if events:
                        await settled(driver.run(_build(driver, "add", write._replace(events=events))))
            finally:
                tx.is_open = False

    def _build_later(self, settings: Write, events: Sequence[Event]) -> Build[None]:
        return partial(sql.add, settings._replace(events=self._completed(events)))

    def _completed(self, events: Sequence[Event]) -> Sequence[Event]:
        """The events that are to be written, complete."""
        ready = []
        for event in events:
            if not isinstance(event, Late):
                ready.append(event)
                continue
            whole = event.completed()
            if isinstance(whole.stream, Routed):
                whole = self._routed(whole)
            copies = list(in_each_stream(whole))
            # Written again after a savepoint was rolled back, it is still captured once.
            if self._capture([] if event.is_captured else copies):
                ready += copies
            event.is_captured = True
        return ready

    def _capture(self, events: Sequence[Event]) -> bool:
        """Tell the captures of events; whether events are written."""
        is_written = True
        for capture in (*self._captures, *Capture.of_all):
            capture.events.extend(events)
            is_written = is_written and capture.write
        return is_written

    def _driver(self, handle: Any) -> Driver:
        driver = driver_of(handle)
        if not self._transactions and driver.needs_transaction:
            raise ConfigError(
                "transactions=False is for MongoDB; on this handle there is always a transaction: leave it out"
            )
        return driver

    def follow(self, base: builtins.type) -> None:
        """Write the events of SQLAlchemy's mapped aggregates with the session that they are in, plain or asynchronous.

        base: the base class of the mapped classes, or one of them; see :class:`Aggregate`. Call it once, where the
        outbox is made. If several outboxes follow one class, the last call decides.
        """
        import_module("pillarbox.aggregates.follow").follow(self, base)

    def capture(self, *, write: bool = True, committed: Any = False) -> Capture:
        """For tests: ``with outbox.capture() as events:`` collects the events that any thread adds to this outbox, in
        order, even if their transaction does not commit.

        write: False writes nothing and needs no transaction. committed: an engine, a pool, or a function that opens a
        connection; when the block ends, it is asked which events were committed, and only those stay in the list. With
        one that is awaited use ``async with``.
        """
        return Capture(self, write, committed)

    def _routed(self, event: Event) -> Event:
        """The event with the streams that the rule gives it."""
        return event if self._rule is None else event._replace(stream=self._rule(event))

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
        """Make an event. Raises InvalidEvent if it could not be delivered.

        payload: bytes and text as they are, anything else as JSON: plain data, dataclasses, Pydantic or msgspec models.
        key: events with the same key are published in order; default: the aggregate_id; text, a whole
        number, a UUID, an ObjectId, or an enumeration of these.
        stream: the flow that it takes; default: as the outbox's routes say, else ``default``.
        available_at: publish it not before this instant. headers: the W3C trace context of the current OpenTelemetry
        span is added, unless they have their own.
        """
        data, own_type = serialise(payload, self._encoder)
        if len(data) > self._payload_limit:
            raise InvalidEvent(
                f"the payload has {len(data):,} bytes, the limit is {self._payload_limit:,}; store it elsewhere and "
                "send a reference, or raise payload_limit"
            )
        if self._models is not None:
            self._models.check(type, payload, data)
        if key is None:
            key = aggregate_id
        now = datetime.now(UTC)
        event = Event(
            id=uuid7() if id is None else id,
            seq=0,
            stream=DEFAULT if stream is None else stream,
            tenant=tenant,
            topic=topic,
            type=type,
            aggregate_type=aggregate_type,
            aggregate_id=text_of("aggregate_id", aggregate_id),
            aggregate_version=aggregate_version,
            key=text_of("key", key),
            routing_key=routing_key,
            payload=data,
            content_type=own_type if content_type is None else content_type,
            schema_id=schema_id,
            schema_version=schema_version,
            occurred_at=utc_of("occurred_at", occurred_at) or now,
            created_at=now,
            attempts=0,
            max_attempts=max_attempts,
            status=Status.PENDING if available_at is None else Status.SCHEDULED,
            headers=with_trace(headers),
            available_at=utc_of("available_at", available_at),
        )
        check(event)
        return self._routed(event) if stream is None else event


def _build(driver: Driver, verb: str, work: Write | Question) -> Build[Any]:
    """The steps of one operation, for the driver's family of databases."""
    steps = sql if driver.family == "sql" else import_module("pillarbox.outbox.mongo")
    return partial(getattr(steps, verb), work)
