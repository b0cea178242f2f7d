"""Turns on shards whose destination keeps their progress: what comes before what."""

from collections.abc import Collection, Mapping, Sequence
from typing import cast
from uuid import UUID

import pytest

from pillarbox.batch import Batch, Part
from pillarbox.conformance.events import make_event
from pillarbox.errors import LeaseLost, Outage
from pillarbox.event import Event
from pillarbox.observe import Observers
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Place, Publisher, PublisherFeatures, outage, rejected
from pillarbox.relay import Fixed, OnDead, Stream
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.crash import Calm, CrashRule
from pillarbox.relay.destination import Destination
from pillarbox.relay.ordered.ownership import Shard
from pillarbox.relay.ordered.turn import Turn, TurnRunner
from pillarbox.relay.pace import BatchSize
from pillarbox.relay.plan import Rules
from pillarbox.relay.subject import stream_named
from pillarbox.store import Grant, KeyRun, Progress, Settlement, Store, batch_of
from pillarbox.store.ticket import Ticket

pytestmark = pytest.mark.asyncio

GRANT = Grant("orders", 1, "ann", 8)


class Log(Publisher):
    """A destination that keeps the last ticket, and a store, in one list of calls."""

    description = "log"
    features = PublisherFeatures(exactly_once=True)
    shards = 16

    def __init__(self, *events: Event) -> None:
        self.events = list(events)
        self.calls: list[str] = []
        self.last = b""
        self.batch: UUID | None = None
        self.answers: list[list[Outcome]] = []
        self.settled: list[Settlement] = []
        self.down = self.owned_by_others = False

    async def recover(self, place: Place) -> bytes:
        assert place == Place("shop", "orders", 1, 16, 8)
        self.calls.append("recover")
        if self.down:
            raise Outage("away")
        return self.last

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        (part,) = batch.parts
        ticket = Ticket.read(part.ticket)
        assert list(ticket.ids) == [event.id for event in batch]
        assert ticket.before == self.batch
        self.calls.append(f"publish {len(batch)}")
        outcomes = self.answers.pop(0) if self.answers else [PUBLISHED] * len(batch)
        if outcomes.count(PUBLISHED) == len(batch):
            self.last = part.ticket
        return outcomes

    async def identity(self) -> str:
        return "shop"

    async def renew(self, grants: Sequence[Grant], seconds: float) -> Collection[Grant]:
        self.calls.append("renew")
        return [] if self.owned_by_others else grants

    async def settle_ticket(self, grant: Grant, ticket: bytes, *, keep_published: bool = True) -> Progress:
        self.calls.append("settle_ticket")
        if self.owned_by_others:
            raise LeaseLost("bob has it")
        if not ticket or batch_of(ticket) == self.batch:
            return Progress(self.batch)
        found = Ticket.read(ticket)
        self.events = [event for event in self.events if event.id not in found.ids]
        self.batch = found.batch
        return Progress(found.batch, len(found.ids))

    async def settled_batch(self, grant: Grant) -> UUID | None:
        if self.owned_by_others:
            raise LeaseLost("bob has it")
        return self.batch

    async def held_keys(self, grant: Grant) -> Collection[str]:
        return ()

    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        self.calls.append("read")
        return [Part(1, 8, tuple(self.events))] if self.events else []

    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        return None

    async def settle(self, settlements: Sequence[Settlement]) -> Mapping[int, Collection[str]]:
        self.calls.append("settle")
        self.settled += settlements
        for each in settlements:
            gone = [*each.published, *(failure.event for failure in each.dead)]
            self.events = [event for event in self.events if event not in gone]
            if each.ticket:
                self.batch = batch_of(each.ticket)
        return {each.grant.shard: set() for each in settlements}


