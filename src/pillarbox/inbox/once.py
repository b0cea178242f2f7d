"""Runs a handler in one transaction with the inbox, so that an event's effects happen once."""

import asyncio
import inspect
import random
import time
from collections.abc import Callable
from functools import partial, update_wrapper
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar, cast

from pillarbox.drivers import Driver, driver_of
from pillarbox.drivers.contract import finish, settled
from pillarbox.drivers.registry import Factory
from pillarbox.errors import ConfigError, InvalidEvent, Outage, PillarboxError
from pillarbox.event import Event
from pillarbox.inbox.work import Entry, Place, build
from pillarbox.sql.dialects import ErrorKind

Result = TypeVar("Result")

_SHORTEST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 1.0
_HANDLER_ATTEMPTS: Final = 10


def make_once(place: Place, handle: Any) -> Callable[[Callable[[Event, Any], Result]], Callable[[Event], Result]]:
    """The decorator of :meth:`Inbox.once`."""
    if not driver_of(handle).is_pool:
        raise ConfigError(
            f"inbox.once was given a {type(handle).__qualname__}, which all events would share; pass an engine, a "
            "sessionmaker, a pool or a client, or a function that opens a connection"
        )

    def decorate(function: Callable[[Event, Any], Result]) -> Callable[[Event], Result]:
        once = _Once(place, handle, function)

        async def awaited(event: Event) -> None:
            await once.apply(event)

        def plain(event: Event) -> None:
            finish(once.apply(event))

        made = update_wrapper(
            awaited if once.is_awaited else plain,
            function,
            assigned=("__module__", "__name__", "__qualname__", "__doc__"),
            updated=(),
        )
        del made.__wrapped__  # its signature has the transaction, that of the handler has not
        return cast("Callable[[Event], Result]", made)

    return decorate


class _Conflict(NamedTuple):
    """The transaction lost against another one."""

    error: Exception
    is_handlers: bool  # in the handler, or at its commit


class _Once:
    """A decorated handler."""

    def __init__(self, place: Place, handle: Any, function: Callable[[Event, Any], Any]) -> None:
        self._place = place
        self._function = function
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
        self._pool = driver_of(handle)
        if not isinstance(self._pool, Factory) or self._pool.is_awaited:
            self._check(handle, is_awaited=self._pool.is_awaited)
        if isinstance(self._pool, Factory):
            self._pool = driver_of(partial(self._open, handle))

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

    async def apply(self, event: Event) -> None:
        """Apply an event once. If the function is plain, it awaits nothing: see ``finish``."""
        entry = Entry.of(event)
        failures = 0
        for number in count():
            conflict = await self._connect(event, entry)
            if conflict is None:
                return
            failures += conflict.is_handlers
            if failures == _HANDLER_ATTEMPTS:
                raise conflict.error
            longest = min(_LONGEST_PAUSE, _SHORTEST_PAUSE * 2 ** min(number, 10))
            seconds = longest * random.uniform(0.5, 1.0)  # so that the same two do not meet again
            await settled(self._sleep(seconds))

    async def _connect(self, event: Event, entry: Entry) -> _Conflict | None:
        is_connected = False
        try:
            async with self._pool.connected() as driver:
                is_connected = True
                return await self._run(driver, event, entry)
        except Exception as error:
            if is_connected or isinstance(error, PillarboxError):
                raise
            raise _away(error) from error

    async def _run(self, driver: Driver, event: Event, entry: Entry) -> _Conflict | None:
        has_begun = is_new = False
        try:
            async with driver.begin() as tx:
                has_begun = True
                own = driver_of(tx)
                is_new = await settled(own.run(build(own, "record", self._place, entry, True)))
                if is_new:
                    await self._call(event, tx)
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

    async def _call(self, event: Event, tx: Any) -> None:
        returned = self._function(event, tx)
        if self.is_awaited:
            await returned
        elif inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            raise TypeError(f"handler {self._name} returned something to be awaited; write `async def {self._name}`")


def _away(error: Exception) -> Outage:
    # One line: the others of SQLAlchemy's errors have the statement and its values.
    text = next(iter(str(error).splitlines()), "")
    return Outage(f"the database of the inbox is away: {type(error).__name__}: {text}")
