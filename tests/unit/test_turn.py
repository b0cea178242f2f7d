"""A turn on one shard or on several, against a store that does what it is told."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import cast
from uuid import UUID

import pytest

from pillarbox.batch import Batch, Part
from pillarbox.conformance.events import make_event
from pillarbox.errors import LeaseLost, StoreDown
from pillarbox.event import Event
from pillarbox.ids import uuid7
from pillarbox.observe import Observers
from pillarbox.publisher import PUBLISHED, Outcome, Publisher, PublisherFeatures, outage, retry
from pillarbox.relay import Fixed, OnDead, Stream
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.crash import Calm, CrashRule
from pillarbox.relay.destination import Destination
from pillarbox.relay.ordered import turn as turns
from pillarbox.relay.ordered.ownership import Shard
from pillarbox.relay.ordered.turn import Stopping, TurnRunner
from pillarbox.relay.ordered.worker import OrderedWorker
from pillarbox.relay.pace import BatchSize
from pillarbox.relay.plan import Rules
from pillarbox.relay.subject import stream_named
from pillarbox.store import Grant, KeyRun, Settlement, Store

pytestmark = pytest.mark.asyncio

LATER = float("inf")


class Shards:
    """The verbs of a turn, on events in memory."""

    def __init__(self, events: Mapping[int, Sequence[Event]]) -> None:
        self.events = dict(events)
        self.held: dict[int, set[str]] = {}
        self.lost: set[int] = set()
        self.settled: list[Sequence[Settlement]] = []
        self.settles: asyncio.Queue[Sequence[Settlement]] = asyncio.Queue()
        self.calls: list[str] = []
        self.away = 0
        self.was_away = asyncio.Event()

    async def held_keys(self, grant: Grant) -> Collection[str]:
        return self.held.get(grant.shard, ())

    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        self.calls.append(f"read {[grant.shard for grant in grants]} {limit}")
        parts = []
        for grant in grants:
            if events := self.events.get(grant.shard, ())[:limit]:
                parts.append(Part(grant.shard, grant.token, events))
                limit -= len(events)
        return parts

    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        return None

    async def settle(self, settlements: Sequence[Settlement]) -> Mapping[int, Collection[str]]:
        if self.away:
            self.away -= 1
            self.was_away.set()
            raise StoreDown("away")
        self.settled.append(settlements)
        self.settles.put_nowait(settlements)
        mine = [each for each in settlements if each.grant.shard not in self.lost]
        return {each.grant.shard: set(each.hold_keys) for each in mine}

    async def note_suspect(self, grant: Grant, event_id: UUID | None, alone: int = 0) -> None:
        self._fence(grant, f"suspect {event_id and 'noted'}" + f", alone {alone}" * bool(alone))

    async def set_crashes(self, grant: Grant, crashes: int) -> None:
        self._fence(grant, f"crashes {crashes}")

    def _fence(self, grant: Grant, call: str) -> None:
        self.calls.append(call)
        if grant.shard in self.lost:
            raise LeaseLost(f"shard {grant.shard} is lost")


class Answers(Publisher):
    """Notes each batch, and answers by the type of an event."""

    description = "answers"
    features = PublisherFeatures(joint=True)

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.outcomes: dict[str, Outcome] = {}

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        self.batches.append(batch)
        return [self.outcomes.get(event.type, PUBLISHED) for event in batch]


def shard(number: int, crashes: int = 0, suspect: UUID | None = None, alone: int = 0, counts: bool = False) -> Shard:
    rule = CrashRule(crashes, suspect, alone, counts)
    return Shard(Grant("orders", number, "ann", 7 + number), BatchSize(10), rule, LATER)


class Turn:
    """All that a turn needs."""

    def __init__(self, **events: Sequence[Event]) -> None:
        self.store = Shards({int(name.removeprefix("shard_")): batch for name, batch in events.items()})
        self.to = Answers()
        stream, rules = Stream("orders", self.to), Rules(Fixed(5.0), 3, OnDead.SKIP)
        self.job = Assignment(cast(Store, self.store), stream, self.to, rules, "ann", 1.0, Observers())
        self.destination = Destination(stream_named("orders"), self.to, Observers())
        self._turns = TurnRunner(self.job, self.destination, Calm(0.0))

    async def __call__(self, *shards: Shard) -> list[int]:
        turn = turns.Turn(shards)
        await self._turns.run(turn)
        return [shard.grant.shard for shard in turn.more]


async def test_a_turn_on_several_shards_reads_publishes_and_settles_once() -> None:
    one, two = [make_event(key="a"), make_event(key="b")], [make_event(key="c")]
    turn = Turn(shard_1=one, shard_2=two)
    assert await turn(shard(1), shard(2), shard(3)) == []
    assert turn.store.calls == ["read [1, 2, 3] 10"]
    (batch,) = turn.to.batches
    assert batch == (*one, *two)
    assert batch.stream == "orders"
    (settlements,) = turn.store.settled
    assert [(each.grant.shard, list(each.published)) for each in settlements] == [(1, one), (2, two)]


async def test_each_part_keeps_its_token() -> None:
    held, free = make_event(key="held"), make_event(key="free")
    turn = Turn(shard_1=[make_event()], shard_2=[held, free])
    turn.store.held = {2: {"held"}}
    await turn(shard(1), shard(2))
    (batch,) = turn.to.batches
    assert [(part.shard, part.token, part.ticket) for part in batch.parts] == [(1, 8, b""), (2, 9, b"")]
    assert list(batch.parts[1].events) == [free], "an event of a held key is not published"
    assert list(turn.store.settled[0][1].held) == [held]


async def test_the_outcomes_of_a_call_belong_to_their_shards() -> None:
    turn = Turn(
        shard_1=[make_event(key="a"), make_event(key="b", type="bad")], shard_2=[make_event(key="c", type="bad")]
    )
    turn.to.outcomes = {"bad": retry("busy")}
    one, two = shard(1), shard(2)
    await turn(one, two)
    first, second = turn.store.settled[0]
    assert (len(first.published), set(first.hold_keys)) == (1, {"b"})
    assert (len(second.published), set(second.hold_keys)) == (0, {"c"})
    assert (one.held_keys, two.held_keys) == ({"b"}, {"c"})


async def test_only_the_shard_that_is_missing_from_the_answer_is_lost() -> None:
    turn = Turn(shard_1=[make_event() for _ in range(5)], shard_2=[make_event() for _ in range(5)])
    turn.store.lost = {1}
    one, two = shard(1), shard(2)
    assert await turn(one, two) == [2], "it has more to do, perhaps"
    assert (one.lost, two.lost) == (True, False)


async def test_after_a_turn_that_filled_its_limit_each_shard_has_a_turn_of_its_own() -> None:
    turn = Turn(shard_1=[make_event() for _ in range(10)], shard_2=[make_event()])
    one, two = shard(1), shard(2)
    assert await turn(one, two) == [1, 2], "the second was not read"
    assert not one.quiet
    assert not two.quiet
    assert await turn(two) == []
    assert two.quiet


async def test_shards_that_rest_share_a_turn_although_their_last_one_was_full() -> None:
    """A pause or an error can end the turns of a full shard. Else a poll would be made for each of its later looks."""
    turn = Turn(shard_1=[make_event()])
    worker = OrderedWorker(turn.job, turn.destination)
    worker.ownership.shards = {1: shard(1), 2: shard(2)}
    worker.ownership.shards[1].full = True
    worker.pace.wake(0.0)
    assert worker.look()
    await asyncio.wait(worker._running)
    assert turn.store.calls == ["read [1, 2] 10"]


async def settles(turn: Turn, times: int) -> None:
    async with asyncio.timeout(20):
        for _ in range(times):
            await turn.store.settles.get()


async def test_a_worker_looks_again_without_its_loop() -> None:
    """Where nobody tells, every look leads to the next one. The loop would cost as much as a look in vain."""
    turn = Turn(shard_1=[make_event()])
    worker = OrderedWorker(turn.job, turn.destination)
    worker.ownership.shards = {1: shard(1)}
    worker.pace.poll_at = LATER
    worker.pace.wake(0.0)
    assert worker.look()
    await settles(turn, 3)
    assert not worker.changed.is_set()
    worker.stop()
    await asyncio.gather(*worker._running)


async def test_an_event_of_which_the_store_tells_during_a_turn_is_looked_for_after_it() -> None:
    turn = Turn(shard_1=[make_event()])
    worker = OrderedWorker(turn.job, turn.destination)
    worker.ownership.shards = {1: shard(1)}
    worker.pace.poll_at, worker.pace.told = LATER, True
    worker.pace.wake(0.0)
    assert worker.look()
    worker.pace.wake(time.monotonic())
    assert worker.look()
    assert len(worker._running) == 1
    await settles(turn, 2)
    assert not worker.changed.is_set()
    assert len(turn.store.settled) == 2
    await asyncio.gather(*worker._running)
    assert worker.pace.look_at == LATER, "nobody has told of more"


async def test_a_shard_past_its_time_publishes_nothing_and_the_others_do() -> None:
    turn = Turn(shard_1=[make_event()], shard_2=[make_event()])
    late = shard(1)
    late.publish_until = 0.0
    await turn(late, shard(2))
    assert [part.shard for part in turn.to.batches[0].parts] == [2]
    assert [each.grant.shard for each in turn.store.settled[0]] == [2]


async def test_after_the_worker_has_given_up_nothing_is_published() -> None:
    turn = Turn(shard_1=[make_event() for _ in range(10)])
    turn.destination.given_up.set()
    assert await turn(shard(1)) == []
    assert not turn.to.batches
    assert not turn.store.settled


async def test_a_settle_is_tried_until_the_database_answers() -> None:
    turn = Turn(shard_1=[make_event()])
    turn.store.away = 2
    await turn(shard(1))
    assert len(turn.store.settled) == 1
    assert len(turn.to.batches) == 1, "it is not published again"


async def test_a_worker_that_has_given_up_does_not_wait_for_the_database() -> None:
    turn = Turn(shard_1=[make_event()])
    turn.store.away = 1000
    running = asyncio.create_task(turn(shard(1)))
    await turn.store.was_away.wait()
    turn.destination.given_up.set()
    with pytest.raises(Stopping):
        await running


async def test_a_cautious_turn_notes_its_suspect_and_forgets_it_if_it_was_not_published() -> None:
    turn = Turn(shard_1=[make_event(key="a"), make_event(key="b", type="bad")])
    turn.to.outcomes = {"bad": retry("busy")}
    await turn(shard(1, crashes=2))
    assert turn.store.calls == ["read [1] 10", "suspect noted", "suspect None"]


async def test_a_suspect_that_is_settled_needs_no_second_note_and_the_store_learns_of_fewer_crashes() -> None:
    turn = Turn(shard_1=[make_event() for _ in range(5)])
    cautious = shard(1, crashes=1)
    cautious.crash_rule.settled(994)
    await turn(cautious)
    await turn(cautious)
    await turn(cautious)
    first, second, third = (
        ["read [1] 10", "suspect noted"],
        ["read [1] 10", "suspect noted", "crashes 0"],
        ["read [1] 10"],
    )
    assert turn.store.calls == [*first, *second, *third]


async def test_a_charged_suspect_is_not_published_and_later_events_wait() -> None:
    poison, behind = make_event(key="k"), make_event(key="k")
    turn = Turn(shard_1=[poison, behind])
    one = shard(1, crashes=9, suspect=poison.id, alone=3)
    await turn(one)
    assert not turn.to.batches
    (settlement,) = turn.store.settled[0]
    assert [failure.event for failure in settlement.dead] == [poison]
    assert "may have been delivered" in settlement.dead[0].error
    assert turn.store.calls == ["read [1] 1", "suspect None"]


@pytest.mark.parametrize(("counts", "noted"), [(True, 4), (False, 3)])
async def test_a_suspect_that_is_published_alone_is_charged_only_if_a_crash_counts(counts: bool, noted: int) -> None:
    event = make_event()
    turn = Turn(shard_1=[event])
    one = shard(1, crashes=9, suspect=event.id, alone=2, counts=counts)
    await turn(one)
    assert turn.store.calls == ["read [1] 1", f"suspect noted, alone {noted}"]
    assert len(turn.to.batches) == 1
    assert one.crash_rule.suspect is None, "it killed nobody"


async def test_a_suspect_that_was_not_published_stays_one_while_the_worker_stops() -> None:
    event = make_event()
    turn = Turn(shard_1=[event])
    turn.destination.given_up.set()
    one = shard(1, crashes=9, suspect=event.id)
    await turn(one)
    assert one.crash_rule.suspect == event.id


async def test_a_suspect_that_is_not_the_next_event_is_forgotten() -> None:
    turn = Turn(shard_1=[make_event()])
    one = shard(1, crashes=9, suspect=uuid7(), counts=True)
    await turn(one)
    assert turn.store.calls == ["read [1] 1", "suspect None"]
    assert one.crash_rule.suspect is None


async def test_a_shard_that_is_lost_before_its_suspect_is_noted_publishes_nothing() -> None:
    turn = Turn(shard_1=[make_event()])
    turn.store.lost = {1}
    one = shard(1, crashes=1)
    assert await turn(one) == []
    assert one.lost
    assert not turn.to.batches


async def test_an_outage_that_names_a_wait_keeps_the_circuit_open() -> None:
    turn = Turn(shard_1=[make_event(type="a"), make_event(type="b")])
    turn.to.outcomes = {"a": outage("busy"), "b": outage("busy", after_seconds=60.0)}
    await turn(shard(1))
    assert 59 < turn.destination.breaker.seconds_left(time.monotonic()) <= 60
