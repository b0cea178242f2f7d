"""Blocks of an outbox, for plain and for awaited drivers alike."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pillarbox.drivers import driver_of
from pillarbox.drivers.contract import finish
from pillarbox.errors import ConfigError
from pillarbox.event import Event

if TYPE_CHECKING:
    from pillarbox.outbox.outbox import Outbox

T = TypeVar("T")


class Block(Generic[T]):
    """A block that is entered with ``async with`` if its driver has to be awaited, and else with ``with``.

    call: names it in errors. inner: awaits nothing on a plain driver.
    """

    def __init__(self, call: str, is_awaited: bool, inner: AbstractAsyncContextManager[T]) -> None:
        self._call, self._is_awaited, self._inner = call, is_awaited, inner

    def __enter__(self) -> T:
        if self._is_awaited:
            raise ConfigError(f"this handle has to be awaited; write `async with {self._call}(...)`")
        return finish(self._enter())

    async def _enter(self) -> T:
        return await self._inner.__aenter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return finish(self.__aexit__(kind, error, trace))

    async def __aenter__(self) -> T:
        if not self._is_awaited:
            raise ConfigError(
                f"this handle is not awaited and would block the event loop; write `with {self._call}(...)`"
            )
        return await self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, trace)


class Capture:
    """The block of ``Outbox.capture``: a list of events."""

    of_all: ClassVar[Sequence["Capture"]] = ()  # those that collect from every outbox

    def __init__(self, outbox: "Outbox | None", write: bool = True, committed: Any = False) -> None:
        if committed is True:
            raise ConfigError(
                "capture(committed=True) does not say whom to ask; pass what opens a connection, such as "
                "capture(committed=engine)"
            )
        if committed and not write:
            raise ConfigError("with write=False nothing is committed; leave out write or committed")
        self.events: list[Event] = []
        self.write = write
        self._outbox = outbox
        self._asked = driver_of(committed) if committed else None

    def __enter__(self) -> Sequence[Event]:
        if self._asked is not None and self._asked.is_awaited:
            raise ConfigError("this handle has to be awaited; write `async with outbox.capture(committed=...)`")
        return self._begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if self._asked is not None and kind is None:
            finish(self._keep_committed())

    async def __aenter__(self) -> Sequence[Event]:
        if self._asked is not None and not self._asked.is_awaited:
            raise ConfigError("this handle is not awaited; write `with outbox.capture(committed=...)`")
        return self._begin()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if self._asked is not None and kind is None:
            await self._keep_committed()

    def _begin(self) -> Sequence[Event]:
        if self._outbox is None:
            Capture.of_all = [*Capture.of_all, self]
        else:
            self._outbox._captures = [*self._outbox._captures, self]
        return self.events

    def _end(self) -> None:
        if self._outbox is None:
            Capture.of_all = [each for each in Capture.of_all if each is not self]
        else:
            self._outbox._captures = [each for each in self._outbox._captures if each is not self]

    async def _keep_committed(self) -> None:
        assert self._asked is not None
        assert self._outbox is not None
        kept = []
        async with self._asked.begin() as tx:
            for event in self.events:
                asked = self._outbox.exists(tx, event.id, event.stream)
                if await asked if self._asked.is_awaited else asked:
                    kept.append(event)
        self.events[:] = kept
