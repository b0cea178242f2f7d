"""The contract of a store as tests. Subclass them for a database of your own."""

import asyncio
import random

import pytest

from pillarbox.conformance.store_consumers import ConsumerTests
from pillarbox.conformance.store_finding import FindingTests
from pillarbox.conformance.store_gauges import GaugeTests
from pillarbox.conformance.store_identity import IdentityTests
from pillarbox.conformance.store_keys import HeldKeyTests, InstantTests
from pillarbox.conformance.store_operations import OperatorTests, RetentionTests, SteeringTests
from pillarbox.conformance.store_ownership import OwnershipTests, PollTests
from pillarbox.conformance.store_queue import ClaimTests, RescueTests
from pillarbox.conformance.store_reentry import JointTests, ReentryTests
from pillarbox.conformance.store_replay import ReplayTests
from pillarbox.conformance.store_setup import LEASE, MAX_BYTES, PAST, SHARDS, STREAM, Connect, read, settle
from pillarbox.conformance.store_tickets import OutboxIdentityTests, TicketTests
from pillarbox.conformance.store_turns import ReadTests, SettleTests
from pillarbox.conformance.store_unreadable import UnreadableTests
from pillarbox.conformance.store_writing import SchemaTests, WritingTests
from pillarbox.errors import LeaseLost
from pillarbox.event import Status
from pillarbox.store import Failure, Settlement, Store

_EVENTS = 300
_KEYS = 12


class StoreContract(
    SchemaTests,
    WritingTests,
    OwnershipTests,
    PollTests,
    ReadTests,
    SettleTests,
    HeldKeyTests,
    InstantTests,
    ClaimTests,
    RescueTests,
    RetentionTests,
    SteeringTests,
    OperatorTests,
    FindingTests,
    GaugeTests,
    ReplayTests,
    IdentityTests,
    ReentryTests,
    JointTests,
    UnreadableTests,
    ConsumerTests,
    TicketTests,
    OutboxIdentityTests,
):
    """Subclass it in a test module and give it the fixture ``connect`` and the methods ``set_schema_version`` and
    ``damage``.

    features: those of the store. durable: False where nothing outlives the process. concurrent_writers: False where no
    transaction stays open while others commit. fenced_marks: False where an owner that is losing its shard at this
    moment may still mark events as published. wait_seconds: how long a late row may take to be found.
    Every test has an outbox of its own. Leases run out because they are given a past, never by waiting.
    """

    @pytest.mark.asyncio
    async def test_everything_is_there_after_a_restart(self, store: Store, connect: Connect) -> None:
        if not self.durable:
            pytest.skip("nothing outlives this store")
        ann = await self.own(store)
        pending, published, failed, dead = await self.write(store, ann, *self.events(4))
        await self.fail_head(store, ann, failed)
        await settle(store, Settlement(ann, published=[published], dead=[Failure(dead, "refused", 1)]))
        await store.pause(STREAM, "olga")
        await store.close()
        again = connect()
        await again.open()
        assert not await again.migrate()
        states = (Status.PENDING, Status.PUBLISHED, Status.FAILED, Status.DEAD)
        assert await self.count(again) == dict.fromkeys(states, 1)
        assert set(await again.held_keys(ann)) == {failed.key}
        assert [letter.event.id for letter in await again.dead_letters()] == [dead.id]
        work = await again.poll(STREAM, "ann", [ann])
        assert (work.paused, work.live, work.due) == (True, 1, frozenset({0}))
        await again.resume(STREAM, "olga")
        assert await self.read(again, ann) == [pending], "a worker that only lost its connection is still the owner"
        assert (await self.lose(again, ann)).token != ann.token
        await again.close()

    @pytest.mark.asyncio
    async def test_every_event_is_published_once_and_in_order(self, store: Store, other: Store) -> None:
        self.need_transactions()
        keys = [self.key(shard % SHARDS) for shard in range(_KEYS)]
        for start in range(0, _EVENTS, 50):
            await store.add([self.event(key=keys[place % _KEYS]) for place in range(start, start + 50)])
        settled: dict[str, list[int]] = {key: [] for key in keys}
        lost = 0

        async def work(connection: Store, worker: str) -> None:
            nonlocal lost
            chance = random.Random(worker)
            await self.join(connection, STREAM, worker, LEASE)
            # Not what was settled here: an owner that is told that its shard is lost may have marked its events.
            while await self.count(connection) != {Status.PUBLISHED: _EVENTS}:
                for grant in await connection.take(STREAM, worker, 2, LEASE):
                    events = await read(connection, grant, chance.randint(1, 20), MAX_BYTES)
                    if chance.random() < 0.3:
                        # It hangs for longer than its lease: another worker may be faster, or not.
                        await connection.renew([grant], PAST)
                        await connection.poll(STREAM, worker, None)
                    try:
                        await settle(connection, Settlement(grant, published=events))
                    except LeaseLost:
                        lost += 1
                        continue
                    for event in events:
                        settled[str(event.key)].append(event.seq)
                    await connection.give([grant])

        workers = [(store, "ann"), (other, "bob"), (store, "eve"), (other, "joe")]
        async with asyncio.timeout(60):
            await asyncio.gather(*(work(*each) for each in workers))
        assert await self.count(store) == {Status.PUBLISHED: _EVENTS}
        if self.fenced_marks:
            assert sum(map(len, settled.values())) == _EVENTS, "an event was settled twice"
        for seqs in settled.values():
            assert list(dict.fromkeys(seqs)) == sorted(set(seqs))
