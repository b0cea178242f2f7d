"""The worker of a queue stream: it leases single events, works on several at once and settles them as they end."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

from pillarbox.batch import Batch, Part
from pillarbox.errors import StoreDown, StoreError
from pillarbox.publisher import PUBLISHED, Outcome, rejected
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.crash import Calm
from pillarbox.relay.deadline import Deadline, Step
from pillarbox.relay.destination import Destination
from pillarbox.relay.pace import Pace
from pillarbox.relay.plan import plan_claims
from pillarbox.relay.refusal import Refusal
from pillarbox.store import Claim, Queue, Work

log = logging.getLogger(__name__)

_SETTLE_RETRY_SECONDS = 0.2


class QueueWorker:
    """Works on one queue stream."""

    def __init__(self, job: Assignment, destination: Destination) -> None:
        self.changed = asyncio.Event()
        self.pace = Pace(job.stream.poll_seconds, job.stream.poll_limit_seconds)
        self._job = job
        self._store: Queue = job.store
        self._stream = job.stream
        self._destination = destination
        self._concurrency = destination.features.concurrency or job.stream.concurrency
        self._running: dict[asyncio.Task[Sequence[Outcome]], Claim] = {}
        self._done: list[tuple[Claim, Outcome]] = []
        self._lost: set[asyncio.Task[Sequence[Outcome]]] = set()
        self._suspect: UUID | None = None  # an event that was in a crash runs alone
        self._calm = Calm(time.monotonic())
        self._refusal = Refusal(job.stream.name, job.logger)
        self._stopped = False

    @property
    def refused(self) -> bool:
        return self._refusal.stands

    @property
    def circuit_error(self) -> str | None:
        return self._destination.error

    @property
    def busy(self) -> bool:
        return bool(self._running or self._done)

    async def poll(self) -> Work:
        await self._settle()
        return await self._store.poll(self._stream.name, self._job.worker, None)

    async def start(self, work: Work) -> bool:
        if work.paused or self._suspect is not None:
            return False
        try:
            return await self._claim_ready(work)
        finally:
            if not self._running:
                self._destination.breaker.inconclusive()

    def look(self) -> bool:
        return False  # a claim takes what it finds, so only a poll looks

    @property
    def urgent(self) -> bool:
        return True  # every retry is found by a poll

    @property
    def pause_seconds(self) -> float:
        return self._destination.breaker.pause_seconds(time.monotonic())

    async def renew(self) -> None:
        claims = [*self._running.values(), *(claim for claim, _ in self._done)]
        if not claims:
            return
        held = set(await self._store.renew_claims(claims, self._stream.lease_seconds))
        for task, claim in list(self._running.items()):
            if claim in claims and claim.event.id not in held:
                # It was rescued from us: it must not take a slot, even if it cannot be stopped.
                del self._running[task]
                if self._suspect == claim.event.id:
                    self._suspect = None
                self._lost.add(task)
                task.add_done_callback(self._lost.discard)
                task.cancel()
                self._poll_now()

    def stop(self) -> None:
        self._stopped = True

    async def finish(self, deadline: Deadline) -> None:
        await self._destination.finish(set(self._running), deadline)
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline.left(Step.SETTLE)):
                while self._done:
                    try:
                        await self._settle()
                    except (StoreDown, StoreError):
                        await asyncio.sleep(_SETTLE_RETRY_SECONDS)

    async def release(self) -> None:
        """Nothing to give: claims are settled, or rescued when their leases run out."""

    async def _claim_ready(self, work: Work) -> bool:
        breaker = self._destination.breaker
        busy = bool(self._running or work.ready)
        if work.suspects and self._calm.allows(time.monotonic(), busy=busy):
            # Running events end first. Then one suspect runs alone, so that a crash can be blamed on it.
            return not self._running and breaker.allows(time.monotonic()) and await self._claim(None, 1)
        shards = list(work.ready)
        random.shuffle(shards)
        found = False
        for shard in shards:
            free = self._concurrency - len(self._running)
            if free <= 0 or self._stopped or not breaker.allows(time.monotonic()):
                break
            found |= await self._claim(shard, 1 if breaker.probing else free)
        return found

    async def _claim(self, shard: int | None, limit: int) -> bool:
        stream = self._stream
        claims = await self._store.claim(stream.name, shard, self._job.worker, limit, stream.lease_seconds)
        if claims:
            self._job.report.trace("found", "found {count} events", count=len(claims))
        for claim in claims:
            if claim.unreadable:
                self._done.append((claim, rejected(claim.unreadable)))
                self._poll_now()
                continue
            if shard is None:
                self._suspect = claim.event.id
            batch = Batch(stream.name, [Part(None, claim.token, [claim.event])])
            task = asyncio.create_task(self._destination.publish(batch), name=f"pillarbox-work-{claim.event.id}")
            self._running[task] = claim
            task.add_done_callback(self._worked)
        return bool(claims)

    def _worked(self, task: asyncio.Task[Sequence[Outcome]]) -> None:
        claim = self._running.pop(task, None)
        if claim is None:
            return  # another worker has it now
        if self._suspect == claim.event.id:
            self._suspect = None
        if not task.cancelled():
            outcome = task.result()[0]
            self._done.append((claim, outcome))
            confirmed = int(outcome == PUBLISHED)
            self._job.report.trace("sent", "sent {count} events, {published} confirmed", count=1, published=confirmed)
        self._destination.breaker.inconclusive()
        self._poll_now()

    def _poll_now(self) -> None:
        """Something has ended: it is settled, and others may begin."""
        self.pace.hurry()
        self.changed.set()

    async def _settle(self) -> None:
        """Settle everything that has ended since the last time, in one transaction."""
        done, self._done = self._done, []
        if not done:
            return
        claims = [claim for claim, _ in done]
        results = plan_claims([claim.event for claim in claims], [outcome for _, outcome in done], self._job.rules)
        try:
            refused = await self._store.settle_claims(claims, results)
        except (StoreDown, StoreError) as error:
            self._done = done + self._done
            if isinstance(error, StoreError):
                self._refusal.refused(error)
            raise
        self._refusal.accepted()
        self._calm.passed += len(results.published)
        if self._job.report.traces:
            self._job.report.trace(
                "settled",
                "settled {published} published, {failed} failed, {dead} dead",
                published=len(results.published),
                failed=len(results.failed),
                dead=len(results.dead),
            )
        if refused:
            (self._job.logger or log).warning(
                "stream '%s': %d settled too late: another worker has them now",
                self._stream.name,
                refused,
                extra={"action": "settle_refused", "stream": self._stream.name, "count": refused},
            )
        elif results.failed or results.dead:
            # The store does not say which ones were refused, so that with refused ones nothing is known to be true.
            self._job.report.settled_claims(results)
