"""In-process handlers as a destination: a function per event type, no broker."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

from pillarbox.batch import Batch
from pillarbox.durations import Duration, seconds_of
from pillarbox.errors import ConfigError
from pillarbox.event import Event
from pillarbox.hints import hint
from pillarbox.publisher import (
    PUBLISHED,
    UNTRIED,
    Limits,
    Needs,
    Outcome,
    Publisher,
    PublisherFeatures,
    outage,
    rejected,
    retry,
)
from pillarbox.publishers._calls import Handler, ThreadRun, call_async, make_handler
from pillarbox.publishers._reminder import Reminder
from pillarbox.publishers.keyed import Cursor, KeyedBatch
from pillarbox.relay.retry import Retry, retry_of
from pillarbox.threads import Threads

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[[Event], Any])

# What happens to an event whose type has no handler.
Unknown: TypeAlias = Literal["wait", "skip", "reject"]

ALL_OTHERS: Final = "*"
# A handler may come with the next deployment.
_UNKNOWN_SECONDS: Final = 30.0
_DEFAULT_CONCURRENCY: Final = 16
_LEAST_CALLS: Final = 16
_CANCEL_SECONDS = 1.0


class Handlers(Publisher):
    """A registry of functions and the publisher that calls them.

    An async function runs on the event loop, a plain one in a thread. It succeeds when it returns, with any value.
    ``raise Reject(...)`` for an event that can never succeed, ``raise Outage(...)`` when something that the handler
    needs is away; any other exception is retried.

    unknown: an event whose type has no handler waits uncharged and holds its key (``wait``), counts as published
    (``skip``) or is dead at once (``reject``).
    concurrency: how many handlers run at once; default: as the stream says, 16 without a relay.
    timeout: how long one call may take, such as ``"60s"`` or a number of seconds; None: no limit.
    grace: how long ``close`` waits for running handlers.
    max_hung: plain functions cannot be stopped; when this many are past their timeout and still running,
    the publisher reports an outage.
    """

    def __init__(
        self,
        *,
        unknown: Unknown = "wait",
        concurrency: int | None = None,
        timeout: Duration | None = "60s",
        grace: Duration = "10s",
        max_hung: int = 16,
    ) -> None:
        if unknown not in get_args(Unknown):
            raise ConfigError(f"unknown={unknown!r}: {hint(str(unknown), get_args(Unknown))}")
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"concurrency={concurrency}: handlers need at least 1 place to run in")
        if max_hung < 1:
            raise ConfigError(f"max_hung={max_hung}: give 1 or more")
        self._unknown: Unknown = unknown
        self._reminder = Reminder()
        self._given_concurrency = concurrency
        self._concurrency = concurrency or _DEFAULT_CONCURRENCY
        self._timeout_seconds = _timeout_seconds(timeout)
        self._grace_seconds = seconds_of("grace", grace)
        self._max_hung = max_hung
        self._handlers: dict[str, Handler] = {}
        self._threads = Threads("pillarbox-handler")
        # Async handlers that swallowed their cancellation; the loop itself holds tasks only weakly.
        self._stray: set[asyncio.Future[Outcome]] = set()
        self._session: _Session | None = None

    def on(
        self,
        *types: str,
        timeout: Duration | Literal["default"] | None = "default",
        retry: Retry | str | None = None,
        max_attempts: int | None = None,
    ) -> Callable[[F], F]:
        """Register the decorated function for these event types; ``"*"``: for all that have no other.

        timeout: of this function. retry, max_attempts: in place of the stream's; retry is a policy such as
        ``Fixed("30s")``, or a text such as ``"fixed:30s"``.
        """
        if not types or not all(isinstance(type_, str) for type_ in types):
            raise ConfigError(
                'on() names no event type; write @handlers.on("order.created"), or @handlers.on("*") for all the others'
            )
        if max_attempts is not None and max_attempts < 1:
            raise ConfigError(f"max_attempts={max_attempts}: give 1 or more, or leave it out for the stream's limit")
        seconds = self._timeout_seconds if timeout == "default" else _timeout_seconds(timeout)
        limits = Limits(None if retry is None else retry_of(retry), max_attempts)

        def register(function: F) -> F:
            handler = make_handler(function, seconds, limits)
            for type_ in types:
                self._check_type(type_, handler)
            self._handlers.update(dict.fromkeys(types, handler))
            return function

        return register

    def prepared(self, needs: Needs) -> "Handlers":
        """A publisher of the stream's own with the same functions, so that streams do not share places."""
        other = Handlers(
            unknown=self._unknown,
            concurrency=self._given_concurrency or needs.concurrency,
            timeout=self._timeout_seconds,
            grace=self._grace_seconds,
            max_hung=self._max_hung,
        )
        other._handlers = self._handlers
        return other

    @property
    def features(self) -> PublisherFeatures:
        return PublisherFeatures(calls=max(_LEAST_CALLS, self._concurrency), concurrency=self._given_concurrency)

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
            self._session = _Session(self._concurrency)

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        session = self._session
        if session is None:
            return [outage("the handlers are not open; call open() first")] * len(batch)
        return await KeyedBatch(batch).work(partial(self._work, session), concurrency=self._concurrency)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close(self._grace_seconds)
            self._threads.stop_idle()

    def _check_type(self, type_: str, handler: Handler) -> None:
        if not type_ or (ALL_OTHERS in type_ and type_ != ALL_OTHERS):
            raise ConfigError(f'event type {type_!r}: name one type in full, or "*" for all that have no other handler')
        if type_ in self._handlers:
            raise ConfigError(
                f"event type {type_!r} has the handler {self._handlers[type_].name} already, "
                f"so {handler.name} is refused; when both shall run, give each its own Handlers() and stream"
            )

    async def _work(self, session: "_Session", cursor: Cursor) -> None:
        while (event := cursor.event) is not None:
            async with session:
                if session.closing:
                    return
                handler = self._handler_of(event)
                if handler is None:
                    cursor.record(self._without_handler(event))
                elif self._too_many_hang():
                    cursor.record(
                        outage(f"{self.hung} handlers hang past their timeout and cannot be stopped; restart the relay")
                    )
                elif handler.is_async:
                    cursor.record(await self._on_loop(session, handler, event))
                else:
                    await self._in_thread(session, cursor, handler)

    def _handler_of(self, event: Event) -> Handler | None:
        return self._handlers.get(event.type) or self._handlers.get(ALL_OTHERS)

    def _too_many_hang(self) -> bool:
        return self.hung >= self._max_hung

    def _without_handler(self, event: Event) -> Outcome:
        problem = f"no handler for event type {event.type!r}"
        remedy = f'register one with @handlers.on("{event.type}"), or one for all other types with @handlers.on("*")'
        extra = {"action": "no_handler", "stream": event.stream, "type": event.type}
        if self._unknown == "reject":
            return rejected(f"{problem}; {remedy}")
        if self._unknown == "skip":
            logger.debug("%s: event %s is skipped", problem, event.id, extra=extra)
            return PUBLISHED
        if self._reminder.is_due(event.type):
            logger.warning(
                "%s in stream '%s': its events wait, uncharged; %s", problem, event.stream, remedy, extra=extra
            )
        return retry(f"{problem}; {remedy}", charged=False, after_seconds=_UNKNOWN_SECONDS)

    async def _on_loop(self, session: "_Session", handler: Handler, event: Event) -> Outcome:
        call = asyncio.create_task(call_async(handler, event), name=f"pillarbox-handler {handler.name}")
        try:
            await session.wait(call, handler.timeout_seconds)
            return call.result() if call.done() else session.unfinished(handler)
        finally:
            if not call.done():
                call.cancel()
                await asyncio.wait({call}, timeout=_CANCEL_SECONDS)
            if not call.done():
                self._stray.add(call)
                call.add_done_callback(self._stray.discard)
                logger.warning("handler %s ignores its cancellation; %d handlers hang", handler.name, self.hung)

    async def _in_thread(self, session: "_Session", cursor: Cursor, handler: Handler) -> None:
        def next_handler(event: Event) -> Handler | None:
            """The handler that the same thread may call next."""
            found = self._handler_of(event)
            alike = found is not None and not found.is_async and found.timeout_seconds == handler.timeout_seconds
            return found if alike and not (session.closing or self._too_many_hang()) else None

        thread = self._threads.take()
        run = ThreadRun(cursor, handler, next_handler)
        call = thread.submit(run.run)
        waiter = asyncio.wrap_future(call)
        try:
            while not call.done():
                await session.wait(waiter, run.seconds_left())
                if not call.done() and (late := run.abandon(at_once=session.is_cut)) is not None:
                    cursor.record(session.unfinished(late))
                    return
            call.result()
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


