"""What the workers of ordered and of queue streams share: one loop that polls, works, rests and stops."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress
from typing import ClassVar, TypeVar

from pillarbox.errors import StoreDown
from pillarbox.publisher import Publisher
from pillarbox.relay.breaker import Breaker
from pillarbox.relay.pace import Pace, Patience
from pillarbox.relay.plan import Rules
from pillarbox.relay.stream import Stream
from pillarbox.store import Store, Work
from pillarbox.tasks import ended

log = logging.getLogger(__name__)

T = TypeVar("T")

_PROMOTE_LIMIT = 1000
_CANCEL_SECONDS = 1.0


async def close(publisher: Publisher, seconds: float) -> None:
    """Close it, and wait for that no longer than so."""
    closing = asyncio.create_task(publisher.close(), name="pillarbox-close")
    if (await asyncio.wait([closing], timeout=seconds))[0]:
        await closing
        return
    log.error("%s cannot be closed, and is left behind", publisher.description, extra={"action": "left_behind"})
    closing.cancel()


class StreamWorker(ABC):
    """Serves one stream until it is told to stop."""

    # After the grace: what a database that does not answer may take before a settle is given up.
    last_seconds: ClassVar[float] = 60.0

    def __init__(
        self, store: Store, stream: Stream, publisher: Publisher, rules: Rules, worker: str, grace_seconds: float
    ) -> None:
        self.stream = stream
        self.breaker = Breaker(stream.name, publisher.description)
        self.idle = asyncio.Event()  # set while the last poll found nothing to do
        self._store = store
        self._publisher = publisher
        self._rules = rules
        self._worker = worker
        self._grace = grace_seconds
        self._pace = Pace(stream.poll_seconds, stream.poll_limit_seconds)
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._give_up = asyncio.Event()
        self._polls = self._quiet_poll = 0
        self._joined = False
        self._dozing = False

    @property
    @abstractmethod
    def _busy(self) -> bool:
        """Whether something is under way or waits for a place."""

    @abstractmethod
    async def _poll(self) -> Work: ...

    @abstractmethod
    async def _start(self, work: Work) -> bool:
        """Begin what the poll found; whether it was anything."""

    @abstractmethod
    async def _renew(self) -> None: ...

    async def _end(self, running: Collection[asyncio.Task[T]]) -> Collection[asyncio.Task[T]]:
        """Give what is under way the grace, then close the publisher, which ends its calls; those that never end.

        Their leases are not renewed any more, so that another worker takes over when they have run out.
        """
        if not running or not (await asyncio.wait(running, timeout=self._grace))[1]:
            return ()
        self._give_up.set()
        closing = asyncio.create_task(close(self._publisher, self.last_seconds))
        _, left = await asyncio.wait(running, timeout=self.last_seconds)
        await closing
        if left:
            log.error(
                "stream '%s': %d call(s) of %s did not end although it was closed, and are left behind",
                self.stream.name,
                len(left),
                self._publisher.description,
                extra={"action": "left_behind", "stream": self.stream.name, "count": len(left)},
            )
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=_CANCEL_SECONDS)
        return left

    @abstractmethod
    async def _finish(self) -> None:
        """Let what is under way end, or give it back after the grace."""

    @abstractmethod
    def _seconds_to_next_poll(self) -> float: ...

    def wake(self) -> None:
        """Events may have arrived."""
        self._pace.worked()
        self._changed.set()

    async def drained(self) -> bool:
        """Wait for a poll that begins after this call and finds nothing; False: this worker ended before it."""
        before = self._polls
        while self._quiet_poll <= before and not self._stop.is_set():
            self.idle.clear()
            self.wake()
            await self.idle.wait()
        return self._quiet_poll > before

    def stop(self) -> None:
        self._stop.set()
        self._changed.set()

    async def run(self) -> None:
        """Until stop; raises what it cannot handle, after letting go of what it holds."""
        renewing = asyncio.create_task(self._renew_for_ever(), name=f"pillarbox-renew-{self.stream.name}")
        patience = Patience(self.stream.name, self._store.description)
        try:
            while not self._stop.is_set():
                if renewing.done():
                    await renewing
                # While the database is away nothing is let go: what was published waits to be settled.
                try:
                    await self._step()
                    patience.reset()
                except StoreDown as error:
                    await self._wait(patience.after(error))
        finally:
            self._stop.set()
            self.idle.set()
            await self._finish()
            await ended(renewing)
            with suppress(StoreDown):
                await self._set_dozing(False)
                await self._leave()

    async def _step(self) -> None:
        if not self._joined:
            await self._join()
            self._joined = True
        self._changed.clear()
        self._polls += 1
        was_busy = self._busy
        work = await self._poll()
        found = False
        if work.scheduled and not work.paused:
            found = await self._store.promote(self.stream.name, _PROMOTE_LIMIT) > 0
        found |= await self._start(work)
        if found:
            self._pace.worked()
        if found or self._busy:
            self.idle.clear()
            await self._set_dozing(False)
        elif self._pace.drowsy and not self._dozing and self._store.features.wake_up:
            await self._set_dozing(True)
            return  # one more look: an event may have come just before the database knew that we sleep
        # What was busy is not polled: its turn may have ended meanwhile, and left what came after its read.
        elif not work.paused and not was_busy:
            self._quiet_poll = self._polls
            self.idle.set()
        await self._wait(self._seconds_to_next_poll())

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def _set_dozing(self, asleep: bool) -> None:
        if self._dozing != asleep:
            await self._store.doze(self.stream.name, self._worker, asleep)
            self._dozing = asleep

    async def _join(self) -> None:
        await self._store.join(self.stream.name, self._worker, self.stream.lease_seconds)

    async def _leave(self) -> None:
        await self._store.leave(self.stream.name, self._worker)

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.stream.lease_seconds / 3)
            with suppress(StoreDown):
                await self._join()
                await self._renew()
