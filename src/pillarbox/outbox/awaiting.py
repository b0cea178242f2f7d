"""Results for the caller of a driver that has to be awaited."""

import asyncio
import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any

from pillarbox.drivers.contract import Build, Driver
from pillarbox.event import Event

log = logging.getLogger("pillarbox.outbox")


class PendingWrite:
    """A write that has to be awaited.

    If it is dropped without an await, its transaction cannot commit: better no data than data without its event. If it
    is kept until after the commit, the loss can only be logged.
    """

    def __init__(self, driver: Driver, build: Build[None], types: Sequence[str]) -> None:
        self._driver = driver
        self._build = build
        self._types = types
        self._is_awaited = False
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()

    def __await__(self) -> Generator[Any, Any, None]:
        self._is_awaited = True
        yield from self._driver.run(self._build).__await__()

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
            is_open = self._driver.in_transaction()
            self._driver.abandon()
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
    """An event that was added. ``await`` writes it on drivers that have to be awaited, and does nothing elsewhere."""

    pending: PendingWrite | None = None

    @classmethod
    def of(cls, event: Event, pending: PendingWrite | None) -> "Added":
        added = tuple.__new__(cls, event)
        if pending is not None:
            added.pending = pending
        return added

    def __await__(self) -> Generator[Any, Any, Event]:
        if self.pending is not None:
            yield from self.pending.__await__()
        # A plain event: a framework that awaits every awaitable would write this one again.
        return tuple.__new__(Event, self)


class AddedAll:
    """Events that were added; see :class:`Added`."""

    def __init__(self, pending: PendingWrite | None) -> None:
        self._pending = pending

    def __await__(self) -> Generator[Any, Any, None]:
        if self._pending is not None:
            yield from self._pending.__await__()
