"""Runs a handler in one transaction with the inbox, so that an event's effects happen once."""

import asyncio
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar, cast

from pillarbox.drivers import Driver, driver_of
from pillarbox.drivers.contract import finish, settled
from pillarbox.drivers.registry import Factory
from pillarbox.errors import ConfigError, InvalidEvent, Outage, PillarboxError
from pillarbox.event import Event
from pillarbox.inbox.work import Entry, Place, build, first_of_each, in_order
from pillarbox.observe import Observers
from pillarbox.outbox.reading import reader_of
from pillarbox.sql.dialects import ErrorKind

Given = TypeVar("Given")
Result = TypeVar("Result")

_SHORTEST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 1.0
_HANDLER_ATTEMPTS: Final = 10
_ONCE: Final = "_pillarbox_once"  # the attribute of a decorated handler


def make_once(
    place: Place, handle: Any, observers: Observers
) -> Callable[[Callable[[Given, Any], Result]], Callable[[Given], Result]]:
    """The decorator of :meth:`Inbox.once`."""
    if not driver_of(handle).is_pool:
        raise ConfigError(
            f"inbox.once was given a {type(handle).__qualname__}, which all events would share; pass an engine, a "
            "sessionmaker, a pool, a client or Django's connections, or a function that opens a connection"
        )

    def decorate(function: Callable[[Given, Any], Result]) -> Callable[[Given], Result]:
        once = _Once(place, handle, function, observers)

        async def awaited(given: Any) -> None:
            await once.apply(given)

        def plain(given: Any) -> None:
            finish(once.apply(given))

        made = update_wrapper(
            awaited if once.is_awaited else plain,
            function,
            assigned=("__module__", "__name__", "__qualname__", "__doc__"),
            updated=(),
        )
        del made.__wrapped__  # its signature has the transaction, that of the handler has not
        vars(made)[_ONCE] = once
        return cast("Callable[[Given], Result]", made)

    return decorate


def inbox_of(function: Any) -> Place | None:
    """Where a decorated handler records its events; None: it is not decorated."""
    once = once_of(function)
    return None if once is None else once.place


def once_of(function: Any) -> "_Once | None":
    """The work of a decorated handler, for tests; None: it is not decorated."""
    found: _Once | None = getattr(function, _ONCE, None)
    return found


