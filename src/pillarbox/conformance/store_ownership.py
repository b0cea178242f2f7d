"""Shards of ordered streams: their owners, and the answer to a poll."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from pillarbox.conformance.store_setup import LEASE, LONG, PAST, SHARDS, STREAM, StoreSetup, settle
from pillarbox.errors import LeaseLost
from pillarbox.store import Failure, Settlement, Store


class OwnershipTests(StoreSetup):
    """Taking, renewing and giving back."""

    @pytest.mark.asyncio
    async def test_two_workers_never_share_a_shard(self, store: Store, other: Store) -> None:
        for worker in ("ann", "bob", "eve"):
            await self.join(store, STREAM, worker, LEASE)
        anns = await store.take(STREAM, "ann", 1, LEASE)
        bobs = await other.take(STREAM, "bob", SHARDS, LEASE)
        assert [len(anns), len(bobs)] == [1, SHARDS - 1]
        assert {grant.shard for grant in (*anns, *bobs)} == set(range(SHARDS))
        assert {(grant.stream, grant.worker) for grant in bobs} == {(STREAM, "bob")}
        assert not await store.take(STREAM, "eve", SHARDS, LEASE)

    @pytest.mark.asyncio
    async def test_workers_that_take_at_once_never_share_a_shard(self, store: Store, other: Store) -> None:
        workers = [("ann", store), ("bob", other), ("eve", store), ("joe", other)]
        for worker, connection in workers:
            await self.join(connection, STREAM, worker, LEASE)
        for _ in range(20):
            takes = (connection.take(STREAM, worker, 3, LEASE) for worker, connection in workers)
            grants = [grant for taken in await asyncio.gather(*takes) for grant in taken]
            shards = [grant.shard for grant in grants]
            assert len(shards) == len(set(shards))
            await store.give(grants)

    @pytest.mark.asyncio
    async def test_no_more_is_taken_than_the_limit(self, store: Store) -> None:
        await self.join(store, STREAM, "ann", LEASE)
        assert not await store.take(STREAM, "ann", 0, LEASE)
        assert len(await store.take(STREAM, "ann", 2, LEASE)) == 2
        assert len(await store.take(STREAM, "ann", 1, LEASE)) == 1

    @pytest.mark.asyncio
    async def test_streams_are_owned_apart(self, store: Store) -> None:
        anns = await self.own_all(store)
        await self.own_all(store, "bob", stream="invoices")
        assert list(await store.renew(anns, LEASE)) == anns

    @pytest.mark.asyncio
    async def test_an_expired_lease_is_taken_over_and_counted(self, store: Store, other: Store) -> None:
        ann = await self.own(store)
        assert ann.crashes == 0
        bob = await self.lose(other, ann)
        assert bob.token != ann.token
        assert (bob.worker, bob.crashes, bob.previous) == ("bob", 1, "ann")
        eve = await self.lose(store, bob, "eve")
        assert eve.token not in (ann.token, bob.token)
        assert eve.crashes == 2

    @pytest.mark.asyncio
    async def test_a_lease_that_runs_is_not_taken_over(self, store: Store, other: Store) -> None:
        await self.own(store)
        await self.join(other, STREAM, "bob", LEASE)
        assert not await other.take(STREAM, "bob", SHARDS, LEASE)

    @pytest.mark.asyncio
    async def test_a_shard_that_was_given_back_is_taken_cleanly(self, store: Store, other: Store) -> None:
        granted: set[int] = set()
        for worker, connection in (("ann", store), ("bob", other), ("ann", store)):
            grants = await self.own_all(connection, worker)
            assert {(grant.crashes, grant.previous) for grant in grants} == {(0, None)}
            assert grants[0].token not in granted, "a stale token would fit again"
            granted.add(grants[0].token)
            await connection.give(grants)

    @pytest.mark.asyncio
    async def test_no_token_of_a_lease_is_granted_twice(self, store: Store, other: Store) -> None:
        """Not even in another stream: a store that counts starts each stream at the same number, and counts again what
        a standby had not yet received when it was promoted."""
        granted = []
        for connection, stream in ((store, STREAM), (other, "invoices"), (store, "letters")):
            for _ in range(3):
                grants = await self.own_all(connection, stream=stream)
                granted += [grant.token for grant in grants]
                await connection.give(grants)
        assert len(set(granted)) == len(granted)

    @pytest.mark.asyncio
    async def test_renewing_answers_what_is_still_held(self, store: Store, other: Store) -> None:
        lost, kept, given = (await self.own_all(store))[:3]
        await self.lose(other, lost)
        await store.give([given])
        assert list(await store.renew([lost, kept, given], LEASE)) == [kept]
        assert list(await store.renew([], LEASE)) == []

    @pytest.mark.asyncio
    async def test_renewing_keeps_a_lease_from_running_out(self, store: Store, other: Store) -> None:
        grants = await self.own_all(store, seconds=PAST)
        await store.renew(grants[1:], LEASE)
        await self.join(other, STREAM, "bob", LEASE)
        assert [grant.shard for grant in await other.take(STREAM, "bob", SHARDS, LEASE)] == [0]

    @pytest.mark.asyncio
    async def test_a_stale_renewal_prolongs_nothing(self, store: Store, other: Store) -> None:
        ann = await self.own(store)
        bob = await self.lose(other, ann)
        await other.renew([bob], PAST)
        assert not await store.renew([ann], LEASE)
        await self.join(store, STREAM, "eve", LEASE)
        assert [grant.shard for grant in await store.take(STREAM, "eve", SHARDS, LEASE)] == [0]

    @pytest.mark.asyncio
    async def test_a_stale_owner_gives_nothing_back(self, store: Store, other: Store) -> None:
        ann = await self.own(store)
        bob = await self.lose(other, ann)
        await store.give([ann])
        await self.join(store, STREAM, "eve", LEASE)
        assert not await store.take(STREAM, "eve", SHARDS, LEASE)
        assert list(await other.renew([bob], LEASE)) == [bob]

    @pytest.mark.asyncio
    async def test_the_next_owner_learns_of_the_suspect(self, store: Store, other: Store) -> None:
        ann = await self.own(store)
        assert ann.suspect is None
        (event,) = await self.write(store, ann, self.event())
        await store.note_suspect(ann, event.id)
        bob = await self.lose(other, ann)
        assert (bob.suspect, bob.alone) == (event.id, 0)
        await other.note_suspect(bob, event.id, 2)
        eve = await self.lose(store, bob, "eve")
        assert (eve.suspect, eve.alone) == (event.id, 2)

    @pytest.mark.asyncio
    async def test_a_clean_end_clears_the_suspect(self, store: Store) -> None:
        ann = await self.own(store)
        (event,) = await self.write(store, ann, self.event())
        await store.note_suspect(ann, event.id, 1)
        await store.give([ann])
        (again,) = await store.take(STREAM, "ann", 1, LEASE)
        assert (again.suspect, again.alone) == (None, 0)

    @pytest.mark.asyncio
    async def test_a_clean_stretch_clears_suspect_and_count(self, store: Store) -> None:
        bob = await self.lose(store, await self.own(store))
        assert bob.crashes == 1
        (event,) = await self.write(store, bob, self.event())
        await store.note_suspect(bob, event.id, 1)
        await store.set_crashes(bob, 0)
        eve = await self.lose(store, bob, "eve")
        assert (eve.suspect, eve.alone, eve.crashes) == (None, 0, 1)
        await store.set_crashes(eve, 2)
        assert (await self.lose(store, eve, "dan")).crashes == 3

    @pytest.mark.asyncio
    async def test_an_event_that_ended_is_no_longer_suspected(self, store: Store) -> None:
        bob = await self.lose(store, await self.own(store))
        (event,) = await self.write(store, bob, self.event())
        await store.note_suspect(bob, event.id)
        await store.note_suspect(bob, None)
        eve = await self.lose(store, bob, "eve")
        assert (eve.suspect, eve.crashes) == (None, 2)

    @pytest.mark.asyncio
    async def test_a_stale_owner_suspects_nobody(self, store: Store, other: Store) -> None:
        ann = await self.own(store)
        one, two = await self.write(store, ann, *self.events(2))
        bob = await self.lose(other, ann)
        await other.note_suspect(bob, two.id)
        for event in (one, None):
            with pytest.raises(LeaseLost):
                await store.note_suspect(ann, None if event is None else event.id)
        eve = await self.lose(other, bob, "eve")
        assert (eve.suspect, eve.crashes) == (two.id, 2)


class PollTests(StoreSetup):
    """The answer to a poll."""

    @pytest.mark.asyncio
    async def test_a_poll_counts_the_live_workers(self, store: Store, other: Store) -> None:
        for worker in ("bob", "ann", "eve"):
            await self.join(store, STREAM, worker, LEASE)
        await self.join(store, STREAM, "abe", PAST)
        await self.join(store, "invoices", "al", LEASE)
        ranks = {}
        for worker in ("ann", "bob", "eve"):
            work = await other.poll(STREAM, worker, [])
            assert work.live == 3
            ranks[worker] = work.rank
        assert ranks == {"ann": 0, "bob": 1, "eve": 2}
        await store.leave(STREAM, "ann")
        work = await other.poll(STREAM, "eve", [])
        assert (work.live, work.rank) == (2, 1)
        await self.join(store, STREAM, "bob", PAST)
        work = await other.poll(STREAM, "eve", [])
        assert (work.live, work.rank) == (1, 0)

    @pytest.mark.asyncio
    async def test_a_poll_counts_the_free_shards(self, store: Store) -> None:
        await self.join(store, STREAM, "ann", LEASE)
        assert (await store.poll(STREAM, "ann", [])).free == SHARDS
        grants = await self.own_all(store)
        assert (await store.poll(STREAM, "ann", grants)).free == 0
        await store.renew(grants[:1], PAST)
        await store.give(grants[1:2])
        assert (await store.poll(STREAM, "ann", grants[2:])).free == 2

    @pytest.mark.asyncio
    async def test_a_poll_names_the_shards_with_pending_events(self, store: Store) -> None:
        grants = await self.own_all(store)
        assert (await store.poll(STREAM, "ann", grants)).ready == frozenset()
        events = [self.event(), self.event(shard=2), self.event(shard=3)]
        await store.add([*events, self.event(stream="invoices", shard=1)])
        assert (await store.poll(STREAM, "ann", grants)).ready == {0, 2, 3}
        assert (await store.poll(STREAM, "ann", grants[:2])).ready == {0}
        assert (await store.poll(STREAM, "ann", [])).ready == frozenset()
        assert (await store.poll(STREAM, "ann", None)).ready == {0, 2, 3}
        await self.publish(store, grants[0], *await self.read(store, grants[0]))
        await self.fail_head(store, grants[2], events[1])
        assert (await store.poll(STREAM, "ann", grants)).ready == {3}

    @pytest.mark.asyncio
    async def test_a_poll_names_the_shards_with_due_keys(self, store: Store) -> None:
        grants = await self.own_all(store)
        due, later, blocked = [self.event(shard=shard) for shard in range(3)]
        await store.add([due, later, blocked])
        await self.fail_head(store, grants[0], due)
        await self.fail_head(store, grants[1], later, delay=LONG)
        await self.kill_head(store, grants[2], blocked)
        assert (await store.poll(STREAM, "ann", grants)).due == {0}
        assert (await store.poll(STREAM, "ann", grants[1:])).due == frozenset()
        assert (await store.poll(STREAM, "ann", None)).due == {0}
        assert (await store.poll("invoices", "ann", None)).due == frozenset()

    @pytest.mark.asyncio
    async def test_a_poll_says_when_something_is_to_be_promoted(self, store: Store) -> None:
        grant = await self.own(store)
        await store.add([self.event(available_at=datetime.now(UTC) + timedelta(hours=1))])
        (event,) = await self.write(store, grant, self.event(key=None))
        assert not (await store.poll(STREAM, "ann", [grant])).scheduled
        await settle(store, Settlement(grant, failed=[Failure(event, "refused", 1, PAST)]))
        work = await store.poll(STREAM, "ann", [grant])
        assert work.scheduled
        assert not work.suspects
        assert not (await store.poll("invoices", "ann", [])).scheduled
        await store.reenter_due(STREAM, 10)
        assert not (await store.poll(STREAM, "ann", [grant])).scheduled

    @pytest.mark.asyncio
    async def test_pausing_is_seen_by_the_next_poll(self, store: Store, other: Store) -> None:
        assert not (await other.poll(STREAM, "ann", [])).paused
        await store.pause(STREAM, "olga")
        assert (await other.poll(STREAM, "ann", [])).paused
        assert not (await other.poll("invoices", "ann", [])).paused
        await self.join(store, STREAM, "ann", LEASE)
        assert (await other.poll(STREAM, "ann", [])).paused, "serving a stream does not resume it"
        await store.resume(STREAM, "olga")
        assert not (await other.poll(STREAM, "ann", [])).paused
