"""One call of a handler, and what its end means for the event."""

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pillarbox.errors import ConfigError, Reject
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, Outcome, rejected, retry

logger = logging.getLogger("pillarbox.publishers.handlers")

_SHORTEST_SECRET: Final = 4


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function."""

    name: str
    function: Callable[[Event], Any]
    is_async: bool
    timeout_seconds: float | None


def make_handler(function: Callable[[Event], Any], timeout_seconds: float | None) -> Handler:
    """The function as a handler; ConfigError when it could never be called as one."""
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    if not callable(function):
        raise ConfigError(f"a handler is a function that takes an event, not {_kind(function)}")
    # Of an object with __call__ that method, not the object, tells what kind of function it is.
    faces = (function, type(function).__call__)
    if any(inspect.isgeneratorfunction(face) or inspect.isasyncgenfunction(face) for face in faces):
        raise ConfigError(f"handler {name} is a generator, which nobody would run; remove its `yield`")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"handler {name} cannot be called with the event as its only argument: {error}") from error
    except ValueError:  # a built-in without a signature
        pass
    return Handler(name, function, any(map(inspect.iscoroutinefunction, faces)), timeout_seconds)


def checked_timeout(seconds: float | None) -> float | None:
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"timeout={seconds}: give more than 0 seconds, or None for no limit")
    return seconds


async def call_async(handler: Handler, event: Event) -> Outcome:
    """Await an async handler; every end but KeyboardInterrupt becomes an outcome."""
    try:
        returned = await handler.function(event)
    except GeneratorExit:
        raise
    except BaseException as error:
        return _failure(handler, event, error)
    return _success(handler, returned)


def call_plain(handler: Handler, event: Event) -> Outcome:
    """Call a plain handler, in the thread of the caller."""
    try:
        returned = handler.function(event)
    except BaseException as error:
        return _failure(handler, event, error)
    return _success(handler, returned)


def _success(handler: Handler, returned: object) -> Outcome:
    if returned is None:
        return PUBLISHED
    # Neither a forgotten await nor a False that means failure may pass for success.
    if inspect.iscoroutine(returned):
        returned.close()
        return retry(f"handler {handler.name} returned a coroutine that nobody awaited; await it, or use `async def`")
    if isinstance(returned, Awaitable):
        return retry(f"handler {handler.name} returned {_kind(returned)} that nobody awaited; await it in the handler")
    return retry(f"handler {handler.name} returned {_kind(returned)}; return None, and raise for a failure")


def _failure(handler: Handler, event: Event, error: BaseException) -> Outcome:
    if isinstance(error, KeyboardInterrupt):
        raise error
    logger.debug("handler %s failed on event %s", handler.name, event.id, exc_info=error)
    text = _without_payload(_message(error), event.payload)
    kind = type(error).__name__
    if isinstance(error, Reject):
        return rejected(text or f"handler {handler.name} rejected the event")
    if isinstance(error, SystemExit):
        return retry(f"handler {handler.name} raised SystemExit; a handler must not stop the relay")
    if not isinstance(error, Exception):
        return retry(f"handler {handler.name} ended with {kind}, though the relay did not cancel it")
    return retry(f"{kind}: {text}" if text else kind)


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
    """The payload as messages tend to quote it: as it is, as Python shows it, and parsed."""
    decoded = payload.decode(errors="replace")
    yield repr(payload)
    yield repr(decoded)
    yield decoded
    try:
        yield repr(json.loads(payload))
    except (ValueError, RecursionError):
        return
