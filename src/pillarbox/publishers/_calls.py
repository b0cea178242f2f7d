"""Calls of handlers, and the outcomes that they give."""

import asyncio
import contextvars
import inspect
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pillarbox.errors import ConfigError, Outage, Reject
from pillarbox.event import Event
from pillarbox.observe.processing import processing
from pillarbox.outbox.reading import Reader, reader_of
from pillarbox.publisher import PUBLISHED, UNTRIED, Limits, Outcome, outage, rejected, retry
from pillarbox.publishers.keyed import Cursor

logger = logging.getLogger("pillarbox.publishers.handlers")

_SHORTEST_SECRET: Final = 4
# A thread goes back after this time, so that others get its place.
_RUN_SECONDS: Final = 0.05
_YIELD_SECONDS: Final = 0.002


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function. size: the most events that it takes in a list; 0: it takes an event. read: makes what it
    is called with of an event. then: the next function for the same type, if this one succeeds.
    """

    name: str
    function: Callable[[Any], Any]
    is_async: bool
    timeout_seconds: float | None
    limits: Limits
    size: int = 0
    read: Reader | None = None
    then: "Handler | None" = None

    def call(self, given: Event | Sequence[Event]) -> Any:
        """Call the function. given: an event, or several for a function that takes a list."""
        if isinstance(given, Event):
            if self.size:
                return self.function([given])
            if self.read is not None:
                return self.function(self.read(given))
        return self.function(given)

    def followed_by(self, other: "Handler") -> "Handler":
        """With another function behind the last one."""
        return replace(self, then=other if self.then is None else self.then.followed_by(other))


def make_handler(
    function: Callable[[Any], Any], timeout_seconds: float | None, limits: Limits, size: int = 0
) -> Handler:
    """The function as a handler; ConfigError when it cannot be called with an event, or a list of events."""
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    if not callable(function):
        raise ConfigError(f"a handler is a function that takes an event, not {_kind(function)}")
    # An object with __call__ is async if that method is.
    forms = (function, type(function).__call__)
    if any(inspect.isgeneratorfunction(form) or inspect.isasyncgenfunction(form) for form in forms):
        raise ConfigError(f"handler {name} is a generator, so its code would never run; remove its `yield`")
    wanted = "a list of events" if size else "the event"
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"handler {name} cannot be called with {wanted} as its only argument: {error}") from error
    except ValueError:  # a built-in without a signature
        pass
    is_async = any(map(inspect.iscoroutinefunction, forms))
    return Handler(name, function, is_async, timeout_seconds, limits, size, None if size else reader_of(function, name))


async def call_async(handler: Handler, given: Event | Sequence[Event]) -> Outcome:
    """Await an async handler. Every exception but KeyboardInterrupt becomes an outcome; of several events it is the
    outcome of each.
    """
    try:
        with processing(given):
            returned = await handler.call(given)
    except GeneratorExit:
        raise
    except BaseException as error:
        return _failure(handler, given, error)
    return _success(handler, returned)


def call_plain(handler: Handler, given: Event | Sequence[Event]) -> Outcome:
    """Call a plain handler in the current thread."""
    try:
        with processing(given):
            returned = handler.call(given)
    except BaseException as error:
        return _failure(handler, given, error)
    return _success(handler, returned)


class OneCall:
    """What a cursor is for events, for one call with several of them."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.event: Sequence[Event] | None = events
        self.outcome = UNTRIED

    def record(self, outcome: Outcome) -> None:
        self.event, self.outcome = None, outcome


