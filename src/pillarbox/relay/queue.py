"""A worker of a queue stream: it leases single events, works several at once and settles them as they end."""

import asyncio
import logging
import random
import time
from uuid import UUID

from pillarbox.errors import StoreDown
from pillarbox.publisher import Outcome, Publisher, Result, outage
from pillarbox.relay.plan import Rules, plan_claims
from pillarbox.relay.stream import Stream
from pillarbox.relay.worker import StreamWorker
from pillarbox.store import Claim, Store, Work

log = logging.getLogger(__name__)

_SETTLE_RETRY_SECONDS = 0.2


class QueueWorker(StreamWorker):
    """Serves one queue stream."""

    def __init__(
        self, store: Store, stream: Stream, publisher: Publisher, rules: Rules, worker: str, grace_seconds: float
    ) -> None:
        super().__init__(store, stream, publisher, rules, worker, grace_seconds)
        self._running: dict[asyncio.Task[Outcome], Claim] = {}
        self._done: list[tuple[Claim, Outcome]] = []
        self._lost: set[asyncio.Task[Outcome]] = set()
        self._alone: UUID | None = None  # an event that was in a crash has the worker to itself

    @property
    def _busy(self) -> bool:
        return bool(self._running or self._done)

    async def _poll(self) -> Work:
        await self._settle()
        return await self._store.poll(self.stream.name, self._worker, None)

    async def _start(self, work: Work) -> bool:
        if work.paused or self._alone is not None:
            return False
        try:
            return await self._claim_ready(work)
        finally:
            if not self._running:
                self.breaker.untold()

    async def _claim_ready(self, work: Work) -> bool:
        if work.suspects:
            # What runs now ends first; then one suspect runs alone, so that a crash can be laid at its door.
            return not self._running and self.breaker.allows(time.monotonic()) and await self._claim(None, 1)
        shards = list(work.ready)
        random.shuffle(shards)
        found = False
        for shard in shards:
            free = self.stream.concurrency - len(self._running)
            if free <= 0 or self._stop.is_set() or not self.breaker.allows(time.monotonic()):
                break
            found |= await self._claim(shard, 1 if self.breaker.probing else free)
        return found

    async def _claim(self, shard: int | None, limit: int) -> bool:
        claims = await self._store.claim(self.stream.name, shard, self._worker, limit, self.stream.lease_seconds)
        for claim in claims:
            if shard is None:
                self._alone = claim.event.id
            task = asyncio.create_task(self._work(claim), name=f"pillarbox-work-{claim.event.id}")
            self._running[task] = claim
            task.add_done_callback(self._worked)
        return bool(claims)

    async def _work(self, claim: Claim) -> Outcome:
        try:
            return (await self._publisher.publish([claim.event]))[0]
        except Exception as error:
            # Against the contract; the event is not to blame.
            log.exception(
                "stream '%s': the publisher broke its contract and raised", self.stream.name, extra={"action": "bug"}
            )
            return outage(f"the publisher raised {type(error).__name__}")

    def _worked(self, task: asyncio.Task[Outcome]) -> None:
        claim = self._running.pop(task, None)
        if claim is None:
            return  # another worker has it now
        if self._alone == claim.event.id:
            self._alone = None
        if not task.cancelled():
            outcome = task.result()
            self._done.append((claim, outcome))
            if outcome.is_outage:
                self.breaker.failed(time.monotonic(), outcome.error or "")
            elif outcome.result is not Result.UNTRIED:
                self.breaker.succeeded()
        self.breaker.untold()
        self._pace.worked()
        self._changed.set()

    async def _settle(self) -> None:
        """Write down everything that has ended since the last time, in one transaction."""
        done, self._done = self._done, []
        if not done:
            return
        claims = [claim for claim, _ in done]
        settlement, back = plan_claims([claim.event for claim in claims], [outcome for _, outcome in done], self._rules)
        try:
            refused = await self._store.settle_claims(claims, settlement, [event.id for event in back])
        except StoreDown:
            self._done = done + self._done
            raise
        if refused:
            log.warning(
                "stream '%s': %d settled too late: another worker has them now",
                self.stream.name,
                refused,
                extra={"action": "settle_refused", "stream": self.stream.name, "count": refused},
            )

    def _seconds_to_next_poll(self) -> float:
        return max(self._pace.wait(), self.breaker.seconds_left(time.monotonic()))

    async def _renew(self) -> None:
        claims = [*self._running.values(), *(claim for claim, _ in self._done)]
        if not claims:
            return
        held = set(await self._store.renew_claims(claims, self.stream.lease_seconds))
        for task, claim in list(self._running.items()):
            if claim in claims and claim.event.id not in held:
                # Rescued from us: it must not keep a place here, whether or not it can be stopped.
                del self._running[task]
                if self._alone == claim.event.id:
                    self._alone = None
                self._lost.add(task)
                task.add_done_callback(self._lost.discard)
                task.cancel()
                self._changed.set()

    async def _finish(self) -> None:
        await self._end(set(self._running))
        deadline = time.monotonic() + self._grace
        while self._done:
            try:
                await self._settle()
            except StoreDown:
                if time.monotonic() > deadline:
                    return
                await asyncio.sleep(_SETTLE_RETRY_SECONDS)
