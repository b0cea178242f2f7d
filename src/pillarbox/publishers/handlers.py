"""In-process handlers as a destination: a function per event type, no broker."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

from pillarbox.batch import Batch
from pillarbox.durations import Duration, seconds_of
from pillarbox.errors import ConfigError
from pillarbox.event import Event
from pillarbox.hints import hint
from pillarbox.inbox.once import inbox_of
from pillarbox.publisher import (
    SKIPPED,
    UNTRIED,
    Limits,
    Needs,
    Outcome,
    Publisher,
    PublisherFeatures,
    Result,
    outage,
    rejected,
    retry,
)
from pillarbox.publishers._calls import Handler, OneCall, Run, make_handler
from pillarbox.publishers._reminder import MOST_NAMES, Reminder
from pillarbox.publishers._rounds import Piece, Rounds
from pillarbox.publishers._session import Session
from pillarbox.publishers.keyed import Cursor, KeyedBatch
from pillarbox.relay.retry import Retry, retry_of
from pillarbox.threads import Threads

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[[Any], Any])  # of an event, or of the model of its payload
B = TypeVar("B", bound=Callable[[list[Event]], Any])

# What happens to an event whose type has no handler.
Unknown: TypeAlias = Literal["wait", "skip", "reject"]

ALL_OTHERS: Final = "*"
# A handler may come with the next deployment.
_UNKNOWN_SECONDS: Final = 30.0
_DEFAULT_CONCURRENCY: Final = 16
_LEAST_CALLS: Final = 16
_BATCH_CALLS: Final = 4
_CANCEL_SECONDS = 1.0


class Handlers(Publisher):
    """A registry of functions and the publisher that calls them.

    An async function runs on the event loop, a plain one in a thread. It succeeds when it returns, with any value.
    ``raise Reject(...)`` for an event that can never succeed, ``raise Outage(...)`` when something that the handler
    needs is away; any other exception is retried.

    unknown: an event whose type has no handler waits uncharged and holds its key (``wait``), counts as published
    (``skip``) or is dead at once (``reject``); default: it waits in a relay, and a consumer skips it.
    concurrency: how many handlers run at once; default: as the stream says, 16 without a relay.
    timeout: how long one call may take, such as ``"60s"`` or a number of seconds; None: no limit.
    grace: how long ``close`` waits for running handlers.
    max_hung: plain functions cannot be stopped; when this many are past their timeout and still running,
    the publisher reports an outage.
    """

    def __init__(
        self,
        *,
        unknown: Unknown | Literal["default"] = "default",
        concurrency: int | None = None,
        timeout: Duration | None = "60s",
        grace: Duration = "10s",
        max_hung: int = 16,
    ) -> None:
        if unknown not in (*get_args(Unknown), "default"):
            raise ConfigError(f"unknown={unknown!r}: {hint(str(unknown), get_args(Unknown))}")
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"concurrency={concurrency}: handlers need at least 1 place to run in")
        if max_hung < 1:
            raise ConfigError(f"max_hung={max_hung}: give 1 or more")
        self._given_unknown = unknown
        self._unknown: Unknown = "wait" if unknown == "default" else unknown
        self._skipped: Counter[str] = Counter()
        self._serves = ("stream", "")  # or a consumer, and its name
        self._reminder = Reminder()
        self._given_concurrency = concurrency
        self._concurrency = concurrency or _DEFAULT_CONCURRENCY
        self._timeout_seconds = _timeout_seconds(timeout)
        self._grace_seconds = seconds_of("grace", grace)
        self._max_hung = max_hung
        self._handlers: dict[str, Handler] = {}
        self._threads = Threads("pillarbox-handler")
        # Async handlers that swallowed their cancellation; the loop itself holds tasks only weakly.
        self._stray: set[asyncio.Future[None]] = set()
        self._session: Session | None = None

    def on(
        self,
        *types: str,
        timeout: Duration | Literal["default"] | None = "default",
        retry: Retry | str | None = None,
        max_attempts: int | None = None,
    ) -> Callable[[F], F]:
        """Register the decorated function for these event types; ``"*"``: for all that have no other.

        It is called with the event, or with its payload as the model that its parameter is annotated with: a Pydantic
        model, a msgspec Struct, a dataclass, a TypedDict, or dict. A payload that does not fit is rejected. Several
        functions of one type run one after the other. If one fails, the event is tried again with all of them.
        timeout: of this function. retry, max_attempts: in place of the stream's; retry is a policy such as
        ``Fixed("30s")``, or a text such as ``"fixed:30s"``.
        """
        return self._registering(types, timeout, retry, max_attempts)

    def on_batch(
        self,
        *types: str,
        size: int = 500,
        timeout: Duration | Literal["default"] | None = "default",
        retry: Retry | str | None = None,
        max_attempts: int | None = None,
    ) -> Callable[[B], B]:
        """Register a function that takes a list of events, in order per key.

        If it fails, it is called again with each event in a list of its own, so that only those that fail then are
        charged an attempt; an outage charges nobody.
        size: the most events of a list. The other arguments are those of :meth:`on`.
        """
        if size < 1:
            raise ConfigError(f"size={size}: a batch has room for 1 event or more")
        return self._registering(types, timeout, retry, max_attempts, size)

    def _registering(
        self,
        types: Sequence[str],
        timeout: Duration | Literal["default"] | None,
        retry: Retry | str | None,
        max_attempts: int | None,
        size: int = 0,
    ) -> Callable[[Any], Any]:
        if not types or not all(isinstance(type_, str) for type_ in types):
            name = "on_batch" if size else "on"
            raise ConfigError(
                f'{name}() names no event type; write @handlers.{name}("order.created"), or @handlers.{name}("*") for '
                "all the others"
            )
        if max_attempts is not None and max_attempts < 1:
            raise ConfigError(f"max_attempts={max_attempts}: give 1 or more, or leave it out for the stream's limit")
        seconds = self._timeout_seconds if timeout == "default" else _timeout_seconds(timeout)
        limits = Limits(None if retry is None else retry_of(retry), max_attempts)

        def register(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
            handler = make_handler(function, seconds, limits, size)
            self._add(dict.fromkeys(types, handler))
            return function

        return register

    def include(self, other: "Handlers") -> None:
        """Register the functions of another registry here too, with their own timeouts and retries."""
        if other is self:
            raise ConfigError("these handlers include themselves; include other ones")
        self._add(other._handlers)

    def prepared(self, needs: Needs) -> "Handlers":
        """A publisher of the stream's own with the same functions, so that streams do not share places."""
        other = Handlers(
            unknown=needs.unhandled if self._given_unknown == "default" else self._given_unknown,
            concurrency=self._given_concurrency or needs.concurrency,
            timeout=self._timeout_seconds,
            grace=self._grace_seconds,
            max_hung=self._max_hung,
        )
        other._handlers = self._handlers
        other._serves = ("consumer" if needs.unhandled == "skip" else "stream", needs.stream)
        return other

    @property
    def features(self) -> PublisherFeatures:
        calls = max(_LEAST_CALLS, self._concurrency)
        if self._handlers and all(handler.size for handler in self._handlers.values()):
            # While a few lists are in work, the events that come make a longer one, which costs less for each.
            calls = _BATCH_CALLS
        return PublisherFeatures(calls=calls, concurrency=self._given_concurrency)

    @property
    def description(self) -> str:
        return f"handlers ({self._concurrency})"

    @property
    def hung(self) -> int:
        """The number of handlers that are past their timeout and still running."""
        return self._threads.hung + len(self._stray)

    async def open(self) -> None:
        if not self._handlers:
            raise ConfigError("no handler is registered; import the module with your @handlers.on(...) functions first")
        if self._session is None:
            self._session = Session(self._concurrency)

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        session = self._session
        if session is None:
            return [outage("the handlers are not open; call open() first")] * len(batch)
        if not any(handler.size for handler in self._handlers.values()):
            return await self._alone(session, batch)
        rounds = Rounds(batch, self._batch_handler_of)
        while pieces := rounds.next():
            async with asyncio.TaskGroup() as tasks:
                for piece in pieces:
                    tasks.create_task(self._handle(session, rounds, batch, piece))
            rounds.advance()
        return rounds.outcomes

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close(self._grace_seconds)
            self._threads.stop_idle()

    def _add(self, found: Mapping[str, Handler]) -> None:
        """Register functions, behind those that a type has."""
        added = {}
        for type_, handler in found.items():
            if not type_ or (ALL_OTHERS in type_ and type_ != ALL_OTHERS):
                raise ConfigError(
                    f'event type {type_!r}: name one type in full, or "*" for all that have no other handler'
                )
            before = self._handlers.get(type_)
            added[type_] = handler if before is None else _both(type_, before, handler)
        self._handlers.update(added)

    async def _handle(self, session: Session, rounds: Rounds, batch: Batch, piece: Piece) -> None:
        events = [batch[index] for index in piece.indexes]
        if piece.handler is not None and len(events) > 1:
            outcome = await self._together(session, piece.handler, events)
            # Nobody knows which event is to blame: each is tried by itself.
            if outcome.result in (Result.PUBLISHED, Result.UNTRIED):
                rounds.record(piece, [outcome] * len(events))
                return
        rounds.record(piece, await self._alone(session, events))

    async def _alone(self, session: Session, events: Sequence[Event]) -> list[Outcome]:
        return await KeyedBatch(events).work(partial(self._work, session), concurrency=self._concurrency)

    async def _together(self, session: Session, handler: Handler, events: Sequence[Event]) -> Outcome:
        """Call a function with all these events; the outcome of each."""
        async with session:
            if session.closing:
                return UNTRIED
            if self._too_many_hang():
                return self._hanging()
            call = OneCall(events)
            await self._run(session, call, handler)
            return call.outcome

    async def _work(self, session: Session, cursor: Cursor) -> None:
        left: Handler | None = None
        while (event := cursor.event) is not None:
            async with session:
                if session.closing:
                    return
                handler = left or self.handler_of(event)
                left = None
                if handler is None:
                    cursor.record(self._without_handler(event))
                elif self._too_many_hang():
                    cursor.record(self._hanging())
                else:
                    left = await self._run(session, cursor, handler)

    def inboxes(self) -> Mapping[str, str]:
        """The names of functions that are decorated with ``inbox.once``, each with the name of its inbox."""
        places = {handler.name: inbox_of(handler.function) for handler in self._handlers.values()}
        return {name: place.consumer for name, place in places.items() if place is not None}

    def handler_of(self, event: Event) -> Handler | None:
        """The function that is called first with this event."""
        return self._handlers.get(event.type) or self._handlers.get(ALL_OTHERS)

    def _batch_handler_of(self, event: Event) -> Handler | None:
        handler = self.handler_of(event)
        return handler if handler is not None and handler.size else None

    def _hanging(self) -> Outcome:
        return outage(f"{self.hung} handlers hang past their timeout and cannot be stopped; restart the relay")

    def _too_many_hang(self) -> bool:
        return self.hung >= self._max_hung

    def _without_handler(self, event: Event) -> Outcome:
        problem = f"no handler for event type {event.type!r}"
        remedy = f'register one with @handlers.on("{event.type}"), or one for all other types with @handlers.on("*")'
        kind, name = self._serves[0], self._serves[1] or event.stream
        extra = {"action": "no_handler", kind: name, "type": event.type}
        if self._unknown == "reject":
            return rejected(f"{problem}; {remedy}")
        if self._unknown == "skip":
            if event.type not in self._skipped and len(self._skipped) >= MOST_NAMES:
                self._skipped.clear()
            self._skipped[event.type] += 1
            if self._reminder.is_due(event.type):
                count = self._skipped[event.type]
                logger.info("%s in %s '%s': its events are skipped, %d so far", problem, kind, name, count, extra=extra)
            return SKIPPED
        if self._reminder.is_due(event.type):
            logger.warning("%s in %s '%s': its events wait, uncharged; %s", problem, kind, name, remedy, extra=extra)
        return retry(f"{problem}; {remedy}", charged=False, after_seconds=_UNKNOWN_SECONDS)

    async def _run(self, session: Session, cursor: Cursor | OneCall, handler: Handler) -> Handler | None:
        """Call a function with the event of the cursor, and in the same run with those that follow. The function that
        is left to be called with the same event."""

        def next_handler(event: Event) -> Handler | None:
            """The handler that the same run may call next."""
            found = self.handler_of(event)
            if found is None or found.is_async != handler.is_async or found.timeout_seconds != handler.timeout_seconds:
                return None
            return None if session.closing or self._too_many_hang() else found

        run = Run(cursor, handler, next_handler)
        await (self._on_loop if handler.is_async else self._in_thread)(session, cursor, run)
        return run.left

    async def _on_loop(self, session: Session, cursor: Cursor | OneCall, run: Run) -> None:
        call = asyncio.create_task(run.call_on_loop(), name=f"pillarbox-handler {run.handler.name}")
        try:
            await self._wait_for(call, session, cursor, run)
        finally:
            if not call.done():
                run.abandon(at_once=True)
                call.cancel()
                await asyncio.wait({call}, timeout=_CANCEL_SECONDS)
            if not call.done():
                self._stray.add(call)
                call.add_done_callback(self._stray.discard)
                logger.warning("handler %s ignores its cancellation; %d handlers hang", run.handler.name, self.hung)

    async def _in_thread(self, session: Session, cursor: Cursor | OneCall, run: Run) -> None:
        thread = self._threads.take()
        call = thread.submit(run.call_in_thread)
        waiter = asyncio.wrap_future(call)
        try:
            await self._wait_for(waiter, session, cursor, run)
        finally:
            if call.done():
                self._threads.give_back(thread)
            else:
                run.abandon(at_once=True)
                waiter.cancel()
                self._threads.leave_behind(thread, call)
                logger.warning(
                    "handler %s cannot be stopped and runs on; %d handlers hang", run.handler.name, self.hung
                )

    async def _wait_for(self, call: asyncio.Future[None], session: Session, cursor: Cursor | OneCall, run: Run) -> None:
        """Wait until the run has ended, or give it up: when a call takes too long, or ``close`` waits no longer."""
        while not call.done():
            await session.wait(call, run.seconds_left())
            if not call.done() and (late := run.abandon(at_once=session.is_cut)) is not None:
                cursor.record(session.unfinished(late))
                return
        if not call.cancelled():
            call.result()


def _both(type_: str, first: Handler, second: Handler) -> Handler:
    """The functions of one type, one after the other."""
    functions = [second]
    while functions[-1].then is not None:
        functions.append(functions[-1].then)
    earlier: Handler | None = first
    while earlier is not None:
        for other in functions:
            if earlier.function is other.function:
                raise ConfigError(f"event type {type_!r} has the handler {other.name} already; register it once")
            if earlier.size or other.size:
                raise ConfigError(
                    f"event type {type_!r} has the handler {earlier.name} already, and one of it and {other.name} "
                    "takes lists of events; when both shall run, give each its own Handlers() and stream"
                )
            if (place := inbox_of(earlier.function)) is not None and place == inbox_of(other.function):
                raise ConfigError(
                    f"handlers {earlier.name} and {other.name} of event type {type_!r} use the same inbox, so that "
                    "only the first one would run; give each an Inbox of its own name"
                )
        earlier = earlier.then
    return first.followed_by(second)


def _timeout_seconds(timeout: Duration | None) -> float | None:
    return None if timeout is None else seconds_of("timeout", timeout, "1ms")
