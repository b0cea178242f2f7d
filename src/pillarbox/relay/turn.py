"""One turn: read, publish and settle on one shard. Nothing overlaps inside a shard, so order holds by construction."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pillarbox.errors import StoreDown
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Publisher, Result, outage, retry
from pillarbox.relay.breaker import Breaker
from pillarbox.relay.ownership import Shard
from pillarbox.relay.plan import Rules, plan_key_run, plan_turn, split
from pillarbox.store import Aside, Settlement, Store

log = logging.getLogger(__name__)

_DIED = "its worker died while it published this event alone"
_DUE_SECONDS = 0.1
# Calls with so many events work rather than wait: half of them at once keep a destination busy, while the other half
# of the turns read and settle.
_MANY = 500
_SETTLE_RETRY_SECONDS = (0.05, 1.0)


class Stopping(Exception):
    """The worker stops, and the database does not answer: what was published could not be written down."""


@dataclass(slots=True)
class Turns:
    """Runs turns of one ordered stream."""

    store: Store
    publisher: Publisher
    breaker: Breaker
    rules: Rules
    max_bytes: int
    give_up: asyncio.Event  # set when the publisher is closed, and a settle must not be tried any longer
    _calls: asyncio.Semaphore = field(init=False)
    _large_calls: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        calls = self.publisher.features.calls
        self._calls = asyncio.Semaphore(calls)
        self._large_calls = asyncio.Semaphore(max(1, calls // 2))

    async def turn(self, shard: Shard) -> bool:
        """Whether there may be more to do."""
        begun = time.monotonic()
        limit = 1 if self.breaker.probing else shard.limit
        if shard.aside is None:
            shard.aside = set(await self.store.keys_aside(shard.grant))
            if not shard.aside:
                shard.look_for_due_at = float("inf")  # nothing that a time could come for; else the poll tells
        due = False
        if begun >= shard.look_for_due_at:
            due = await self._due_key(shard, limit)
            # While keys are set aside a busy shard asks now and then; else the poll tells.
            shard.look_for_due_at = begun if due else begun + _DUE_SECONDS if shard.aside else float("inf")
        events = await self.store.read(shard.grant, limit, self.max_bytes)
        if not events:
            return due
        free, held = split(events, shard.aside)
        outcomes = await self._publish(shard, free)
        await self._settle(shard, plan_turn(free, outcomes, held, self.rules))
        await self._acquit(shard, outcomes)
        if free and all(outcome == UNTRIED for outcome in outcomes):
            return False  # the worker stops, or its lease is in doubt: nothing more before the next poll
        shard.batch.turned(len(events), time.monotonic() - begun)
        # Less than asked for can also be a batch that its bytes cut off.
        return len(events) >= limit or sum(len(event.payload) for event in events) * 2 > self.max_bytes or due

    async def _due_key(self, shard: Shard, limit: int) -> bool:
        run = await self.store.read_due(shard.grant, limit, self.max_bytes)
        if run is None:
            return False
        self._aside(shard).add(run.key)
        outcomes: Sequence[Outcome] = ()
        if run.mode is Aside.RETRY:
            outcomes = await self._publish(shard, run.events)
        await self._settle(shard, plan_key_run(run, outcomes, self.rules))
        await self._acquit(shard, outcomes)
        # An outage leaves the key due: the circuit, not this loop, says when to try again.
        return not any(outcome.is_outage for outcome in outcomes)

    async def _publish(self, shard: Shard, events: Sequence[Event]) -> Sequence[Outcome]:
        if not events:
            return ()
        if len(events) < _MANY:
            async with self._calls:
                return await self._publish_now(shard, events)
        async with self._large_calls, self._calls:
            return await self._publish_now(shard, events)

    async def _publish_now(self, shard: Shard, events: Sequence[Event]) -> Sequence[Outcome]:
        # Either may have come while this turn waited for its place.
        if self.give_up.is_set() or time.monotonic() > shard.publish_until:
            return [UNTRIED] * len(events)
        if shard.charge is not None and events[0].id == shard.charge:
            shard.charge = None
            return [retry(_DIED), *[UNTRIED] * (len(events) - 1)]
        if shard.caution.deaths:
            await self.store.suspect(shard.grant, events[0])
        try:
            outcomes = await self.publisher.publish(events)
            if len(outcomes) != len(events):
                raise RuntimeError(f"{len(outcomes)} outcomes for {len(events)} events")
        except Exception as error:
            # Against the contract; the events are not to blame, and nobody knows what became of them.
            log.exception(
                "stream '%s': the publisher broke its contract and raised", self.breaker.stream, extra={"action": "bug"}
            )
            outcomes = [outage(f"the publisher raised {type(error).__name__}")] * len(events)
        if outcomes.count(PUBLISHED) == len(events):
            self.breaker.succeeded()
            return outcomes
        down = next((outcome for outcome in outcomes if outcome.is_outage), None)
        if down is not None:
            self.breaker.failed(time.monotonic(), down.error or "")
        elif any(outcome.result is not Result.UNTRIED for outcome in outcomes):
            self.breaker.succeeded()
        return outcomes

    async def _acquit(self, shard: Shard, outcomes: Sequence[Outcome]) -> None:
        """What was noted ended without killing anybody, and is not settled. Only now: an error here must not keep what
        was published beside it from being settled."""
        if shard.caution.deaths and outcomes.count(PUBLISHED) != len(outcomes):
            await self.store.suspect(shard.grant, None)

    @staticmethod
    def _aside(shard: Shard) -> set[str]:
        if shard.aside is None:
            shard.aside = set()
        return shard.aside

    async def _settle(self, shard: Shard, settlement: Settlement) -> None:
        if not settlement:
            return
        named = {event.key for event in settlement.held} | settlement.aside.keys() | set(settlement.release)
        aside = await self._settle_surely(shard, settlement)
        if named:
            known = self._aside(shard)
            known.difference_update(key for key in named if key is not None)
            known.update(aside)
            shard.look_for_due_at = min(shard.look_for_due_at, time.monotonic() + _DUE_SECONDS)
        if shard.caution.settled(len(settlement.published)):
            await self.store.trust(shard.grant, shard.caution.deaths)

    async def _settle_surely(self, shard: Shard, settlement: Settlement) -> set[str]:
        """Tried until the database answers: what was published and not settled will be published again."""
        wait, longest = _SETTLE_RETRY_SECONDS
        while True:
            try:
                return set(await self.store.settle(shard.grant, settlement))
            except StoreDown:
                if self.give_up.is_set():
                    raise Stopping from None
            try:
                await asyncio.wait_for(self.give_up.wait(), wait)
            except TimeoutError:
                wait = min(longest, wait * 2)
