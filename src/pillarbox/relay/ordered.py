"""A worker of an ordered stream: it polls the shards that it owns and runs turns on a few slots."""

import asyncio
import time
from collections import deque

from pillarbox.errors import LeaseLost, StoreDown
from pillarbox.publisher import Publisher
from pillarbox.relay.ownership import Ownership, Shard
from pillarbox.relay.plan import Rules
from pillarbox.relay.stream import Stream
from pillarbox.relay.turn import Stopping, Turns
from pillarbox.relay.worker import StreamWorker
from pillarbox.store import Store, Work

# How often to look at the share, the pause and the leases while every slot is busy.
_BUSY_POLL_SECONDS = 0.5


class OrderedWorker(StreamWorker):
    """Serves one ordered stream."""

    def __init__(
        self, store: Store, stream: Stream, publisher: Publisher, rules: Rules, worker: str, grace_seconds: float
    ) -> None:
        super().__init__(store, stream, publisher, rules, worker, grace_seconds)
        self._slots = stream.slots or publisher.features.calls
        self._ownership = Ownership(store, stream, worker, publisher.features.first_batch)
        self._turns = Turns(store, publisher, self.breaker, rules, stream.batch_bytes, self._give_up)
        self._waiting: deque[Shard] = deque()
        self._running: dict[asyncio.Task[bool], Shard] = {}
        self._resting: dict[int, Shard] = {}
        self._left: list[Shard] = []
        self._paused = False
        self._failure: BaseException | None = None

    @property
    def _busy(self) -> bool:
        return bool(self._running or self._waiting)

    async def _poll(self) -> Work:
        if self._failure is not None:
            raise self._failure
        busy = {shard.grant.shard for shard in (*self._running.values(), *self._waiting)}
        self._resting = {number: shard for number, shard in self._ownership.shards.items() if number not in busy}
        grants = [shard.grant for shard in self._resting.values()]
        return await self._store.poll(self.stream.name, self._worker, grants)

    async def _start(self, work: Work) -> bool:
        found = await self._ownership.adjust(work, self._running.values())
        self._paused = work.paused
        if work.paused:
            self._waiting.clear()
            return found
        for number in sorted(work.ready | work.due):
            shard = self._resting.get(number)
            if shard is not None and self._ownership.owns(shard):
                if number in work.due:
                    shard.look_for_due_at = 0.0
                self._waiting.append(shard)
                found = True
        self._fill()
        return found

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots and not (self._paused or self._stop.is_set()):
            shard = self._waiting[0]
            if not self._ownership.owns(shard) or shard.leaving:
                self._waiting.popleft()
                continue
            # An event that may kill its worker is published alone, so that a crash can be laid at its door.
            if any(other.alone for other in self._running.values()) or (shard.alone and self._running):
                return
            if not self.breaker.allows(time.monotonic()):
                return
            self._waiting.popleft()
            task = asyncio.create_task(self._turns.turn(shard), name=f"pillarbox-turn-{shard.grant.shard}")
            self._running[task] = shard
            task.add_done_callback(self._turned)

    def _turned(self, task: asyncio.Task[bool]) -> None:
        shard = self._running.pop(task)
        self.breaker.untold()
        more = False
        if not task.cancelled():
            error = task.exception()
            if error is None:
                more = task.result()
            elif isinstance(error, LeaseLost):
                self._ownership.drop(shard)
            elif not isinstance(error, StoreDown | Stopping):
                self._failure = error
        if more and self._ownership.owns(shard) and not (shard.leaving or self._paused or self._stop.is_set()):
            self._waiting.append(shard)
        self._pace.worked()
        self._fill()
        if not self._waiting or self._failure is not None:
            self._changed.set()

    def _seconds_to_next_poll(self) -> float:
        if self._waiting:
            return max(_BUSY_POLL_SECONDS, self.breaker.seconds_left(time.monotonic()))
        if len(self._running) >= self._slots:
            return _BUSY_POLL_SECONDS
        return self._pace.wait()

    async def _renew(self) -> None:
        await self._ownership.renew()

    async def _finish(self) -> None:
        self._waiting.clear()
        running = dict(self._running)
        self._left = [running[task] for task in await self._end(running.keys())]

    async def _leave(self) -> None:
        # What was left behind may still be sending: it keeps its shard until the lease runs out.
        await self._ownership.give([each for each in self._ownership.shards.values() if each not in self._left])
        await super()._leave()
