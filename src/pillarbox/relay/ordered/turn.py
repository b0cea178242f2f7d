"""A turn: read, publish and settle on owned shards. Turns of one shard never overlap, so order holds."""

import asyncio
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pillarbox.batch import Batch, Part
from pillarbox.errors import LeaseLost, StoreDown, StoreError
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Result, rejected
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.crash import Calm
from pillarbox.relay.destination import Destination
from pillarbox.relay.ordered.ownership import Shard
from pillarbox.relay.ordered.recovery import Recovery
from pillarbox.relay.plan import plan_key_run, plan_turn, split
from pillarbox.relay.refusal import Refusal
from pillarbox.relay.stream import OnDead
from pillarbox.store import HoldMode, Ordered, Settlement, batch_of, new_ticket

_DUE_SECONDS = 0.1
# From this size on a call works more than it waits. Half of the slots then keep a destination busy, while the other
# half read and settle.
_MANY = 500
_SETTLE_RETRY_SECONDS = (0.05, 1.0)


class Stopping(Exception):
    """The worker stops and the database does not settle: published events could not be settled."""


@dataclass(slots=True)
class _ShardTurn:
    """One shard's share of a turn."""

    shard: Shard
    part: Part  # the events to publish
    held: Sequence[Event] = ()  # the events that wait for their key
    outcomes: Sequence[Outcome] = ()

    @property
    def untried(self) -> bool:
        """Whether nothing was sent, for another reason than an outage."""
        return bool(self.outcomes) and all(outcome == UNTRIED for outcome in self.outcomes)


@dataclass(slots=True)
class Turn:
    """A turn: its shards, and what it has found so far."""

    shards: Sequence[Shard]
    events: int = 0
    read_seconds: float = 0.0
    more: Sequence[Shard] = ()  # shards that may have more to do


