"""The worker of an ordered stream: it polls its shards and runs turns in its slots."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence

from pillarbox.errors import StoreDown
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.crash import Calm
from pillarbox.relay.deadline import Deadline
from pillarbox.relay.destination import Destination
from pillarbox.relay.ordered.ownership import Ownership, Shard
from pillarbox.relay.ordered.turn import Stopping, Turn, TurnRunner
from pillarbox.relay.pace import Pace
from pillarbox.store import Work

# How often to check the share, the pause and the leases while every slot is busy.
_BUSY_POLL_SECONDS = 0.5


class OrderedWorker:
    """Works on one ordered stream."""

    def __init__(self, job: Assignment, destination: Destination) -> None:
        self.changed = asyncio.Event()
        self.pace = Pace(job.stream.poll_seconds, job.stream.poll_limit_seconds)
        self.ownership = Ownership(job)
        self._job = job
        self._destination = destination
        self._slots = job.stream.slots or destination.features.calls
        self._calm = Calm(time.monotonic())
        self._turns = TurnRunner(job, destination, self._calm)
        self._waiting: deque[Shard] = deque()
        self._running: dict[asyncio.Task[None], Turn] = {}
        self._timer: asyncio.TimerHandle | None = None  # of the next look
        self._look_after: set[Shard] = set()  # shards in a turn that began before the store told of new events
        self._resting: dict[int, Shard] = {}
        self._left_behind: set[Shard] = set()
        self._paused = self._stopped = False
        self._failure: BaseException | None = None

    @property
    def refused(self) -> bool:
        return self._turns.refusal.stands

    @property
    def circuit_error(self) -> str | None:
        return self._destination.error

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    async def poll(self) -> Work:
        if self._failure is not None:
            raise self._failure
        self._resting = {shard.grant.shard: shard for shard in self._at_rest()}
        grants = [shard.grant for shard in self._resting.values()]
        return await self._job.store.poll(self._job.stream.name, self._job.worker, grants)

    async def start(self, work: Work) -> bool:
        found = await self.ownership.adjust(work, self._in_turn())
        if found:
            self.pace.hurry()  # this poll did not ask for the shards that were taken
        self._paused = work.paused
        if work.paused:
            self._waiting.clear()
            return found
        in_turn = self._in_turn()
        for number in sorted(work.ready | work.due):
            shard = self._resting.get(number)
            if shard in in_turn:
                self._look_after.add(shard)  # its turn began during the poll, and may have read before it
            elif shard is not None and shard not in self._waiting:
                if number in work.due:
                    shard.check_due_at = 0.0
                self._wait([shard])
                found = True
        self._fill_slots()
        return found

    def look(self) -> bool:
        if self.pace.woken:
            # What they read may be older than the events that the store told of.
            self._look_after.update(self._in_turn())
        wait = self.pace.look_at - time.monotonic()
        if wait > 0:
            self._look_after_seconds(wait)
            return True
        if self._failure is not None or not self._may_look():
            return False
        self.pace.begin_look()
        self._look_at_all()
        return True

    def _look_after_seconds(self, wait: float) -> None:
        """Look when it is time. The loop need not run for that: between two polls it has nothing to decide."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(wait, self._look_in_time)

    def _look_in_time(self) -> None:
        # A poll that began meanwhile looks too.
        if self.pace.look_at < math.inf and not self.look():
            self.changed.set()

    def _may_look(self) -> bool:
        """Whether one turn can ask for the events of all shards that rest."""
        return self._destination.features.joint and not any(each.crash_rule.cautious for each in self._at_rest())

    def _look_at_all(self) -> None:
        if not self._paused and not self._destination.breaker.seconds_left(time.monotonic()):
            self._wait(self._at_rest())
            self._fill_slots()

    def _wait(self, shards: Sequence[Shard]) -> None:
        """Let shards that rest wait for a slot. Their last turn may have been full: that is over."""
        for shard in shards:
            shard.full = False
        self._waiting.extend(shards)

    @property
    def urgent(self) -> bool:
        return any(shard.held_keys for shard in self.ownership.shards.values())

    @property
    def pause_seconds(self) -> float:
        if self._waiting:
            return max(_BUSY_POLL_SECONDS, self._destination.breaker.pause_seconds(time.monotonic()))
        return _BUSY_POLL_SECONDS if len(self._running) >= self._slots else 0.0

    async def renew(self) -> None:
        await self.ownership.renew()

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    async def finish(self, deadline: Deadline) -> None:
        self._waiting.clear()
        running = dict(self._running)
        left = await self._destination.finish(running.keys(), deadline)
        self._left_behind = {shard for task in left for shard in running[task].shards}

    async def release(self) -> None:
        # A call that was left behind may still send: its shard is kept until the lease runs out.
        await self.ownership.give([each for each in self.ownership.shards.values() if each not in self._left_behind])

    def _in_turn(self) -> list[Shard]:
        return [shard for turn in self._running.values() for shard in turn.shards]

    def _at_rest(self) -> list[Shard]:
        busy = {shard.grant.shard for shard in (*self._in_turn(), *self._waiting)}
        return [shard for number, shard in self.ownership.shards.items() if number not in busy]

    def _may_begin(self, shard: Shard) -> bool:
        return self.ownership.owns(shard) and not (shard.leaving or self._paused or self._stopped)

    def _fill_slots(self) -> None:
        self._waiting = deque(shard for shard in self._waiting if self._may_begin(shard))
        while self._waiting and len(self._running) < self._slots and not self.refused:
            shards = self._next()
            if not shards or not self._destination.breaker.allows(time.monotonic()):
                return
            self._waiting = deque(shard for shard in self._waiting if shard not in shards)
            turn = Turn(shards)
            task = asyncio.create_task(self._turns.run(turn), name=f"pillarbox-turn-{shards[0].grant.shard}")
            self._running[task] = turn
            task.add_done_callback(self._turn_ended)

    def _next(self) -> Sequence[Shard]:
        """The shards whose turn begins now. A suspect is published alone, so that a crash has one cause."""
        if any(shard.crash_rule.waits for shard in self._in_turn()):
            return ()
        suspects = {id(shard.crash_rule): shard for shard in self._waiting if shard.crash_rule.waits}
        others = [shard for shard in self._waiting if not shard.crash_rule.waits]
        busy = bool(others or self._running)
        chosen = self._calm.choose([shard.crash_rule for shard in suspects.values()], time.monotonic(), busy=busy)
        if chosen is not None:
            return () if self._running else [suspects[id(chosen)]]
        if self._destination.features.joint and others and others[0].quiet:
            return [shard for shard in others if shard.quiet]
        return others[:1]

    def _turn_ended(self, task: asyncio.Task[None]) -> None:
        turn = self._running.pop(task)
        poll_at, look_at = self.pace.poll_at, self.pace.look_at
        self._destination.breaker.inconclusive()
        for shard in turn.shards:
            if shard.lost:
                self.ownership.drop(shard)
        error = None if task.cancelled() else task.exception()
        told = self._look_after.intersection(turn.shards)
        self._look_after -= told
        if error is None and not task.cancelled():
            self._waiting += [shard for shard in turn.more if self._may_begin(shard)]
            self.pace.looked(time.monotonic(), turn.read_seconds, turn.events, more=bool(told))
        elif not isinstance(error, StoreDown | Stopping | None):
            self._failure = error
        self._fill_slots()
        if error is not None or self._must_poll(turn) or (told and not self._may_look()):
            self.pace.hurry()
        if self.pace.poll_at < poll_at or (self.pace.look_at < look_at and not self.look()):
            self.changed.set()

    def _must_poll(self, turn: Turn) -> bool:
        """Whether the next poll comes at once: to give a shard away, to ask for more where nobody tells and a look
        cannot, or because somebody waits for it."""
        asks = turn.events and not (self._waiting or self.pace.told or self._destination.features.joint)
        return bool(asks) or self.pace.awaited or any(shard.leaving for shard in turn.shards)
