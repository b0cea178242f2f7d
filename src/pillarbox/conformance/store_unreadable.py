"""Rows that somebody wrote past the outbox: one that cannot be read never holds its neighbours."""

import pytest

from pillarbox.conformance.store_setup import JOBS, LEASE, MAX_BYTES, STREAM, StoreSetup, ids, refs, settle
from pillarbox.event import Mode, Status
from pillarbox.store import ClaimResults, Failure, Filter, Settlement, Store


class UnreadableTests(StoreSetup):
    """A read ends before such an event, or contains it alone and says why."""

    @pytest.mark.asyncio
    async def test_a_part_ends_before_an_event_that_cannot_be_read(self, store: Store) -> None:
        grant = await self.own(store)
        first, bad, last = await self.write(store, grant, *self.events(3))
        await self.damage(store, bad, "headers")
        (part,) = await store.read([grant], 1000, MAX_BYTES)
        assert (ids(part.events), part.unreadable) == ([first.id], "")
        await self.publish(store, grant, first)
        (part,) = await store.read([grant], 1000, MAX_BYTES)
        assert ids(part.events) == [bad.id]
        assert "headers cannot be read" in part.unreadable
        assert part.events[0].key == bad.key, "the rest of it can be read"
        await settle(store, Settlement(grant, dead=[Failure(part.events[0], part.unreadable, 1)]))
        assert ids(await self.read(store, grant)) == [last.id]
        assert await self.count(store) == {Status.PUBLISHED: 1, Status.DEAD: 1, Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_a_held_event_that_cannot_be_read_is_alone_in_its_run(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        head, bad, last = await self.write(store, grant, *self.events(3, key=key))
        await self.fail_head(store, grant, head, bad, last)
        await self.damage(store, bad, "headers")
        run = await store.read_due(grant, 1000, MAX_BYTES)
        assert run is not None
        assert (ids(run.events), run.unreadable) == ([head.id], "")
        await self.publish(store, grant, *run.events)
        run = await store.read_due(grant, 1000, MAX_BYTES)
        assert run is not None
        assert ids(run.events) == [bad.id]
        assert "headers" in run.unreadable
        await settle(store, Settlement(grant, dead=[Failure(run.events[0], run.unreadable, 1)]))
        assert await self.read_due(store, grant) == (key, [last._replace(status=Status.HELD)])

    @pytest.mark.asyncio
    async def test_a_claim_that_cannot_be_read_says_so_beside_healthy_ones(self, store: Store) -> None:
        await store.announce(JOBS, Mode.QUEUE, "memory")
        good, bad = self.events(2, stream=JOBS)
        await store.add([good, bad])
        await self.damage(store, bad, "headers")
        claims = await store.claim(JOBS, 0, "ann", 10, LEASE)
        reasons = {claim.event.id: claim.unreadable for claim in claims}
        assert reasons.keys() == {good.id, bad.id}
        assert reasons[good.id] == ""
        assert "headers" in reasons[bad.id]
        by_id = {claim.event.id: claim.event for claim in claims}
        results = ClaimResults(published=[by_id[good.id]], dead=[Failure(by_id[bad.id], reasons[bad.id], 1)])
        assert await store.settle_claims(claims, results) == 0
        assert await self.count(store, JOBS) == {Status.PUBLISHED: 1, Status.DEAD: 1}

    @pytest.mark.asyncio
    async def test_an_operator_sees_what_can_be_read_and_what_cannot(self, store: Store) -> None:
        grant = await self.own(store)
        good, bad = await self.write(store, grant, *self.events(2))
        await self.damage(store, bad, "headers")
        listed = {found.event.id: found for found in await store.find(Filter(stream=STREAM), 10)}
        assert listed[good.id].unreadable == ""
        assert "headers" in listed[bad.id].unreadable
        (shown,) = await store.find_by_id(bad.id)
        assert (shown.event.type, shown.event.payload) == (bad.type, bad.payload)
        (part,) = await store.read([grant], 1, MAX_BYTES)
        await self.publish(store, grant, *part.events)
        (part,) = await store.read([grant], 1, MAX_BYTES)
        await settle(store, Settlement(grant, dead=[Failure(part.events[0], part.unreadable, 1)]))
        (dead,) = await store.find_dead(Filter(stream=STREAM), 10)
        (letter,) = await store.dead_letters(STREAM)
        assert (dead.event.id, letter.event.id) == (bad.id, bad.id)
        assert "headers" in dead.unreadable
        assert "headers" in letter.error
        assert await store.discard(refs(bad), "olga") == 1
        assert await self.count(store) == {Status.PUBLISHED: 1}

    @pytest.mark.asyncio
    async def test_the_largest_number_of_attempts_hinders_no_settle(self, store: Store) -> None:
        grant = await self.own(store)
        events = await self.write(store, grant, *self.events(4))
        for event in events:
            await self.damage(store, event, "attempts")
        one, other, failed, dead = await self.read(store, grant)
        await self.publish(store, grant, one)
        failures = [Failure(failed, "no", failed.attempts + 1)]
        await settle(store, Settlement(grant, [other], failures, [Failure(dead, "no", dead.attempts + 1)]))
        states = (Status.FAILED, Status.DEAD)
        assert await self.count(store) == {Status.PUBLISHED: 2, **dict.fromkeys(states, 1)}