class Run:
    """Functions called one after the other, by one thread or in one task: its start costs more than most calls.

    Each call has its own time limit and its own context. left: the function that has to be called next with the event
    of the cursor, if it needs another run.
    """

    def __init__(
        self, cursor: Cursor | OneCall, handler: Handler, next_handler: Callable[[Any], Handler | None]
    ) -> None:
        self.handler = handler  # runs now
        self.left: Handler | None = None
        self._cursor = cursor
        self._event = cursor.event  # now: a run that is given up before it begins must not take the next event
        self._next_handler = next_handler
        self._lock = threading.Lock()
        self._is_over = False
        now = time.monotonic()
        self._deadline = _deadline(handler, now)
        self._until = now + _RUN_SECONDS

    def call_in_thread(self) -> None:
        """Call plain handlers until the time is up or the next event needs another run."""
        context = contextvars.copy_context()
        event: Any = self._event
        while event is not None:
            event = self._record(context.copy().run(call_plain, self.handler, event))

    async def call_on_loop(self) -> None:
        """The same with async handlers, in a task of their own."""
        context = contextvars.copy_context()
        task = asyncio.current_task()
        event: Any = self._event
        begun = time.monotonic()
        while event is not None:
            work, own = call_async(self.handler, event), context.copy()
            try:
                waits_for = own.run(work.send, None)
            except StopIteration as end:  # it waited for nothing
                outcome: Outcome = end.value
            else:
                outcome = await _InContext(work, own, waits_for)
            event = self._record(outcome)
            if task is not None and task.cancelling():
                self._is_over = True
                return  # by the handler: the next call must not suffer
            if event is not None and time.monotonic() - begun > _YIELD_SECONDS:
                await asyncio.sleep(0)  # handlers that wait for nothing would stop the loop
                begun = time.monotonic()

    def _record(self, outcome: Outcome) -> Any:
        """Record the outcome of a call. Returns the event of the next one; None: there is none in this run."""
        with self._lock:
            if self._is_over:
                return None  # abandoned: the cursor is not ours any more
            if self.handler.then is not None and outcome is PUBLISHED:
                return self._go_on(self.handler.then)
            self._cursor.record(outcome)
            now = time.monotonic()
            event = self._cursor.event if now < self._until else None
            found = None if event is None else self._next_handler(event)
            if found is None:
                self._is_over = True
                return None
            self.handler = found
            self._deadline = _deadline(found, now)
            return event

    def _go_on(self, then: Handler) -> Any:
        """Call the next function with the same event, here or in another run."""
        if (then.is_async, then.timeout_seconds) != (self.handler.is_async, self.handler.timeout_seconds):
            self.left, self._is_over = then, True
            return None
        self.handler = then
        self._deadline = _deadline(then, time.monotonic())
        return self._cursor.event

    def seconds_left(self) -> float | None:
        """Time that the running call still has; None: no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def abandon(self, *, at_once: bool) -> Handler | None:
        """Give up the running call if it is late, or ``at_once``; the handler that was called. None: not given up."""
        with self._lock:
            late = self._deadline is not None and time.monotonic() >= self._deadline
            if self._is_over or not (late or at_once):
                return None
            self._is_over = True
            return self.handler


class _InContext:
    """Awaits a coroutine in a context of its own, as a task would, without the price of a task. waits_for: what its
    first step, in the same context, waits for."""

    __slots__ = ("_context", "_waits_for", "_work")

    def __init__(self, work: Coroutine[Any, Any, Outcome], context: contextvars.Context, waits_for: Any) -> None:
        self._work, self._context, self._waits_for = work, context, waits_for

    def __await__(self) -> Generator[Any, Any, Outcome]:
        work, run, waits_for = self._work, self._context.run, self._waits_for
        step: Callable[[Any], Any]
        while True:
            try:
                step, argument = work.send, (yield waits_for)
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:
                step, argument = work.throw, error
            try:
                waits_for = run(step, argument)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome


def _deadline(handler: Handler, now: float) -> float | None:
    return None if handler.timeout_seconds is None else now + handler.timeout_seconds


def _success(handler: Handler, returned: object) -> Outcome:
    # A returned value means nothing. An awaitable is work that nobody has done.
    if returned is None or not isinstance(returned, Awaitable):
        return PUBLISHED
    remedy = "await it in the handler"
    if inspect.iscoroutine(returned):
        returned.close()
        remedy = "await it, or use `async def`"
    return retry(
        f"handler {handler.name} returned {_kind(returned)} that nobody awaited; {remedy}", limits=handler.limits
    )


def _failure(handler: Handler, given: Event | Sequence[Event], error: BaseException) -> Outcome:
    if isinstance(error, KeyboardInterrupt):
        raise error
    events = [given] if isinstance(given, Event) else given
    logger.debug("handler %s failed on %d events from %s on", handler.name, len(events), events[0].id, exc_info=error)
    text = _message(error)
    for event in events:
        text = _without_payload(text, event.payload)
    kind = type(error).__name__
    if isinstance(error, Reject):
        return rejected(text or f"handler {handler.name} rejected the event")
    if isinstance(error, Outage):
        return outage(text or f"handler {handler.name} reported an outage")
    if isinstance(error, SystemExit):
        text = f"handler {handler.name} raised SystemExit; a handler must not stop the relay"
    elif not isinstance(error, Exception):
        text = f"handler {handler.name} ended with {kind}, though the relay did not cancel it"
    else:
        text = f"{kind}: {text}" if text else kind
    return retry(text, limits=handler.limits)


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of the user's with a broken __str__
        return ""


def _without_payload(text: str, payload: bytes) -> str:
    for form in _forms(payload):
        if len(form) >= _SHORTEST_SECRET:
            text = text.replace(form, "[payload]")
    return text


def _forms(payload: bytes) -> Iterator[str]:
    """The payload in the forms that error messages quote: as it is, as Python shows it, and parsed."""
    decoded = payload.decode(errors="replace")
    yield repr(payload)
    yield repr(decoded)
    yield decoded
    try:
        yield repr(json.loads(payload))
    except (ValueError, RecursionError):
        return
