"""A check: a user's function that finds missing events. It may be plain or async, a generator or not."""

import asyncio
import inspect
import logging
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from os.path import basename
from typing import Any, Final, NamedTuple, TypeAlias

from pillarbox.durations import Duration, seconds_of
from pillarbox.errors import CheckFailed, ConfigError
from pillarbox.event import Event
from pillarbox.ids import uuid7
from pillarbox.threads import Thread

__all__ = ["Check"]

log = logging.getLogger(__name__)

_BATCH: Final = 100
_BATCH_BYTES: Final = 4_000_000
_BATCH_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 1.0
_FRESH_MILLISECONDS: Final = 1000

Events: TypeAlias = Iterable[Event] | AsyncIterable[Event]


@dataclass(frozen=True, slots=True)
class Check:
    """Finds data whose event is missing, for the reconciler.

    name: shown in logs and reports.
    find: a function without arguments that yields or returns the events that should have had their effect, made by
    ``outbox.event(..., id=stable_id(...))``; async, or plain, which runs in a thread.
    every: how often it runs, such as ``"5m"`` or a number of seconds. limit: the most events that one run writes.
    """

    name: str
    find: Callable[[], Events | Awaitable[Events]]
    _: KW_ONLY
    every: Duration = "5m"
    limit: int = 1000
    every_seconds: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a check's name is {name!r}; give it a name, which logs and reports show")
        if not callable(self.find):
            raise ConfigError(f"check '{self.name}': find is a {type(self.find).__name__}; pass a function")
        try:
            inspect.signature(self.find).bind()
        except TypeError as error:
            raise ConfigError(f"check '{self.name}': find cannot be called without arguments: {error}") from error
        except ValueError:  # a built-in without a signature
            pass
        object.__setattr__(self, "every_seconds", seconds_of(f"check '{self.name}': every", self.every, "1ms"))
        if self.limit < 1:
            raise ConfigError(f"check '{self.name}': limit is {self.limit}; use 1 or more")


class _Pulled(NamedTuple):
    """Some of the events; then an error, or the last ones."""

    events: list[Event]
    error: BaseException | None = None
    is_last: bool = False