def _timeout_seconds(timeout: Duration | None) -> float | None:
    return None if timeout is None else seconds_of("timeout", timeout, "1ms")


class _Session:
    """The state from one ``open`` to its ``close``."""

    def __init__(self, concurrency: int) -> None:
        self.closing = False
        self.is_cut = False  # ``close`` waits no longer
        self._waiting: set[asyncio.Future[None]] = set()
        self._places = asyncio.Semaphore(concurrency)
        self._running = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    async def __aenter__(self) -> None:
        """Wait for a place to run a handler in."""
        await self._places.acquire()
        self._running += 1
        self._quiet.clear()

    async def __aexit__(self, *_: object) -> None:
        self._places.release()
        self._running -= 1
        if not self._running:
            self._quiet.set()

    async def wait(self, call: asyncio.Future[Any], timeout: float | None) -> None:
        """Return when the call is done, its time is up, or ``close`` waits no longer."""
        # asyncio.wait would cost more than most handlers.
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(_: object = None) -> None:
            if not waiter.done():
                waiter.set_result(None)

        timer = None if timeout is None else loop.call_later(timeout, wake)
        call.add_done_callback(wake)
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)
            if not call.done():
                call.remove_done_callback(wake)
            if timer is not None:
                timer.cancel()

    def unfinished(self, handler: Handler) -> Outcome:
        if self.is_cut:
            return UNTRIED
        return retry(
            f"handler {handler.name} did not finish within {handler.timeout_seconds:g} s", limits=handler.limits
        )

    async def close(self, grace_seconds: float) -> None:
        self.closing = True
        try:
            async with asyncio.timeout(grace_seconds):
                await self._quiet.wait()
        except TimeoutError:
            logger.warning("%d handlers did not finish within %g s of closing", self._running, grace_seconds)
        finally:
            self.is_cut = True
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
        await self._quiet.wait()
