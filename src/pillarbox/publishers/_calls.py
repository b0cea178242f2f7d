"""Calls of handlers, and the outcomes that they give."""

import contextvars
import inspect
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pillarbox.errors import ConfigError, Outage, Reject
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, Limits, Outcome, outage, rejected, retry
from pillarbox.publishers.keyed import Cursor

logger = logging.getLogger("pillarbox.publishers.handlers")

_SHORTEST_SECRET: Final = 4
# A thread goes back after this time, so that others get its place.
_RUN_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function."""

    name: str
    function: Callable[[Event], Any]
    is_async: bool
    timeout_seconds: float | None
    limits: Limits


def make_handler(function: Callable[[Event], Any], timeout_seconds: float | None, limits: Limits) -> Handler:
    """The function as a handler; ConfigError when it cannot be called with an event."""
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    if not callable(function):
        raise ConfigError(f"a handler is a function that takes an event, not {_kind(function)}")
    # An object with __call__ is async if that method is.
    forms = (function, type(function).__call__)
    if any(inspect.isgeneratorfunction(form) or inspect.isasyncgenfunction(form) for form in forms):
        raise ConfigError(f"handler {name} is a generator, so its code would never run; remove its `yield`")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"handler {name} cannot be called with the event as its only argument: {error}") from error
    except ValueError:  # a built-in without a signature
        pass
    return Handler(name, function, any(map(inspect.iscoroutinefunction, forms)), timeout_seconds, limits)


async def call_async(handler: Handler, event: Event) -> Outcome:
    """Await an async handler. Every exception but KeyboardInterrupt becomes an outcome."""
    try:
        returned = await handler.function(event)
    except GeneratorExit:
        raise
    except BaseException as error:
        return _failure(handler, event, error)
    return _success(handler, returned)


def call_plain(handler: Handler, event: Event) -> Outcome:
    """Call a plain handler in the current thread."""
    try:
        returned = handler.function(event)
    except BaseException as error:
        return _failure(handler, event, error)
    return _success(handler, returned)


class ThreadRun:
    """Plain functions called one after the other in one thread: starting a thread's work costs more than most calls.

    Each call has its own time limit and its own context.
    """

    def __init__(self, cursor: Cursor, handler: Handler, next_handler: Callable[[Event], Handler | None]) -> None:
        self.handler = handler  # runs now
        self._cursor = cursor
        self._next_handler = next_handler
        self._lock = threading.Lock()
        self._is_over = False
        self._deadline = _deadline(handler)

    def run(self) -> None:
        """Call handlers until the time is up or the next event needs another thread. In the thread."""
        context, until = contextvars.copy_context(), time.monotonic() + _RUN_SECONDS
        event, handler = self._cursor.event, self.handler
        while event is not None:
            outcome = context.copy().run(call_plain, handler, event)
            with self._lock:
                if self._is_over:
                    return  # abandoned: the cursor belongs to the loop again
                self._cursor.record(outcome)
                event = self._cursor.event if time.monotonic() < until else None
                found = None if event is None else self._next_handler(event)
                if found is None:
                    self._is_over = True
                    return
                self.handler = handler = found
                self._deadline = _deadline(found)

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


def _deadline(handler: Handler) -> float | None:
    return None if handler.timeout_seconds is None else time.monotonic() + handler.timeout_seconds


def _success(handler: Handler, returned: object) -> Outcome:
    # A returned value means nothing. An awaitable is work that nobody has done.
    if not isinstance(returned, Awaitable):
        return PUBLISHED
    remedy = "await it in the handler"
    if inspect.iscoroutine(returned):
        returned.close()
        remedy = "await it, or use `async def`"
    return retry(
        f"handler {handler.name} returned {_kind(returned)} that nobody awaited; {remedy}", limits=handler.limits
    )


def _failure(handler: Handler, event: Event, error: BaseException) -> Outcome:
    if isinstance(error, KeyboardInterrupt):
        raise error
    logger.debug("handler %s failed on event %s", handler.name, event.id, exc_info=error)
    text = _without_payload(_message(error), event.payload)
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