class _Batch:
    """Collects events for one round trip. It is full after a second too, so that a slow check's events do not wait."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._bytes = 0
        self._until = time.monotonic() + _BATCH_SECONDS

    def add(self, event: Event) -> bool:
        """True: it is full."""
        self.events.append(event)
        self._bytes += len(event.payload)
        return len(self.events) >= _BATCH or self._bytes >= _BATCH_BYTES or time.monotonic() >= self._until


async def batches(
    check: Check, is_stopped: Callable[[], bool], logger: logging.Logger | None = None
) -> AsyncGenerator[list[Event], None]:
    """The events that the check finds, in order. Raises CheckFailed if it fails, after the events before that.

    It can be stopped between two events. A generator is closed in the thread or task in which it ran.
    """
    examine = _Examiner(check.name, logger or log)
    # One thread from the call to the close: connections of many drivers must stay in their thread.
    thread = Thread(f"pillarbox-check-{check.name}")
    try:
        if _is_async(check.find):
            found = _attempt(check.find)
        else:
            found = await asyncio.wrap_future(thread.submit(partial(_attempt, check.find)))
        if found.error is None and inspect.isawaitable(found.value):
            found = await _attempt_async(found.value)
        if found.error is not None:
            raise _failed(check, found.error) from found.error
        if isinstance(found.value, AsyncIterable):
            pulling = _pull_async(found.value, examine, is_stopped)
        else:
            pulling = _pull_in(thread, found.value, examine, is_stopped)
        async with aclosing(pulling):
            async for pulled in pulling:
                if pulled.events:
                    yield pulled.events
                if isinstance(pulled.error, CheckFailed):
                    raise pulled.error
                if pulled.error is not None:
                    raise _failed(check, pulled.error) from pulled.error
    finally:
        thread.stop()


class _Attempt(NamedTuple):
    value: Any = None
    error: BaseException | None = None


def _attempt(call: Callable[[], Any]) -> _Attempt:
    # StopIteration cannot pass through a future, and SystemExit must not end the relay.
    try:
        return _Attempt(call())
    except (Exception, SystemExit) as error:
        return _Attempt(error=error)


async def _attempt_async(call: Awaitable[Any]) -> _Attempt:
    try:
        return _Attempt(await call)
    except (Exception, SystemExit) as error:
        return _Attempt(error=error)


async def _pull_async(
    found: AsyncIterable[Any], examine: "_Examiner", is_stopped: Callable[[], bool]
) -> AsyncGenerator[_Pulled, None]:
    batch, trouble = _Batch(), None
    try:
        async for event in found:
            if is_stopped():
                break
            if batch.add(examine(event)):
                yield _Pulled(batch.events)
                batch = _Batch()
    except (Exception, SystemExit) as error:
        trouble = error
    finally:
        if isinstance(found, AsyncGenerator):
            examine.closed(await _attempt_async(found.aclose()))
    yield _Pulled(batch.events, trouble, is_last=True)


async def _pull_in(
    thread: Thread, found: Any, examine: "_Examiner", is_stopped: Callable[[], bool]
) -> AsyncGenerator[_Pulled, None]:
    if isinstance(found, Event | str | bytes) or not isinstance(found, Iterable):
        raise CheckFailed(
            f"check '{examine.name}' returned a {type(found).__name__}; yield events, or return a list of them"
        )
    ended = False
    iterator: list[Iterator[Any]] = []

    def pull() -> _Pulled:
        batch = _Batch()
        try:
            if not iterator:
                iterator.append(iter(found))
            for event in iterator[0]:
                if ended or is_stopped():
                    break
                if batch.add(examine(event)):
                    return _Pulled(batch.events)
        except (Exception, SystemExit) as error:
            return _Pulled(batch.events, error, is_last=True)
        if ended:
            close()
        return _Pulled(batch.events, is_last=True)

    def close() -> None:
        if iterator and isinstance(iterator[0], Generator):
            examine.closed(_attempt(iterator[0].close))

    try:
        while True:
            pulled = await asyncio.wrap_future(thread.submit(pull))
            yield pulled
            if pulled.is_last:
                break
    finally:
        # Nobody waits for a call that hangs: it closes its generator itself, if it ever returns.
        ended = True
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(thread.submit(close)), _CLOSE_SECONDS)


class _Examiner:
    """Refuses what is not an event, and events with a new id: each run would write another copy of them."""

    def __init__(self, name: str, logger: logging.Logger) -> None:
        self.name = name
        self._log = logger
        self._began = uuid7()  # lower than all ids that this process will make, even if its clock goes back

    def __call__(self, event: Any) -> Event:
        if not isinstance(event, Event):
            raise CheckFailed(
                f"check '{self.name}' yielded a {type(event).__name__}; yield events made by outbox.event"
            )
        if self._is_fresh(event):
            raise CheckFailed(
                f"check '{self.name}' yielded an event of type '{event.type}' with a new id, so that each run would "
                "emit a copy; give it an id that stays the same: "
                'outbox.event(..., id=stable_id("page", page_id, revision_id))'
            )
        return event

    def closed(self, attempt: _Attempt) -> None:
        """The check's generator was closed."""
        if attempt.error is not None:
            self._log.warning(
                "check '%s' failed while it was closed",
                self.name,
                exc_info=attempt.error,
                extra={"action": "check_close_failed", "check": self.name},
            )

    def _is_fresh(self, event: Event) -> bool:
        # An id is fresh if it was made in this run together with its event. In a long run the application can write
        # data with an id of its own; the event that the check makes of it is younger than that id.
        id_at, event_at = event.id.int >> 80, event.created_at.timestamp() * 1000
        return event.id.version == 7 and event.id > self._began and id_at >= event_at - _FRESH_MILLISECONDS


def _is_async(function: Any) -> bool:
    # An object with __call__ is async if that method is.
    faces = (function, type(function).__call__)
    return any(inspect.iscoroutinefunction(face) or inspect.isasyncgenfunction(face) for face in faces)


def _failed(check: Check, error: BaseException) -> CheckFailed:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return CheckFailed(f"check '{check.name}' failed with {type(error).__name__}{': ' if text else ''}{text}{where}")
