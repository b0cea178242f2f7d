"""A check: the user's function that finds what is missing, in whatever form it was written."""

import asyncio
import inspect
import logging
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from os.path import basename
from typing import Any, Final, NamedTuple, TypeAlias

from pillarbox.errors import CheckFailed, ConfigError
from pillarbox.event import Event
from pillarbox.ids import uuid7
from pillarbox.threads import Thread

log = logging.getLogger(__name__)

_BATCH: Final = 100
_BATCH_BYTES: Final = 4_000_000
_BATCH_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 1.0
_FRESH_MILLISECONDS: Final = 1000

Events: TypeAlias = Iterable[Event] | AsyncIterable[Event]


@dataclass(frozen=True, slots=True)
class Check:
    """What the reconciler looks for: data whose event is missing.

    find: a function without arguments that yields or returns the events that should have had their effect, made by
    ``outbox.event(..., id=stable_id(...))``; async, or plain, which runs in a thread.
    interval_seconds: between two runs. limit: the most events that one run emits.
    """

    name: str
    find: Callable[[], Events | Awaitable[Events]]
    _: KW_ONLY
    interval_seconds: float = 300.0
    limit: int = 1000

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
        if not self.interval_seconds > 0:
            raise ConfigError(f"check '{self.name}': interval_seconds is {self.interval_seconds}; use a number above 0")
        if self.limit < 1:
            raise ConfigError(f"check '{self.name}': limit is {self.limit}; use 1 or more")


class _Pulled(NamedTuple):
    """Some of the events, and why there are not more: an error, or that it was all."""

    events: list[Event]
    error: BaseException | None = None
    is_last: bool = False


class _Batch:
    """Collects what comes until it is enough for a round trip: a slow check must not keep what it has found."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._bytes = 0
        self._until = time.monotonic() + _BATCH_SECONDS

    def add(self, event: Event) -> bool:
        """True: it is full."""
        self.events.append(event)
        self._bytes += len(event.payload)
        return len(self.events) >= _BATCH or self._bytes >= _BATCH_BYTES or time.monotonic() >= self._until


async def batches(check: Check, is_stopped: Callable[[], bool]) -> AsyncGenerator[list[Event], None]:
    """The events that the check finds, in order. One that fails has given those before it; then CheckFailed.

    Between two events it ends when it is stopped. A generator is closed where it ran: in its thread or task.
    """
    examine = _Examiner(check.name)
    # One thread from the call to the close: connections of many drivers may not change it.
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
            _tell_of_close(examine.name, await _attempt_async(found.aclose()))
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
            _tell_of_close(examine.name, _attempt(iterator[0].close))

    try:
        while True:
            pulled = await asyncio.wrap_future(thread.submit(pull))
            yield pulled
            if pulled.is_last:
                break
    finally:
        # Where a call hangs nobody waits for it: it closes its generator itself, if it ever returns.
        ended = True
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(thread.submit(close)), _CLOSE_SECONDS)


def _tell_of_close(name: str, closed: _Attempt) -> None:
    if closed.error is not None:
        extra = {"action": "check_close_failed", "check": name}
        log.warning("check '%s' failed while it was closed", name, exc_info=closed.error, extra=extra)


class _Examiner:
    """Refuses what is no event, or has an id that the next run would make anew: each run would emit another copy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._began = uuid7()  # lower than all that this process will make, whatever its clock does

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

    def _is_fresh(self, event: Event) -> bool:
        # Made in this run, and with the event: an id that the application keeps with its data, and that is younger
        # than this run because the run is long, is older than the event that is made of it.
        id_at, event_at = event.id.int >> 80, event.created_at.timestamp() * 1000
        return event.id.version == 7 and event.id > self._began and id_at >= event_at - _FRESH_MILLISECONDS


def _is_async(function: Any) -> bool:
    # Of an object with __call__ that method, not the object, tells what kind of function it is.
    faces = (function, type(function).__call__)
    return any(inspect.iscoroutinefunction(face) or inspect.isasyncgenfunction(face) for face in faces)


def _failed(check: Check, error: BaseException) -> CheckFailed:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return CheckFailed(f"check '{check.name}' failed with {type(error).__name__}{': ' if text else ''}{text}{where}")