class TurnRunner:
    """Runs turns of one ordered stream."""

    def __init__(self, job: Assignment, destination: Destination, calm: Calm) -> None:
        self._store: Ordered = job.store
        self.refusal = Refusal(job.stream.name, job.logger)
        self._calm = calm
        self._stream = job.stream.name
        self._max_bytes = job.stream.batch_bytes
        self._rules = job.rules
        self._report = job.report
        self._destination = destination
        self._recovery = Recovery(job, destination)
        self._calls = asyncio.Semaphore(destination.features.calls)
        # A transaction waits for its commit more than it works, whatever its size.
        large = destination.features.calls if self._recovery.needed else max(1, destination.features.calls // 2)
        self._large_calls = asyncio.Semaphore(large)

    async def run(self, turn: Turn) -> None:
        """Run one turn. Marks the shards that are lost, and those that are full."""
        shards = turn.shards
        begun = time.monotonic()
        limit = 1 if self._destination.breaker.probing else min(shard.limit for shard in shards)
        ready = [shard for shard in shards if await self._recovery.ready(shard)]
        more = {shard for shard in ready if shard.may_be_due(begun) and await self._check_due(shard, limit)}
        # Again: what was due may have failed, and left the progress in doubt.
        ready = [shard for shard in ready if not shard.lost and await self._recovery.ready(shard)]
        if not ready:
            return
        reading = time.monotonic()
        turns = await self._read(ready, limit)
        turn.read_seconds = time.monotonic() - reading
        turn.events = sum(len(each.part.events) + len(each.held) for each in turns)
        if turns:
            self._report.trace("found", "found {count} events in {shards} shards", count=turn.events, shards=len(turns))
            await self._publish(turns)
            await self._settle([(each.shard, self._plan(each)) for each in turns])
            await self._clear_suspects(turns)
        untried = {each.shard for each in turns if each.untried}
        if not untried:
            await self._forget_suspects(shards)
            shards[0].batch.turned(turn.events, time.monotonic() - begun)
        is_full = turn.events >= limit or self._was_cut(turns)
        for shard in shards:
            shard.full = is_full
        more.update(each.shard for each in turns if each.part.unreadable or self._was_refused(each))
        # Untried: the worker stops, or its lease is in doubt. Wait for the next poll.
        turn.more = [s for s in shards if (is_full or s in more) and not (s.lost or s in untried)]

    async def _read(self, shards: Sequence[Shard], limit: int) -> Sequence[_ShardTurn]:
        if not shards:
            return ()
        owned: dict[int | None, Shard] = {shard.grant.shard: shard for shard in shards}
        turns = []
        for part in await self._store.read([shard.grant for shard in shards], limit, self._max_bytes):
            shard = owned[part.shard]
            if part.unreadable:
                turns.append(_ShardTurn(shard, part, outcomes=[rejected(part.unreadable)]))
                continue
            free, held = split(part.events, shard.held_keys)
            turns.append(_ShardTurn(shard, part._replace(events=free) if held else part, held))
        return turns

    def _plan(self, turn: _ShardTurn) -> Settlement:
        rules = self._rules
        if turn.part.unreadable and turn.part.events[0].key in turn.shard.held_keys:
            rules = replace(rules, on_dead=OnDead.SKIP)  # its key waits for an earlier event already
        settlement = plan_turn(turn.shard.grant, turn.part.events, turn.outcomes, turn.held, rules)
        return _with_ticket(settlement, turn)

    def _was_refused(self, turn: _ShardTurn) -> bool:
        """Whether one event of a part kept the others from being published. It is settled, and they can go."""
        return self._recovery.needed and any(
            outcome is not PUBLISHED and outcome.result is not Result.UNTRIED for outcome in turn.outcomes
        )

    def _was_cut(self, turns: Sequence[_ShardTurn]) -> bool:
        """Whether the limit in bytes may have ended the read."""
        size = sum(len(event.payload) for turn in turns for events in (turn.part.events, turn.held) for event in events)
        return size * 2 > self._max_bytes

    async def _check_due(self, shard: Shard, limit: int) -> bool:
        """Work on a held key that is due, if there is one. True: there may be more of it."""
        now = time.monotonic()
        if not shard.asked:
            shard.held_keys, shard.asked = set(await self._store.held_keys(shard.grant)), True
            if not shard.held_keys:
                shard.check_due_at = float("inf")  # until a key is held, or the poll finds one that is due
        if now < shard.check_due_at:
            return False
        due = await self._work_on_due_key(shard, limit)
        # While keys are held a busy shard asks now and then; else the poll tells.
        shard.check_due_at = now if due else now + _DUE_SECONDS if shard.held_keys else float("inf")
        return due

    async def _work_on_due_key(self, shard: Shard, limit: int) -> bool:
        grant = shard.grant
        run = await self._store.read_due(grant, limit, self._max_bytes)
        if run is None:
            return False
        shard.held_keys.add(run.key)
        turn = _ShardTurn(shard, Part(grant.shard, grant.token, run.events if run.mode is HoldMode.RETRYING else ()))
        if run.unreadable and turn.part.events:
            turn.outcomes = [rejected(run.unreadable)]
        await self._publish([turn])
        await self._settle([(shard, _with_ticket(plan_key_run(grant, run, turn.outcomes, self._rules), turn))])
        await self._clear_suspects([turn])
        # An outage leaves the key due: the circuit, not this loop, says when to try again.
        return not any(outcome.is_outage for outcome in turn.outcomes)

    async def _publish(self, turns: Sequence[_ShardTurn]) -> None:
        turns = [turn for turn in turns if turn.part.events and not turn.outcomes]
        if not turns:
            return None
        if sum(len(turn.part.events) for turn in turns) < _MANY:
            async with self._calls:
                return await self._publish_now(turns)
        async with self._large_calls, self._calls:
            return await self._publish_now(turns)

    async def _publish_now(self, turns: Sequence[_ShardTurn]) -> None:
        ready = []
        for turn in turns:
            turn.outcomes = self._refused(turn.shard, turn.part.events)
            if not turn.outcomes and turn.shard.crash_rule.cautious:
                await self._note_suspect(turn)
            if not turn.outcomes and self._recovery.needed and not await self._recovery.fits(turn.shard):
                turn.outcomes = [UNTRIED] * len(turn.part.events)
            if not turn.outcomes:
                ready.append(turn)
        if not ready:
            return
        if self._recovery.needed:
            for turn in ready:
                turn.part = turn.part._replace(ticket=new_ticket(turn.part.events, turn.shard.settled_batch))
                turn.shard.recovered = False  # until it is settled
        outcomes = await self._destination.publish(Batch(self._stream, [turn.part for turn in ready]))
        if self._report.traces:
            confirmed = outcomes.count(PUBLISHED)
            self._report.trace(
                "sent", "sent {count} events, {published} confirmed", count=len(outcomes), published=confirmed
            )
        first = 0
        for turn in ready:
            last = first + len(turn.part.events)
            turn.outcomes = outcomes[first:last]
            first = last

    def _refused(self, shard: Shard, events: Sequence[Event]) -> Sequence[Outcome]:
        """Outcomes of events that must not be published. Empty: publish them."""
        # Either may have happened while this turn waited for its place.
        given_up = self._destination.given_up.is_set() or self.refusal.stands
        if given_up or time.monotonic() > shard.publish_until:
            return [UNTRIED] * len(events)
        return shard.crash_rule.charge(events)

    async def _note_suspect(self, turn: _ShardTurn) -> None:
        shard, events = turn.shard, turn.part.events
        alone = shard.crash_rule.note(events[0].id)
        if alone is not None:
            await _unless_lost(shard, self._store.note_suspect(shard.grant, events[0].id, alone))
        if shard.lost:
            turn.outcomes = [UNTRIED] * len(events)

    async def _clear_suspects(self, turns: Sequence[_ShardTurn]) -> None:
        """Clear the notes of suspects that killed nobody and are not settled.

        It comes after the settle, so that an error here does not prevent the settle of published events."""
        for turn in turns:
            rule = turn.shard.crash_rule
            if not rule.cautious or not turn.outcomes:
                continue
            if turn.part.events[0].id == rule.suspect and not turn.untried:
                rule.forget()
            if rule.suspect is None and turn.outcomes.count(PUBLISHED) != len(turn.outcomes):
                await _unless_lost(turn.shard, self._store.note_suspect(turn.shard.grant, None))

    async def _forget_suspects(self, shards: Sequence[Shard]) -> None:
        """Forget suspects that this turn did not meet: an operator or a held key has moved them."""
        for shard in shards:
            if shard.crash_rule.suspect is not None and not shard.lost:
                shard.crash_rule.forget()
                await _unless_lost(shard, self._store.note_suspect(shard.grant, None))

    async def _settle(self, settlements: Sequence[tuple[Shard, Settlement]]) -> None:
        settlements = [(shard, settlement) for shard, settlement in settlements if settlement]
        if not settlements:
            return
        held = await self._settle_surely([settlement for _, settlement in settlements])
        for shard, settlement in settlements:
            if shard.grant.shard not in held:
                shard.lost = True
                continue
            if self._report.traces:
                self._report.trace(
                    "settled",
                    "settled shard {shard}: {published} published, {failed} failed, {dead} dead, {held} held",
                    shard=shard.grant.shard,
                    published=len(settlement.published),
                    failed=len(settlement.failed),
                    dead=len(settlement.dead),
                    held=len(settlement.held),
                )
            if settlement.ticket:
                shard.settled_batch, shard.recovered = batch_of(settlement.ticket), True
            if settlement.failed or settlement.dead:
                self._report.settled(settlement)
            if settlement.held or settlement.hold_keys or settlement.release_keys:
                named = {event.key for event in settlement.held} | settlement.hold_keys.keys()
                shard.held_keys.difference_update(key for key in named if key is not None)
                shard.held_keys.difference_update(settlement.release_keys)
                shard.held_keys.update(held[shard.grant.shard])
                shard.check_due_at = min(shard.check_due_at, time.monotonic() + _DUE_SECONDS)
            self._calm.passed += len(settlement.published)
            if shard.crash_rule.settled(len(settlement.published)):
                await _unless_lost(shard, self._store.set_crashes(shard.grant, shard.crash_rule.crashes))

    async def _settle_surely(self, settlements: Sequence[Settlement]) -> Mapping[int, Collection[str]]:
        """Settle; try until the database does it, because published events without a settle are published again."""
        wait, longest = _SETTLE_RETRY_SECONDS
        while True:
            try:
                held = await self._store.settle(settlements)
                self.refusal.accepted()
                return held
            except (StoreDown, StoreError) as error:
                if isinstance(error, StoreError):
                    self.refusal.refused(error)
                if self._destination.given_up.is_set():
                    raise Stopping from None
            try:
                await asyncio.wait_for(self._destination.given_up.wait(), wait)
            except TimeoutError:
                wait = min(longest, wait * 2)


def _with_ticket(settlement: Settlement, turn: _ShardTurn) -> Settlement:
    """A settlement that notes the batch that was published, if one was: all its events were, or none."""
    if turn.part.ticket and turn.outcomes.count(PUBLISHED) == len(turn.part.events):
        return replace(settlement, ticket=turn.part.ticket)
    return settlement


async def _unless_lost(shard: Shard, call: Awaitable[None]) -> None:
    try:
        await call
    except LeaseLost:
        shard.lost = True
