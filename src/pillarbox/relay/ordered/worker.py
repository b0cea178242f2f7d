"""The worker of an ordered stream: it polls its shards and runs turns in its slots."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from pillarbox.errors import StoreDown
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.crash import Calm
from pillarbox.relay.deadline import Deadline
from pillarbox.relay.destination import Destination
from pillarbox.relay.ordered.ownership import Ownership, Shard
from pillarbox.relay.ordered.turn import Stopping, TurnRunner
from pillarbox.relay.pace import Pace
from pillarbox.store import Work

# How often to check the share, the pause and the leases while every slot is busy.
_BUSY_POLL_SECONDS = 0.5


class OrderedWorker:
    """Works on one ordered stream."""

    def __init__(self, job: Assignment, destination: Destination) -> None:
        self.changed = asyncio.Event()
        self.ownership = Ownership(job)
        self._job = job
        self._destination = destination
        self._slots = job.stream.slots or destination.features.calls
        self._calm = Calm(time.monotonic())
        self._turns = TurnRunner(job, destination, self._calm)
        self._waiting: deque[Shard] = deque()
        self._running: dict[asyncio.Task[Sequence[Shard]], Sequence[Shard]] = {}
        self._resting: dict[int, Shard] = {}
        self._left_behind: set[Shard] = set()
        self._paused = self._stopped = False
        self._failure: BaseException | None = None

    @property
    def refused(self) -> bool:
        return self._turns.refusal.stands

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    async def poll(self) -> Work:
        if self._failure is not None:
            raise self._failure
        busy = {shard.grant.shard for shard in (*self._in_turn(), *self._waiting)}
        self._resting = {number: shard for number, shard in self.ownership.shards.items() if number not in busy}
        grants = [shard.grant for shard in self._resting.values()]
        return await self._job.store.poll(self._job.stream.name, self._job.worker, grants)

    async def start(self, work: Work) -> bool:
        found = await self.ownership.adjust(work, self._in_turn())
        self._paused = work.paused
        if work.paused:
            self._waiting.clear()
            return found
        for number in sorted(work.ready | work.due):
            shard = self._resting.get(number)
            if shard is not None and self.ownership.owns(shard):
                if number in work.due:
                    shard.check_due_at = 0.0
                self._waiting.append(shard)
                found = True
        self._fill_slots()
        return found

    def seconds_to_next_poll(self, pace: Pace) -> float:
        if self._waiting:
            return max(_BUSY_POLL_SECONDS, self._destination.breaker.pause_seconds(time.monotonic()))
        if len(self._running) >= self._slots:
            return _BUSY_POLL_SECONDS
        return pace.wait()

    async def renew(self) -> None:
        await self.ownership.renew()

    def stop(self) -> None:
        self._stopped = True

    async def finish(self, deadline: Deadline) -> None:
        self._waiting.clear()
        running = dict(self._running)
        left = await self._destination.finish(running.keys(), deadline)
        self._left_behind = {shard for task in left for shard in running[task]}

    async def release(self) -> None:
        # A call that was left behind may still send: its shard is kept until the lease runs out.
        await self.ownership.give([each for each in self.ownership.shards.values() if each not in self._left_behind])

    def _in_turn(self) -> list[Shard]:
        return [shard for shards in self._running.values() for shard in shards]

    def _may_begin(self, shard: Shard) -> bool:
        return self.ownership.owns(shard) and not (shard.leaving or self._paused or self._stopped)

    def _fill_slots(self) -> None:
        self._waiting = deque(shard for shard in self._waiting if self._may_begin(shard))
        while self._waiting and len(self._running) < self._slots and not self.refused:
            shard = self._next()
            if shard is None or not self._destination.breaker.allows(time.monotonic()):
                return
            self._waiting.remove(shard)
            task = asyncio.create_task(self._turns.run([shard]), name=f"pillarbox-turn-{shard.grant.shard}")
            self._running[task] = [shard]
            task.add_done_callback(self._turn_ended)

    def _next(self) -> Shard | None:
        """The shard whose turn begins now. A suspect is published alone, so that a crash has one cause."""
        if any(shard.crash_rule.waits for shard in self._in_turn()):
            return None
        suspects = {id(shard.crash_rule): shard for shard in self._waiting if shard.crash_rule.waits}
        others = [shard for shard in self._waiting if not shard.crash_rule.waits]
        busy = bool(others or self._running)
        chosen = self._calm.choose([shard.crash_rule for shard in suspects.values()], time.monotonic(), busy=busy)
        if chosen is not None:
            return None if self._running else suspects[id(chosen)]
        return others[0] if others else None

    def _turn_ended(self, task: asyncio.Task[Sequence[Shard]]) -> None:
        shards = self._running.pop(task)
        self._destination.breaker.inconclusive()
        for shard in shards:
            if shard.lost:
                self.ownership.drop(shard)
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            self._waiting += [shard for shard in task.result() if self._may_begin(shard)]
        elif not isinstance(error, StoreDown | Stopping | None):
            self._failure = error
        self._fill_slots()
        if not self._waiting or self._failure is not None:
            self.changed.set()