class Turns:
    """Runs turns on one shard."""

    def __init__(self, log: Log, *, publish_until: float = float("inf")) -> None:
        self.log = log
        stream, rules = Stream("orders", log), Rules(Fixed(5.0), 3, OnDead.SKIP)
        job = Assignment(cast(Store, log), stream, log, rules, "ann", 1.0, Observers())
        self.destination = Destination(stream_named("orders"), log, Observers())
        self._runner = TurnRunner(job, self.destination, Calm(0.0))
        self.shard = Shard(GRANT, BatchSize(10), CrashRule(), publish_until)

    async def __call__(self) -> list[str]:
        """The calls of one turn."""
        self.log.calls.clear()
        self.turn = Turn([self.shard])
        await self._runner.run(self.turn)
        return list(self.log.calls)


async def test_the_first_turn_recovers_before_it_reads() -> None:
    turns = Turns(Log(make_event(), make_event()))
    assert await turns() == ["recover", "settle_ticket", "read", "publish 2", "settle"]
    assert turns.log.batch == batch_of(turns.log.last)
    turns.log.events = [make_event()]
    assert await turns() == ["read", "publish 1", "settle"]


async def test_what_was_published_before_is_not_published_again() -> None:
    log = Log(make_event(), make_event())
    before = Turns(log)
    log.answers = [[outage("the answer was lost")] * 2]
    await before()
    sent = log.events[:]
    log.last = b"\1" + bytes(range(16)) + bytes(16) + b"".join(event.id.bytes for event in sent)
    assert await Turns(log)() == ["recover", "settle_ticket", "read"]


@pytest.mark.parametrize("outcome", [outage("away"), UNTRIED, rejected("bad")], ids=["outage", "untried", "rejected"])
async def test_after_anything_but_a_clean_end_the_next_turn_recovers_with_a_lease(outcome: Outcome) -> None:
    turns = Turns(Log(make_event(), make_event()))
    turns.log.answers = [[outcome, UNTRIED if outcome.result == "rejected" else outcome]]
    await turns()
    assert not any(each.ticket for each in turns.log.settled), "nothing was published"
    assert (await turns())[:3] == ["renew", "recover", "settle_ticket"]


async def test_a_refused_event_lets_the_others_go_at_once() -> None:
    turns = Turns(Log(make_event(), make_event()))
    turns.log.answers = [[UNTRIED, rejected("bad")]]
    await turns()
    assert turns.turn.more == [turns.shard]
    assert await turns() == ["renew", "recover", "settle_ticket", "read", "publish 1", "settle"]


async def test_nothing_is_read_while_the_destination_is_down() -> None:
    turns = Turns(Log(make_event()))
    turns.log.down = True
    assert await turns() == ["recover"]
    assert turns.destination.breaker.error == "away"
    assert not turns.log.settled


async def test_an_owner_that_lost_its_shard_ends_nobody_elses_producer() -> None:
    turns = Turns(Log(make_event()), publish_until=0.0)  # it was frozen since it took the shard
    turns.log.owned_by_others = True
    assert await turns() == ["renew"]
    assert turns.shard.lost


async def test_an_owner_that_loses_its_shard_in_a_recovery_reads_nothing() -> None:
    turns = Turns(Log(make_event()))
    turns.log.owned_by_others = True
    assert await turns() == ["recover", "settle_ticket"]
    assert turns.shard.lost


async def test_a_database_that_forgot_the_last_batch_publishes_nothing() -> None:
    turns = Turns(Log(make_event()))
    await turns()
    turns.log.events, turns.log.batch = [make_event(), make_event()], None  # a backup was restored
    assert await turns() == ["read"]
    assert not turns.turn.more
    assert (await turns())[:3] == ["renew", "recover", "settle_ticket"]


async def test_a_shard_that_was_lost_after_its_read_publishes_nothing() -> None:
    turns = Turns(Log(make_event()))
    await turns()
    turns.log.events = [make_event()]
    turns.log.owned_by_others = True
    assert await turns() == ["read"]
    assert turns.shard.lost
