"""Two transactions at once, in a chosen order: the server is asked who waits, nothing is left to chance."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from pillarbox.conformance.probes import probe_of
from pillarbox.conformance.store_setup import (
    JOBS,
    LEASE,
    LONG,
    MAX_BYTES,
    PAST,
    SHARDS,
    STREAM,
    StoreSetup,
    ids,
    refs,
    settle,
)
from pillarbox.errors import LeaseLost
from pillarbox.event import Event, Status
from pillarbox.store import ClaimResults, Failure, Grant, Hold, HoldMode, Rescued, Settlement
from pillarbox.stores.sql import SqlStore
from pillarbox.uuids import uuid_of

T = TypeVar("T")
_numbers = itertools.count(1)


class Interleavings(StoreSetup):
    """What every database with several writers must get right; a subclass says how it locks and who waits."""

    @pytest.fixture
    def prefix(self) -> str:
        return f"lane{os.getpid()}x{next(_numbers)}"

    @pytest_asyncio.fixture
    async def ann(self, store: SqlStore) -> SqlStore:
        return store

    @pytest_asyncio.fixture
    async def bob(self, other: SqlStore) -> SqlStore:
        return other

    @asynccontextmanager
    async def holding(self, store: SqlStore, lock: str, **values: Any) -> AsyncIterator[Any]:
        """A transaction that holds what the statement locks until the block ends."""
        async with store.transaction() as tx:
            await tx.fetch(store.statements.make(lock), **values)
            yield tx

    def holding_event(self, store: SqlStore, event: Event) -> Any:
        return self.holding(store, "SELECT 1 FROM {event} WHERE id = :id FOR UPDATE", id=event.id)

    def holding_audit(self, store: SqlStore) -> Any:
        """Nobody else writes an audit row until the block ends."""
        raise NotImplementedError

    async def _waiting(self, store: SqlStore) -> int:
        """How many statements of this outbox wait for a lock."""
        raise NotImplementedError

    def without_second_tries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let every conflict of two transactions be an error, also where the store would try again."""

    async def blocked(self, store: SqlStore, what: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Started, and as far as it comes before it waits for another transaction."""
        before = await self._waiting(store)
        task = asyncio.create_task(what)
        async with asyncio.timeout(20):
            while await self._waiting(store) == before:
                assert not task.done(), f"it did not wait: {task}"
        return task

    async def _assert_no_orphan(self, store: SqlStore) -> None:
        """A failed or held event whose key has no row would wait for ever."""
        text = """SELECT e.id FROM {event} AS e WHERE e.key IS NOT NULL AND e.status IN ('failed', 'held')
            AND NOT EXISTS (SELECT 1 FROM {held_key} AS h
                WHERE h.stream = e.stream AND h.shard = e.shard AND h.key = e.key)"""
        assert await probe_of(store).query(text) == []

    async def _begin_take(self, tx: Any, store: SqlStore, grant: Grant, worker: str) -> None:
        shards = [row[0] for row in await tx.fetch(store.statements["takeable"], stream=STREAM, limit=SHARDS)]
        assert shards == [grant.shard]
        await tx.execute(store.statements["take"], stream=STREAM, worker=worker, token=7, seconds=LEASE, shards=shards)

    @pytest.mark.asyncio
    async def test_a_take_over_waits_for_a_settle_that_has_begun(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        (event,) = await self.write(ann, grant, self.event())
        await ann.renew([grant], PAST)
        await self.join(bob, STREAM, "bob", LEASE)
        async with self.holding_event(bob, event):
            settling = await self.blocked(bob, settle(ann, Settlement(grant, published=[event])))
            assert not await bob.take(STREAM, "bob", SHARDS, LEASE)
        await settling
        (taken,) = await bob.take(STREAM, "bob", SHARDS, LEASE)
        assert await self.read(bob, taken) == []
        assert await self.count(ann) == {Status.PUBLISHED: 1}

    @pytest.mark.asyncio
    async def test_a_take_over_waits_for_a_failure_that_is_being_settled(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        (event,) = await self.write(ann, grant, self.event())
        await ann.renew([grant], PAST)
        await self.join(bob, STREAM, "bob", LEASE)
        async with self.holding_event(bob, event):
            settling = await self.blocked(bob, self.fail_head(ann, grant, event))
            assert not await bob.take(STREAM, "bob", SHARDS, LEASE)
        await settling
        (taken,) = await bob.take(STREAM, "bob", SHARDS, LEASE)
        assert set(await bob.held_keys(taken)) == {event.key}

    @pytest.mark.asyncio
    async def test_a_settle_that_comes_after_a_take_over_is_refused(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        one, two = await self.write(ann, grant, *self.events(2))
        assert one.key is not None
        await ann.renew([grant], PAST)
        async with bob.transaction() as tx:
            await self._begin_take(tx, bob, grant, "bob")
            held = {one.key: Hold(HoldMode.RETRYING, PAST)}
            stale = [
                await self.blocked(bob, settle(ann, settlement))
                for settlement in (
                    Settlement(grant, published=[one]),
                    Settlement(grant, published=[two], keep_published=False),
                    Settlement(grant, failed=[Failure(one, "refused", 1)], hold_keys=held),
                    Settlement(grant, dead=[Failure(two, "refused", 1)]),
                )
            ]
        for task in stale:
            with pytest.raises(LeaseLost):
                await task
        assert await self.count(ann) == {Status.PENDING: 2}

    @pytest.mark.asyncio
    @pytest.mark.parametrize("keep", [True, False])
    async def test_a_take_over_passes_over_what_is_being_settled_together(
        self, ann: SqlStore, bob: SqlStore, keep: bool
    ) -> None:
        grants = (await self.own_all(ann))[:3]
        await ann.add([self.event(shard=shard) for shard in range(3)])
        parts = await ann.read(grants, 10, MAX_BYTES)
        await ann.renew(grants, PAST)
        await self.join(bob, STREAM, "bob", LEASE)
        settlements = [
            Settlement(grant, published=part.events, keep_published=keep)
            for grant, part in zip(grants[:2], parts, strict=False)
        ]
        async with self.holding_event(bob, parts[1].events[0]):
            settling = await self.blocked(bob, ann.settle(settlements))
            assert [taken.shard for taken in await bob.take(STREAM, "bob", SHARDS, LEASE)] == [2]
        assert set(await settling) == {0, 1}
        assert {taken.shard for taken in await bob.take(STREAM, "bob", SHARDS, LEASE)} == {0, 1}
        assert await self.count(ann) == {Status.PENDING: 1} | ({Status.PUBLISHED: 2} if keep else {})

    @pytest.mark.asyncio
    @pytest.mark.parametrize("keep", [True, False])
    async def test_a_joint_settle_that_comes_after_a_take_over_is_refused_there(
        self, ann: SqlStore, bob: SqlStore, keep: bool
    ) -> None:
        grants = (await self.own_all(ann))[:3]
        await ann.add([self.event(shard=shard) for shard in range(3)])
        parts = await ann.read(grants, 10, MAX_BYTES)
        await ann.renew(grants[1:2], PAST)
        settlements = [
            Settlement(grant, published=part.events, keep_published=keep)
            for grant, part in zip(grants, parts, strict=True)
        ]
        async with bob.transaction() as tx:
            await self._begin_take(tx, bob, grants[1], "bob")
            settling = await self.blocked(bob, ann.settle(settlements))
        assert set(await settling) == {0, 2}
        assert await self.count(ann) == {Status.PENDING: 1} | ({Status.PUBLISHED: 2} if keep else {})

    @pytest.mark.asyncio
    async def test_joint_settles_renewals_and_take_overs_do_not_deadlock(
        self, ann: SqlStore, bob: SqlStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.without_second_tries(monkeypatch)
        await self.join(ann, STREAM, "ann", LEASE)
        settled = 0

        async def serve(store: SqlStore, worker: str, keep: bool) -> None:
            nonlocal settled
            for _ in range(15):
                await store.add([self.event(shard=shard) for shard in range(SHARDS)])
                # The leases run out at once: all that follows happens while others take these shards.
                grants = await store.take(STREAM, worker, SHARDS, PAST)
                found = {part.shard: part.events for part in await store.read(grants, 100, MAX_BYTES)}
                turn = [
                    Settlement(grant, published=found[grant.shard], keep_published=keep)
                    for grant in grants
                    if grant.shard in found
                ]
                done = await asyncio.gather(
                    store.settle(turn), store.settle(turn[::-1]), store.renew(grants, PAST), store.give(grants[:1])
                )
                settled += len(done[0])

        await asyncio.gather(
            *(serve(store, f"{name}{n}", n == 1) for store, name in ((ann, "ann"), (bob, "bob")) for n in range(3))
        )
        assert settled

    @pytest.mark.asyncio
    async def test_a_renewal_that_comes_after_a_take_over_is_refused(self, ann: SqlStore, bob: SqlStore) -> None:
        grants = await self.own_all(ann)
        await ann.renew(grants[:1], PAST)
        async with bob.transaction() as tx:
            await self._begin_take(tx, bob, grants[0], "bob")
            renewal = await self.blocked(bob, ann.renew(grants, LEASE))
        assert list(await renewal) == grants[1:]

    @pytest.mark.asyncio
    async def test_a_renewal_waits_for_a_settle_and_holds(self, ann: SqlStore, bob: SqlStore) -> None:
        grants = await self.own_all(ann)
        (event,) = await self.write(ann, grants[0], self.event())
        async with self.holding_event(bob, event):
            settling = await self.blocked(bob, settle(ann, Settlement(grants[0], published=[event])))
            renewal = await self.blocked(bob, ann.renew(grants, LEASE))
        await settling
        assert list(await renewal) == grants

    @pytest.mark.asyncio
    async def test_a_stale_reader_learns_nothing_new(self, ann: SqlStore, bob: SqlStore) -> None:
        stale = await self.own(ann)
        key = self.key()
        one, two = await self.write(ann, stale, *self.events(2, key=key))
        grant = await self.lose(bob, stale)
        await self.fail_head(bob, grant, one, delay=LONG)
        assert await self.read(ann, stale) == [], "it would publish the second though the first has failed"
        with pytest.raises(LeaseLost):
            await self.publish(ann, stale, one, two)
        assert await self.count(bob) == {Status.FAILED: 1, Status.PENDING: 1}

    async def _begin_claim(self, tx: Any, store: SqlStore, limit: int) -> list[Any]:
        rows = await tx.fetch(store.statements["ready"], stream=JOBS, shard=0, limit=limit)
        found = [row[0] for row in rows]
        await tx.execute(store.statements["claim"], stream=JOBS, ids=found, worker="ann", token=7, seconds=LEASE)
        return [uuid_of(each) for each in found]

    @pytest.mark.asyncio
    async def test_two_claimers_pass_each_other(self, ann: SqlStore, bob: SqlStore) -> None:
        events = self.events(5, stream=JOBS, key=None)
        await ann.add(events)
        async with ann.transaction() as tx:
            anns = await self._begin_claim(tx, ann, 3)
            bobs = await bob.claim(JOBS, 0, "bob", 10, LEASE)
            assert sorted(anns) == sorted(ids(events[:3]))
            assert ids(claim.event for claim in bobs) == ids(events[3:])
        assert await self.count(ann, JOBS) == {Status.PROCESSING: 5}

    @pytest.mark.asyncio
    async def test_a_rescue_passes_over_what_is_being_settled(self, ann: SqlStore, bob: SqlStore) -> None:
        await ann.add(self.events(1, stream=JOBS, key=None))
        (claim,) = await ann.claim(JOBS, 0, "ann", 1, PAST)
        async with ann.transaction() as tx:
            await tx.fetch(ann.statements["lock_claims"], stream=JOBS, ids=[claim.event.id])
            assert await bob.rescue(JOBS, LONG, 10) == Rescued(0, 0)
            settling = await self.blocked(bob, ann.settle_claims([claim], ClaimResults(published=[claim.event])))
        assert await settling == 0
        assert await bob.rescue(JOBS, LONG, 10) == Rescued(0, 0)
        assert await self.count(ann, JOBS) == {Status.PUBLISHED: 1}

    @pytest.mark.asyncio
    async def test_a_settle_of_what_is_being_rescued_is_refused(self, ann: SqlStore, bob: SqlStore) -> None:
        await ann.add(self.events(1, stream=JOBS, key=None))
        (claim,) = await ann.claim(JOBS, 0, "ann", 1, PAST)
        async with bob.transaction() as tx:
            await tx.fetch(bob.statements["stuck"], stream=JOBS, stuck=LONG, limit=10)
            row = {"id": claim.event.id, "stream": JOBS, "attempts": 0, "error": "crashed", "line": "{}"}
            await tx.execute(bob.statements["fail"], **row, delay=0.0, suspect=True)
            settling = await self.blocked(bob, ann.settle_claims([claim], ClaimResults(published=[claim.event])))
        assert await settling == 1
        assert await self.count(ann, JOBS) == {Status.FAILED: 1}

    @pytest.mark.asyncio
    async def test_a_prune_spares_what_was_made_pending_meanwhile(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        one, two = await self.write(ann, grant, *self.events(2))
        await self.publish(ann, grant, one, two)
        again = "UPDATE {event} SET status = 'pending', published_at = NULL WHERE id = :id"
        async with self.holding(bob, again, id=one.id):
            prune = await self.blocked(bob, ann.prune_published(PAST, 100))
        assert (await prune).deleted == 1
        assert ids(await self.read_soon(ann, grant, 1)) == [one.id]

    @pytest.mark.asyncio
    async def test_a_prune_and_a_settle_pass_each_other(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        one, two = await self.write(ann, grant, *self.events(2))
        await self.publish(ann, grant, one)
        async with self.holding_event(bob, two):
            settling = await self.blocked(bob, self.publish(ann, grant, two))
            assert (await bob.prune_published(PAST, 100)).deleted == 1
        await settling
        assert await self.count(ann) == {Status.PUBLISHED: 1}

    @pytest.mark.asyncio
    async def test_a_letter_that_is_being_replayed_is_not_pruned(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        (event,) = await self.write(ann, grant, self.event())
        await settle(ann, Settlement(grant, dead=[Failure(event, "refused", 1)]))
        async with self.holding_audit(bob):
            replay = await self.blocked(bob, ann.replay(refs(event), "olga"))
            prune = await self.blocked(bob, ann.prune_dead(PAST, 10))
        assert (await replay, await prune) == (1, 0)
        assert await self.count(ann) == {Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_a_letter_that_is_being_pruned_is_not_replayed(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        (event,) = await self.write(ann, grant, self.event())
        await settle(ann, Settlement(grant, dead=[Failure(event, "refused", 1)]))
        async with bob.transaction() as tx:
            assert await tx.execute(bob.statements["prune_dead"], keep=PAST, limit=10) == 1
            replay = await self.blocked(bob, ann.replay(refs(event), "olga"))
        assert await replay == 0
        assert await self.count(ann) == {}

    @pytest.mark.asyncio
    async def test_two_operators_replay_a_letter_once(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        (event,) = await self.write(ann, grant, self.event())
        await self.kill_head(ann, grant, event)
        async with self.holding_audit(bob):
            first = await self.blocked(bob, ann.replay(refs(event), "olga"))
            second = await self.blocked(bob, bob.discard(refs(event), "igor"))
        assert (await first, await second) == (1, 0)
        assert await self.count(ann) == {Status.FAILED: 1}
        await self._assert_no_orphan(ann)

    async def _dead_and_waiting(self, store: SqlStore) -> tuple[Grant, str, Event, Event]:
        """The first of a key is dead and was skipped; the second has failed and is due."""
        grant = await self.own(store)
        key = self.key()
        dead, last = await self.write(store, grant, *self.events(2, key=key))
        await settle(store, Settlement(grant, dead=[Failure(dead, "refused", 1)]))
        await self.fail_head(store, grant, last)
        return grant, key, dead, last

    @pytest.mark.asyncio
    async def test_a_key_is_not_released_while_an_operator_replays(self, ann: SqlStore, bob: SqlStore) -> None:
        grant, key, dead, last = await self._dead_and_waiting(ann)
        async with self.holding_audit(bob):
            replay = await self.blocked(bob, bob.replay(refs(dead), "olga"))
            settling = await self.blocked(bob, settle(ann, Settlement(grant, published=[last], release_keys=[key])))
        assert await replay == 1
        assert set(await settling) == {key}
        await self._assert_no_orphan(ann)
        run = await self.read_due(ann, grant)
        assert run is not None
        assert ids(run[1]) == [dead.id]

    @pytest.mark.asyncio
    async def test_a_replay_finds_the_key_that_is_being_released(self, ann: SqlStore, bob: SqlStore) -> None:
        grant, key, dead, last = await self._dead_and_waiting(ann)
        async with self.holding_event(bob, last):
            settling = await self.blocked(bob, settle(ann, Settlement(grant, published=[last], release_keys=[key])))
            replay = await self.blocked(bob, bob.replay(refs(dead), "olga"))
        assert not await settling
        assert await replay == 1
        await self._assert_no_orphan(ann)
        assert ids(await self.read_soon(ann, grant, 1)) == [dead.id]

    @pytest.mark.asyncio
    async def test_a_key_that_dies_while_an_operator_replays_stays_blocked(self, ann: SqlStore, bob: SqlStore) -> None:
        grant, key, dead, last = await self._dead_and_waiting(ann)
        blocks = Settlement(
            grant, dead=[Failure(last, "refused", 2)], hold_keys={key: Hold(HoldMode.BLOCKED, None, last.id)}
        )
        async with self.holding_audit(bob):
            replay = await self.blocked(bob, bob.replay(refs(dead), "olga"))
            settling = await self.blocked(bob, settle(ann, blocks))
        assert await replay == 1
        assert set(await settling) == {key}
        await self._assert_no_orphan(ann)
        assert [letter.event.id for letter in await ann.dead_letters(STREAM)] == [last.id]
        # Both are the operator's again: acting on the letter lets the key go on, from the replayed event.
        await ann.discard(refs(last), "olga")
        run = await self.read_due(ann, grant)
        assert run is not None
        assert ids(run[1]) == [dead.id]

    @pytest.mark.asyncio
    async def test_a_new_owner_finds_what_is_being_replayed(self, ann: SqlStore, bob: SqlStore) -> None:
        stale = await self.own(ann)
        key = self.key()
        head, behind = await self.write(ann, stale, *self.events(2, key=key))
        await self.kill_head(ann, stale, head, behind)
        async with self.holding_audit(bob):
            replay = await self.blocked(bob, ann.replay(refs(head), "olga"))
            grant = await self.lose(bob, stale)
            assert await self.read_due(bob, grant) is None
        assert await replay == 1
        assert (await bob.poll(STREAM, "bob", [grant])).due == {0}
        run = await self.read_due(bob, grant)
        assert run is not None
        assert ids(run[1]) == ids([head, behind])

    @pytest.mark.asyncio
    async def test_a_late_commit_takes_its_place_in_a_held_key(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        key = self.key()
        late = self.event(key=key)
        async with bob.transaction() as tx:
            await bob.add([late], tx)
            (early,) = await self.write(ann, grant, self.event(key=key))
            await self.fail_head(ann, grant, early)
        (found,) = await self.read_soon(ann, grant, 1)
        assert set(await settle(ann, Settlement(grant, held=[found]))) == {key}
        run = await self.read_due(ann, grant)
        assert run is not None
        assert ids(run[1]) == [late.id, early.id]
        assert not await settle(ann, Settlement(grant, published=run[1], release_keys=[key]))

    @pytest.mark.asyncio
    async def test_a_late_commit_waits_for_the_settle_that_releases_its_key(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        key = self.key()
        (head,) = await self.write(ann, grant, self.event(key=key))
        await self.fail_head(ann, grant, head)
        late = self.event(key=key)
        async with bob.transaction() as tx:
            await bob.add([late], tx)
            assert not await settle(ann, Settlement(grant, published=[head], release_keys=[key]))
        assert ids(await self.read_soon(ann, grant, 1)) == [late.id]
