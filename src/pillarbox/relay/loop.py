"""The loop of a stream's worker: it polls, starts work, waits and stops."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from pillarbox.errors import NotDrained, StoreDown, StoreError
from pillarbox.event import Mode, Status
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.deadline import Deadline, Step
from pillarbox.relay.pace import Pace, Patience
from pillarbox.store import Work
from pillarbox.tasks import ended

log = logging.getLogger(__name__)

_REENTER_LIMIT = 1000
_REFUSED_SECONDS = 1.0
_WAITING = (Status.PENDING, Status.SCHEDULED, Status.PROCESSING, Status.FAILED, Status.HELD)


class Worker(Protocol):
    """The work on one stream. The loop calls it; it calls nobody back."""

    changed: asyncio.Event  # set when something has ended: the pace may be another one
    pace: Pace  # when to poll and when to look

    @property
    def busy(self) -> bool:
        """Whether something runs or waits for a slot."""
        ...

    @property
    def refused(self) -> bool:
        """Whether the database refuses to settle what was published."""
        ...

    @property
    def circuit_error(self) -> str | None:
        """Why it waits for its destination. None: it does not."""
        ...

    async def poll(self) -> Work:
        """Ask the store for work."""
        ...

    async def start(self, work: Work) -> bool:
        """Start the work that the poll found. False: there was none."""
        ...

    def look(self) -> bool:
        """Start work on new events without a poll, now or when the pace allows it. False: it takes a poll."""
        ...

    @property
    def urgent(self) -> bool:
        """Whether something waits that only a poll finds."""
        ...

    @property
    def pause_seconds(self) -> float:
        """For so long a poll makes no sense, unless something ends."""
        ...

    async def renew(self) -> None:
        """Extend all leases."""

    def stop(self) -> None:
        """Start nothing new."""

    async def finish(self, deadline: Deadline) -> None:
        """Wait for running work, end what takes too long, and settle what has ended."""

    async def release(self) -> None:
        """Give back all leases."""


class Loop:
    """Serves one stream until it is told to stop. on_join: called when the stream's workers include this one."""

    def __init__(self, job: Assignment, worker: Worker, on_join: Callable[[], None] = lambda: None) -> None:
        self.turned_at = time.monotonic()  # when the last step began
        self._job = job
        self._store = job.store
        self._stream = job.stream
        self._worker = worker
        self._pace = worker.pace
        self._patience = Patience(job.stream.name, job.store.description, logger=job.logger)
        self._on_join = on_join
        self._log = job.logger or log
        self._stopped = False
        self._deadline: Deadline | None = None
        self._idle = asyncio.Event()  # set while the last poll found nothing to do
        self._polls = self._quiet_poll = 0
        self._joined = self._dozing = False
        self._at_rest = False  # it waits for its next poll, and the worker may look without it

    def wake(self) -> None:
        """Look as soon as a look may be: events may have arrived."""
        now = time.monotonic()
        self._pace.wake(now)
        # Without this loop if it only waits: for a single event it would cost as much as the look.
        if not self._at_rest or self._pace.must_wake(now) or not self._worker.look():
            self._worker.changed.set()

    def stop(self, deadline: Deadline | None = None) -> None:
        self._stopped = True
        self._deadline = self._deadline or deadline
        self._worker.stop()
        self._worker.changed.set()

    async def drained(self) -> bool:
        """Wait until no event of the stream is ready. False: the loop ended before that.

        A worker that died has its events until its lease runs out: they are waited for. Who has events for longer than
        a lease is alive, and publishes them itself. Raises NotDrained if the stream is paused and events wait."""
        clock, logged = asyncio.get_running_loop(), False
        # One lease until it runs out, and one in which its events are taken or rescued.
        until = clock.time() + 2 * self._stream.lease_seconds
        while await self._quiet():
            with suppress(StoreDown):
                free, with_others = await self._left()
                if not free and (not with_others or clock.time() > until):
                    return True
            if not logged:
                self._log.info(
                    "stream '%s': waiting for events that other workers have: if one of them died, until its lease "
                    "runs out",
                    self._stream.name,
                    extra={"action": "draining", "stream": self._stream.name},
                )
            logged = True
            await asyncio.sleep(self._stream.poll_seconds)
        return False

    async def _left(self) -> tuple[bool, bool]:
        """Whether events are ready that anybody can take, and whether other workers have some."""
        name = self._stream.name
        is_queue = self._stream.mode is Mode.QUEUE
        # Before and after the poll: an event can be rescued or claimed between two questions.
        before = await self._store.count(name) if is_queue else {}
        work = await self._store.poll(name, self._job.worker, None)
        free = work.scheduled or work.suspects
        if is_queue:
            free |= bool(work.ready)
            with_others = Status.PROCESSING in {*before, *await self._store.count(name)}
        else:
            with_others = bool(work.ready or work.due)
        if work.paused and (free or with_others):
            counts = await self._store.count(name)
            waiting = sum(counts.get(status, 0) for status in _WAITING)
            raise NotDrained(
                f"stream '{name}' is paused, and {waiting:,} of its events wait; "
                f"resume it with: pillarbox streams resume {name}"
            )
        return free, with_others

    async def _quiet(self) -> bool:
        """Wait for a poll that begins after this call and finds nothing to do. False: the loop ended before that."""
        before = self._polls
        self._pace.awaited = True
        while self._quiet_poll <= before and not self._stopped:
            self._idle.clear()
            self._pace.hurry()
            self._worker.changed.set()
            await self._idle.wait()
        self._pace.awaited = False
        return self._quiet_poll > before

    async def run(self) -> None:
        """Run until stop. Raises an error that it cannot handle, after it has given back its leases."""
        renewing = asyncio.create_task(self._renew_for_ever(), name=f"pillarbox-renew-{self._stream.name}")
        try:
            while not self._stopped:
                self.turned_at = time.monotonic()
                if renewing.done():
                    await renewing
                self._job.report.summarise()
                # While the database is away no lease is given back: published events wait for their settle.
                try:
                    await self._step()
                    self._patience.reset()
                except StoreDown as error:
                    self._dozing = self._pace.told = False  # a database that was away may have forgotten that we sleep
                    await self._wait(self._patience.after(error))
                except StoreError:
                    # The same: a new start would publish again what this worker could not settle.
                    if not self._worker.refused:
                        raise
                    await asyncio.sleep(_REFUSED_SECONDS)
        finally:
            self.stop()
            self._idle.set()
            # Without a stop something has failed; it then has as much time.
            deadline = self._deadline or Deadline(self._job.grace_seconds)
            await self._worker.finish(deadline)
            self._job.report.summarise(at_once=True)
            await ended(renewing)
            with suppress(StoreDown, TimeoutError):
                async with asyncio.timeout(deadline.left(Step.SETTLE)):
                    await self._set_dozing(False)
                    await self._worker.release()
                    await self._store.leave(self._stream.name, self._job.worker)

    async def _step(self) -> None:
        worker, stream = self._worker, self._stream.name
        if not self._joined:
            await self._store.announce(stream, Mode(self._stream.mode), self._job.publisher.description)
            await self._join()
            self._joined = True
            self._on_join()
        worker.changed.clear()
        now, pace = time.monotonic(), self._pace
        is_due = now >= pace.poll_at
        if pace.woken or (now >= pace.look_at and not is_due):
            is_due |= not worker.look()
        if is_due:
            await self._poll()
        await self._doze_or_wake()
        self._at_rest = True
        try:
            await self._wait(pace.next_at - time.monotonic())
        finally:
            self._at_rest = False

    async def _poll(self) -> None:
        self._polls += 1
        self._pace.begin_poll()
        try:
            await self._poll_and_start()
        except BaseException:
            self._pace.hurry()
            raise

    async def _poll_and_start(self) -> None:
        worker, stream = self._worker, self._stream.name
        was_busy = worker.busy
        begun = time.monotonic()
        work = await worker.poll()
        seconds = time.monotonic() - begun
        found = False
        if work.scheduled and not work.paused and await self._store.reenter_due(stream, _REENTER_LIMIT):
            found = True
            self._pace.hurry()
        found |= await worker.start(work)
        self._pace.polled(
            time.monotonic(),
            seconds,
            found=found,
            ready=bool(work.ready),
            urgent=worker.urgent,
            pause=worker.pause_seconds,
        )
        if found or worker.busy:
            self._idle.clear()
        # The poll leaves out busy shards. If one became free during the poll, its later events were not seen.
        elif not was_busy:
            self._quiet_poll = self._polls
            self._idle.set()

    async def _doze_or_wake(self) -> None:
        """Ask the store to wake this worker while events are rare."""
        pace, now = self._pace, time.monotonic()
        if not self._store.features.wake_up:
            return
        if self._dozing and pace.must_wake(now):
            await self._set_dozing(False)
        elif not self._dozing and not self._worker.busy and pace.may_doze(now):
            await self._set_dozing(True)
            # Once more: an event may have come just before the database knew that we sleep.
            pace.hurry()

    async def _wait(self, seconds: float) -> None:
        # asyncio.wait_for makes a task each time, which costs more than all else between two questions.
        changed = self._worker.changed
        timer = asyncio.get_running_loop().call_later(max(0.0, seconds), changed.set)
        try:
            await changed.wait()
        finally:
            timer.cancel()

    async def _set_dozing(self, asleep: bool) -> None:
        if self._dozing != asleep:
            self._pace.told = False
            await self._store.doze(self._stream.name, self._job.worker, asleep)
            self._dozing = self._pace.told = asleep

    async def _join(self) -> None:
        error = self._worker.circuit_error
        await self._store.join(self._stream.name, self._job.worker, self._stream.lease_seconds, error)

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._stream.lease_seconds / 3)
            try:
                await self._join()
                await self._worker.renew()
            except StoreDown:
                continue
            except StoreError:
                if not self._worker.refused:
                    raise
