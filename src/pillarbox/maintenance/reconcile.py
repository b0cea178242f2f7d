"""Reconcile: writes the events that a check found missing and the outbox does not know, each one once."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple
from uuid import UUID

from pillarbox.durations import Duration, seconds_of
from pillarbox.errors import CheckFailed, DuplicateEvent
from pillarbox.event import Event, Status
from pillarbox.maintenance.check import Check, batches
from pillarbox.maintenance.service import Service
from pillarbox.outbox.routes import in_each_stream
from pillarbox.store import Filter, Store

_CANCEL_SECONDS: Final = 3.0  # longer than a generator's close may take


class Reconciled(NamedTuple):
    """The events that a run found, by what the outbox knew about them.

    missing: the outbox did not know them. emitted: those that were written; none in a dry run.
    waiting, published, dead: the outbox knows them, and they stay as they are.
    more: the run ended before the check did, at its limit or at a stop.
    """

    check: str
    missing: int = 0
    emitted: int = 0
    waiting: int = 0
    published: int = 0
    dead: int = 0
    more: bool = False

    @property
    def found(self) -> int:
        return self.missing + self.waiting + self.published + self.dead


class Reconcile(Service):
    """Runs one check. Safe to run anywhere and at any time: an event whose id the outbox knows is not written again.

    limit: instead of the check's. dry_run: writes nothing. grace: how long a stop waits for a check that
    hangs between two events.
    """

    name = "reconcile"
    first_seconds = 60.0  # a relay that starts publishes its backlog first

    def __init__(
        self,
        store: Store,
        check: Check,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        grace: Duration = "20s",
        on_progress: Callable[[Reconciled], None] = lambda so_far: None,
        logger: logging.Logger | None = None,
    ) -> None:
        super().__init__(check.every_seconds, logger)
        self.about = {"check": check.name}
        self._store = store
        self._check = check
        self._limit = check.limit if limit is None else limit
        self._dry_run = dry_run
        self._grace_seconds = seconds_of("grace", grace)
        self._on_progress = on_progress

    async def run_once(self) -> Reconciled:
        run = _Run(
            self._store, self._check, self._limit, self._dry_run, self._stop.is_set, self._on_progress, self._log
        )
        try:
            await self._until_stopped(run)
        finally:
            if not self._dry_run:
                self._report(run.so_far)
        return run.so_far

    async def _until_stopped(self, run: "_Run") -> None:
        # A task of its own: a check may hang, and the relay must be able to stop.
        work = asyncio.create_task(run.run(), name=f"pillarbox-check-{self._check.name}")
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await asyncio.wait({work}, timeout=self._grace_seconds)
        finally:
            stop.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=_CANCEL_SECONDS)
        if work.done() and not work.cancelled():
            return work.result()
        if not self._stop.is_set():
            raise CheckFailed(
                f"check '{self._check.name}' was cancelled by its own code; catch asyncio.CancelledError in it"
            )
        self._log.warning(
            "check '%s' did not come to its next event within %g s of the stop, and is given up",
            self._check.name,
            self._grace_seconds,
            extra={"action": "check_given_up", "check": self._check.name},
        )
        run.so_far = run.so_far._replace(more=True)
        return None

    def _report(self, done: Reconciled) -> None:
        if not done.found:
            return
        # Published and dead events stay as they are until an operator acts.
        level = logging.WARNING if done.published or done.dead else logging.INFO
        self._log.log(
            level,
            "check '%s' found %d without effect: %d emitted, %d waiting, %d published already, %d dead%s",
            done.check,
            done.found,
            done.emitted,
            done.waiting,
            done.published,
            done.dead,
            "; there may be more" if done.more else "",
            extra={"action": "reconciled", **done._asdict()},
        )


class _Run:
    """One run of one check, and how far it got."""

    def __init__(
        self,
        store: Store,
        check: Check,
        limit: int,
        dry_run: bool,
        is_stopped: Callable[[], bool],
        on_progress: Callable[[Reconciled], None],
        logger: logging.Logger,
    ) -> None:
        self.so_far = Reconciled(check.name)
        self._store = store
        self._check = check
        self._limit = limit
        self._dry_run = dry_run
        self._is_stopped = is_stopped
        self._on_progress = on_progress
        self._log = logger
        self._missing: set[UUID] = set()  # a check may find one twice

    async def run(self) -> None:
        async with aclosing(batches(self._check, self._is_stopped, self._log)) as found:
            async for events in found:
                known = await self._known(events)
                for event in events:
                    if self._is_stopped() or not await self._one(event, known.get(event.id)):
                        self._count(more=True)
                        return
                self._on_progress(self.so_far)
        if self._is_stopped():
            self._count(more=True)

    async def _known(self, events: Sequence[Event]) -> Mapping[UUID, Status]:
        ids = list({event.id for event in events})
        # Twice as many: an id that died and was written again is found twice. The event that is not dead counts.
        copies = sum(1 for event in events for _ in in_each_stream(event))
        found = await self._store.find(Filter(ids=ids), 2 * copies)
        states = sorted((each.event for each in found), key=lambda event: event.status is not Status.DEAD)
        return {event.id: event.status for event in states}

    async def _one(self, event: Event, status: Status | None) -> bool:
        """Count one event, or write it; False: it is missing, and the limit is reached.

        Known events do not count towards the limit: those that come first in every run would use it up."""
        if event.id in self._missing:
            return True
        match status:
            case Status.DEAD:
                self._count(dead=1)
            case Status.PUBLISHED:
                self._count(published=1)
            case None:
                if len(self._missing) >= self._limit:
                    return False
                await self._emit(event)
            case _:
                self._count(waiting=1)
        return True

    async def _emit(self, event: Event) -> None:
        # Each in a transaction of its own: two relays with the same events in another order would deadlock.
        if not self._dry_run:
            try:
                await self._store.add(list(in_each_stream(event)))
            except DuplicateEvent:  # another relay or the application was faster
                self._count(waiting=1)
                return
        self._missing.add(event.id)
        self._count(missing=1, emitted=not self._dry_run)

    def _count(self, *, more: bool = False, **counts: int) -> None:
        grown = {name: getattr(self.so_far, name) + count for name, count in counts.items()}
        self.so_far = self.so_far._replace(more=more, **grown)