class Watch:
    """Counts the calls of a decorated handler. fails: whether a call fails behind its last statement."""

    class Failure(Exception):
        """The failure that was asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.fails = False

    def called(self) -> None:
        self.calls += 1
        if self.fails:
            raise self.Failure


class _Conflict(NamedTuple):
    """The transaction lost against another one."""

    error: Exception
    is_handlers: bool  # in the handler, or at its commit


class _Work(NamedTuple):
    """An event or a list of events, and their entries."""

    given: Event | list[Event]
    entries: Sequence[Entry]


class _Once:
    """A decorated handler."""

    def __init__(self, place: Place, handle: Any, function: Callable[[Any, Any], Any], observers: Observers) -> None:
        self.place = place
        self._observers = observers
        self._function = function
        self._watch: Watch | None = None
        self._sleep: Callable[[float], Any] = time.sleep  # a plain handler has a thread to itself
        self._name: str = getattr(function, "__qualname__", type(function).__qualname__)
        # An object with __call__ is async if that method is.
        self.is_awaited = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        if self.is_awaited:
            self._sleep = asyncio.sleep
        try:
            inspect.signature(function).bind(None, None)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"handler {self._name} cannot be called with the event and the transaction: {error}"
            ) from error
        self._read = reader_of(function, self._name, takes_lists=True)
        self._pool = driver_of(handle)
        if not isinstance(self._pool, Factory) or self._pool.is_awaited:
            self._check(handle, is_awaited=self._pool.is_awaited)
        if isinstance(self._pool, Factory):
            self._pool = driver_of(partial(self._open, handle))

    @contextmanager
    def watched(self) -> Iterator[Watch]:
        """For tests: a block that learns of the calls."""
        self._watch = Watch(self._name)
        try:
            yield self._watch
        finally:
            self._watch = None

    def _check(self, handle: Any, *, is_awaited: bool) -> None:
        if self.is_awaited and not is_awaited:
            raise ConfigError(
                f"handler {self._name} is async, and a {type(handle).__qualname__} would block its event loop; write "
                f"`def {self._name}`, which runs in a thread, or pass a handle that is awaited"
            )
        if is_awaited and not self.is_awaited:
            raise ConfigError(
                f"handler {self._name} is a plain function, and a {type(handle).__qualname__} has to be awaited; write "
                f"`async def {self._name}`, or pass a handle that is not awaited"
            )

    def _open(self, open_connection: Callable[[], Any]) -> Any:
        opened = open_connection()
        try:
            self._check(opened, is_awaited=inspect.isawaitable(opened) or driver_of(opened).is_awaited)
        except ConfigError:
            if inspect.iscoroutine(opened):
                opened.close()
            raise
        return opened

    async def apply(self, given: Event | list[Event]) -> None:
        """Apply an event, or each of several, once. If the function is plain, it awaits nothing: see ``finish``."""
        work = _Work(given, [Entry.of(event) for event in ([given] if isinstance(given, Event) else given)])
        failures = 0
        for number in count():
            conflict = await self._connect(work)
            if conflict is None:
                return
            failures += conflict.is_handlers
            if failures == _HANDLER_ATTEMPTS:
                raise conflict.error
            longest = min(_LONGEST_PAUSE, _SHORTEST_PAUSE * 2 ** min(number, 10))
            seconds = longest * random.uniform(0.5, 1.0)  # so that the same two do not meet again
            await settled(self._sleep(seconds))

    async def _connect(self, work: "_Work") -> _Conflict | None:
        is_connected = False
        try:
            async with self._pool.connected() as driver:
                is_connected = True
                return await self._run(driver, work)
        except Exception as error:
            if is_connected or isinstance(error, PillarboxError):
                raise
            raise _away(error) from error

    async def _run(self, driver: Driver, work: "_Work") -> _Conflict | None:
        has_begun = is_new = False
        try:
            async with driver.begin() as tx:
                has_begun = True
                own = driver_of(tx)
                new = await self._record(own, work)
                if new:
                    is_new = True
                    await self._call(new, tx)
            applied = len(new) if isinstance(new, list) else int(new is not None)
            self._observers.inbox_asked(self.place.consumer, applied, len(work.entries) - applied)
            return None
        except InvalidEvent:
            raise
        except PillarboxError as error:
            if is_new:
                raise
            raise Outage(str(error)) from error  # the tables or the settings are wrong, and no event is to blame
        except Exception as error:
            kind = driver.classify(error)
            if kind is ErrorKind.CONFLICT:
                return _Conflict(error, is_new)
            if kind is ErrorKind.AWAY or not has_begun:
                raise _away(error) from error
            raise

    async def _record(self, driver: Driver, work: "_Work") -> Event | list[Event] | None:
        """What is new of the work."""
        given, entries = work
        if isinstance(given, Event):
            is_new = await settled(driver.run(build(driver, "record", self.place, entries[0], True)))
            return given if is_new else None
        ids = await settled(driver.run(build(driver, "record_all", self.place, in_order(entries), True)))
        return first_of_each(zip(given, entries, strict=True), ids)

    async def _call(self, given: Event | list[Event], tx: Any) -> None:
        if self._read is not None and isinstance(given, Event):
            given = self._read(given)
        returned = self._function(given, tx)
        if self.is_awaited:
            await returned
        elif inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            raise TypeError(f"handler {self._name} returned something to be awaited; write `async def {self._name}`")
        if self._watch is not None:
            self._watch.called()


def _away(error: Exception) -> Outage:
    # One line: the others of SQLAlchemy's errors have the statement and its values.
    text = next(iter(str(error).splitlines()), "")
    return Outage(f"the database of the inbox is away: {type(error).__name__}: {text}")
