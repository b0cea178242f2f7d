"""What passes between the outbox and its writers, and what a caller gets back from a driver that has to be awaited."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from pillarbox.event import Event
from pillarbox.names import Names

log = logging.getLogger("pillarbox.outbox")


class Batch(NamedTuple):
    """Events for one outbox, in this order."""

    events: Sequence[Event]
    names: Names
    ignore_duplicates: bool = False
    lock_keys: bool = False  # writers of one key wait for each other until they commit
    transactions: bool = True  # False: may be written outside of one, where the database can do without


class Question(NamedTuple):
    """Whether an outbox knows an event."""

    id: UUID
    names: Names


Asked: TypeAlias = Callable[[], Awaitable[bool]]


class Deferred(NamedTuple):
    """A write on a driver that has to be awaited."""

    run: Callable[[], Awaitable[Any]]
    in_transaction: Callable[[], bool]  # whether the transaction that it belongs to can still be open
    abandon: Callable[[], object]  # without waiting: what was not awaited must keep its transaction from committing


class Pending:
    """A write that has to be awaited. If it is dropped instead, its transaction cannot commit: better no data than
    data without its event. One that is kept, and not awaited before the commit, can only be told of."""

    def __init__(self, deferred: Deferred, types: Sequence[str]) -> None:
        self._deferred = deferred
        self._types = types
        self._is_awaited = False
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()

    def __await__(self) -> Generator[Any, Any, None]:
        self._is_awaited = True
        yield from self._deferred.run().__await__()

    def __del__(self) -> None:
        if self._is_awaited:
            return
        if threading.get_ident() == self._thread:
            self._forgotten()
        else:
            with suppress(RuntimeError):  # the loop has ended, and its connections with it
                self._loop.call_soon_threadsafe(self._forgotten)

    def _forgotten(self) -> None:
        is_open = False
        with suppress(Exception):  # closed, in each driver's own words
            is_open = self._deferred.in_transaction()
            self._deferred.abandon()
        outcome = "its transaction cannot commit any more, so that nothing commits without it"
        if not is_open:
            outcome = "if its data is committed already THE EVENT IS LOST"
        log.error(
            "outbox.add was not awaited for %s; %s: write `await outbox.add(...)`, "
            "or use `async with outbox.transaction(...)`, where nothing has to be awaited",
            ", ".join(self._types),
            outcome,
            extra={"action": "event_not_awaited"},
        )


class Added(Event):
    """An event that was added. On drivers that have to be awaited it is written by ``await``; elsewhere ``await`` does
    nothing more."""

    pending: Pending | None = None

    @classmethod
    def of(cls, event: Event, pending: Pending | None) -> "Added":
        added = tuple.__new__(cls, event)
        if pending is not None:
            added.pending = pending
        return added

    def __await__(self) -> Generator[Any, Any, Event]:
        if self.pending is not None:
            yield from self.pending.__await__()
        # A plain event: awaited a second time, by a framework that awaits what it can, this one would be written again.
        return tuple.__new__(Event, self)


class AddedAll:
    """Events that were added; see :class:`Added`."""

    def __init__(self, pending: Pending | None) -> None:
        self._pending = pending

    def __await__(self) -> Generator[Any, Any, None]:
        if self._pending is not None:
            yield from self._pending.__await__()


class Exists:
    """The answer of ``exists``: true or false, and on drivers that have to be awaited the same by ``await``."""

    def __init__(self, answer: "bool | Asked") -> None:
        self._answer = answer

    def __bool__(self) -> bool:
        if not isinstance(self._answer, bool):
            raise TypeError("this driver has to be awaited: write `await outbox.exists(...)`")
        return self._answer

    def __await__(self) -> Generator[Any, Any, bool]:
        if not isinstance(self._answer, bool):
            self._answer = yield from self._answer().__await__()
        return bool(self)
