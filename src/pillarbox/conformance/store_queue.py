"""Queue streams: events that are leased one by one."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from pillarbox.conformance.store_setup import JOBS, LEASE, LONG, PAST, SHARDS, StoreSetup, ids, refs
from pillarbox.event import Event, Status
from pillarbox.store import Claim, ClaimResults, Failure, Rescued, Store


class QueueSetup(StoreSetup):
    """Helpers for a queue's worker."""

    def jobs(self, count: int, **fields: object) -> list[Event]:
        return self.events(count, stream=JOBS, key=None, **fields)

    async def claim(
        self, store: Store, limit: int = 100, *, worker: str = "ann", shard: int = 0, seconds: float = LEASE
    ) -> list[Claim]:
        return list(await store.claim(JOBS, shard, worker, limit, seconds))

    async def one(self, store: Store, *, seconds: float = LEASE, **fields: object) -> Claim:
        """A new event, claimed."""
        await store.add(self.jobs(1, **fields))
        (claim,) = await self.claim(store, seconds=seconds)
        return claim

    async def alone(self, store: Store, *, seconds: float = LEASE) -> Claim:
        """A suspect, claimed."""
        (claim,) = await store.claim(JOBS, None, "ann", 10, seconds)
        return claim

    async def rescue(self, store: Store) -> Rescued:
        return await store.rescue(JOBS, LONG, 100)


class ClaimTests(QueueSetup):
    """Claiming and settling."""

    @pytest.mark.asyncio
    async def test_a_claim_is_charged_and_exclusive(self, store: Store, other: Store) -> None:
        events = self.jobs(3)
        await store.add([*events, *self.jobs(1, shard=1)])
        claims = await self.claim(store, 2)
        assert ids(claim.event for claim in claims) == ids(events[:2])
        assert {(claim.event.status, claim.event.attempts) for claim in claims} == {(Status.PROCESSING, 1)}
        (rest,) = await self.claim(other, worker="bob")
        assert rest.event.id == events[2].id
        assert await self.claim(other, worker="bob") == []
        assert await self.count(store, JOBS) == {Status.PROCESSING: 3, Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_two_claimers_never_share_an_event(self, store: Store, other: Store) -> None:
        events = self.jobs(60)
        await store.add(events)
        claimed: list[UUID] = []

        async def work(connection: Store, worker: str) -> None:
            while claims := await self.claim(connection, 3, worker=worker):
                claimed.extend(claim.event.id for claim in claims)

        workers = [(store, "ann"), (other, "bob"), (store, "eve"), (other, "joe")]
        await asyncio.gather(*(work(*each) for each in workers))
        # A claimer may get nothing while another holds the rest.
        await work(store, "ann")
        assert sorted(claimed) == sorted(ids(events))

    @pytest.mark.asyncio
    async def test_only_what_is_ready_is_claimed(self, store: Store) -> None:
        await store.add(self.jobs(1, available_at=datetime.now(UTC) + timedelta(hours=1)))
        await store.add(self.events(1))
        assert await self.claim(store) == []
        assert not await store.claim(JOBS, None, "ann", 10, LEASE)

    @pytest.mark.asyncio
    async def test_a_claimed_event_has_the_instant_that_it_waited_for(self, store: Store) -> None:
        instant = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=1)
        await store.add(self.jobs(1, available_at=instant))
        await store.reenter_due(JOBS, 10)
        (claim,) = await self.claim(store)
        assert claim.event.available_at == instant

    @pytest.mark.asyncio
    async def test_a_claim_that_is_published_is_through(self, store: Store) -> None:
        claim = await self.one(store)
        assert await store.settle_claims([claim], ClaimResults(published=[claim.event])) == 0
        assert await self.count(store, JOBS) == {Status.PUBLISHED: 1}
        again = await self.one(store)
        assert await store.settle_claims([again], ClaimResults(published=[again.event], keep_published=False)) == 0
        assert await self.count(store, JOBS) == {Status.PUBLISHED: 1}
        assert await self.rescue(store) == Rescued(0, 0)

    @pytest.mark.asyncio
    async def test_a_claim_that_fails_comes_back_after_its_delay(self, store: Store) -> None:
        claim = await self.one(store)
        failed = [Failure(claim.event, "refused", 1, LONG)]
        assert await store.settle_claims([claim], ClaimResults(failed=failed)) == 0
        assert await self.count(store, JOBS) == {Status.FAILED: 1}
        assert await store.reenter_due(JOBS, 10) == 0
        soon = await self.one(store)
        await store.settle_claims([soon], ClaimResults(failed=[Failure(soon.event, "refused", 1, PAST)]))
        assert await self.claim(store) == []
        assert (await store.poll(JOBS, "ann", None)).scheduled
        assert await store.reenter_due(JOBS, 10) == 1
        (again,) = await self.claim(store)
        assert (again.event.id, again.event.attempts) == (soon.event.id, 2)
        assert again.token != soon.token

    @pytest.mark.asyncio
    async def test_a_claim_that_dies_is_a_dead_letter(self, store: Store) -> None:
        claim = await self.one(store)
        assert await store.settle_claims([claim], ClaimResults(dead=[Failure(claim.event, "no", 1)])) == 0
        assert await self.count(store, JOBS) == {Status.DEAD: 1}
        (letter,) = await store.dead_letters(JOBS)
        assert (letter.event.id, letter.event.attempts, letter.error) == (claim.event.id, 1, "no")
        assert [line["error"] for line in letter.errors] == ["no"]

    @pytest.mark.asyncio
    async def test_a_refund_gives_the_attempt_back(self, store: Store) -> None:
        claim = await self.one(store)
        assert await store.settle_claims([claim], ClaimResults(refund=[claim.event])) == 0
        assert await self.count(store, JOBS) == {Status.PENDING: 1}
        (again,) = await self.claim(store)
        assert again.event.attempts == 1
        assert again.token != claim.token

    @pytest.mark.asyncio
    async def test_a_stale_claim_settles_nothing_and_is_counted(self, store: Store, other: Store) -> None:
        stale = await self.one(store, seconds=PAST)
        await self.rescue(other)
        mine = await self.alone(other)
        assert mine.event.id == stale.event.id
        assert mine.token != stale.token
        for results in self._every_end(stale):
            assert await store.settle_claims([stale], results) == 1
            assert await self.count(store, JOBS) == {Status.PROCESSING: 1}, results
        assert list(await other.renew_claims([mine], LEASE)) == [mine.event.id]
        assert await other.settle_claims([mine], ClaimResults(published=[mine.event])) == 0
        assert await self.count(store, JOBS) == {Status.PUBLISHED: 1}

    def _every_end(self, claim: Claim) -> Sequence[ClaimResults]:
        return [
            ClaimResults(published=[claim.event]),
            ClaimResults(published=[claim.event], keep_published=False),
            ClaimResults(failed=[Failure(claim.event, "refused", 1, PAST)]),
            ClaimResults(dead=[Failure(claim.event, "refused", 1)]),
            ClaimResults(refund=[claim.event]),
        ]

    @pytest.mark.asyncio
    async def test_a_settled_claim_is_not_settled_again(self, store: Store) -> None:
        claim = await self.one(store)
        await store.settle_claims([claim], ClaimResults(published=[claim.event]))
        for results in self._every_end(claim):
            assert await store.settle_claims([claim], results) == 1
            assert await self.count(store, JOBS) == {Status.PUBLISHED: 1}, results

    @pytest.mark.asyncio
    async def test_a_stale_claim_does_not_hinder_the_others(self, store: Store) -> None:
        await store.add(self.jobs(2))
        good, bad = await self.claim(store)
        bad = bad._replace(token=bad.token ^ 1)
        both = ClaimResults(published=[good.event, bad.event])
        assert await store.settle_claims([good, bad], both) == 1
        assert await self.count(store, JOBS) == {Status.PUBLISHED: 1, Status.PROCESSING: 1}

    @pytest.mark.asyncio
    async def test_a_token_stays_stale_after_death_and_replay(self, store: Store) -> None:
        stale = await self.one(store)
        await store.settle_claims([stale], ClaimResults(dead=[Failure(stale.event, "refused", 1)]))
        await store.replay(refs(stale.event), "olga")
        (mine,) = await self.claim(store, worker="bob")
        assert mine.token != stale.token
        assert await store.settle_claims([stale], ClaimResults(published=[stale.event])) == 1
        assert not await store.renew_claims([stale], PAST)
        assert await self.count(store, JOBS) == {Status.PROCESSING: 1}

    @pytest.mark.asyncio
    async def test_no_token_of_a_claim_is_granted_twice(self, store: Store) -> None:
        granted = []
        for _ in range(3):
            claim = await self.one(store)
            granted.append(claim.token)
            await store.settle_claims([claim], ClaimResults(refund=[claim.event]))
            (again,) = await self.claim(store)
            granted.append(again.token)
            await store.settle_claims([again], ClaimResults(published=[again.event]))
        assert len(set(granted)) == len(granted), "a claim of another event has the same token: the store counts"

    @pytest.mark.asyncio
    async def test_renewing_claims_answers_what_is_still_held(self, store: Store, other: Store) -> None:
        await store.add(self.jobs(3))
        kept, settled, lost = await self.claim(store)
        await store.settle_claims([settled], ClaimResults(published=[settled.event]))
        await store.renew_claims([lost], PAST)
        await self.rescue(other)
        mine = await self.alone(other)
        assert list(await store.renew_claims([kept, settled, lost], LEASE)) == [kept.event.id]
        assert list(await other.renew_claims([mine], PAST)) == [lost.event.id]
        assert not await store.renew_claims([lost], LEASE)
        assert await self.rescue(other) == Rescued(1, 0), "a stale renewal prolongs nothing"


class RescueTests(QueueSetup):
    """Events of workers that died."""

    @pytest.mark.asyncio
    async def test_what_a_living_worker_holds_is_left_alone(self, store: Store) -> None:
        claim = await self.one(store, seconds=PAST)
        await store.renew_claims([claim], LEASE)
        await self.one(store)
        assert await self.rescue(store) == Rescued(0, 0)
        assert await self.count(store, JOBS) == {Status.PROCESSING: 2}

    @pytest.mark.asyncio
    async def test_what_a_dead_worker_held_is_suspect_and_uncharged(self, store: Store) -> None:
        claim = await self.one(store, seconds=PAST)
        assert not (await store.poll(JOBS, "ann", None)).suspects
        assert await store.rescue("other", LONG, 100) == Rescued(0, 0)
        assert await self.rescue(store) == Rescued(1, 0)
        work = await store.poll(JOBS, "ann", None)
        assert work.suspects
        assert not work.scheduled
        assert await store.reenter_due(JOBS, 10) == 0
        assert await self.claim(store) == [], "a suspect is not worked beside others"
        again = await self.alone(store)
        assert (again.event.id, again.event.attempts) == (claim.event.id, 1)
        assert not (await store.poll(JOBS, "ann", None)).suspects

    @pytest.mark.asyncio
    async def test_suspects_are_claimed_one_at_a_time(self, store: Store, other: Store) -> None:
        await store.add(self.jobs(3))
        lost = await self.claim(store, seconds=PAST)
        assert await store.rescue(JOBS, LONG, 2) == Rescued(2, 0), "no more than the limit"
        assert await self.rescue(store) == Rescued(1, 0)
        claims = [await self.alone(connection) for connection in (store, other, store)]
        assert sorted(ids(claim.event for claim in claims)) == sorted(ids(claim.event for claim in lost))
        assert not await store.claim(JOBS, None, "ann", 10, LEASE)

    @pytest.mark.asyncio
    async def test_three_crashes_while_alone_kill_an_event_and_charge_nothing(self, store: Store) -> None:
        first = await self.one(store, seconds=PAST, max_attempts=1)
        assert await self.rescue(store) == Rescued(1, 0), "it was not alone"
        for result in (Rescued(1, 0), Rescued(1, 0), Rescued(0, 1)):
            assert (await self.alone(store, seconds=PAST)).event.attempts == 1
            assert await self.rescue(store) == result
        assert await self.count(store, JOBS) == {Status.DEAD: 1}
        (letter,) = await store.dead_letters(JOBS)
        assert (letter.event.id, letter.event.attempts) == (first.event.id, 0)
        assert "may have been delivered" in letter.error
        assert [entry["error"] == letter.error for entry in letter.errors] == [False, False, False, True]

    @pytest.mark.asyncio
    async def test_what_is_held_for_too_long_is_taken_though_renewed(self, store: Store) -> None:
        claim = await self.one(store)
        await store.renew_claims([claim], LEASE)
        assert await store.rescue(JOBS, PAST, 100) == Rescued(1, 0)
        assert not await store.renew_claims([claim], LEASE)
        for result in (Rescued(1, 0), Rescued(1, 0), Rescued(0, 1)):
            alone = await self.alone(store)
            await store.renew_claims([alone], LEASE)
            assert await store.rescue(JOBS, PAST, 100) == result
        assert await self.count(store, JOBS) == {Status.DEAD: 1}

    @pytest.mark.asyncio
    async def test_what_was_rescued_is_not_settled_by_its_old_worker(self, store: Store, other: Store) -> None:
        claim = await self.one(store, seconds=PAST)
        await self.rescue(other)
        before = await self.count(store, JOBS)
        assert await store.settle_claims([claim], ClaimResults(published=[claim.event])) == 1
        assert await self.count(store, JOBS) == before

    @pytest.mark.asyncio
    async def test_a_suspect_that_succeeds_is_through(self, store: Store) -> None:
        await self.one(store, seconds=PAST)
        await self.rescue(store)
        alone = await self.alone(store)
        assert await store.settle_claims([alone], ClaimResults(published=[alone.event])) == 0
        assert await self.count(store, JOBS) == {Status.PUBLISHED: 1}
        assert not (await store.poll(JOBS, "ann", None)).suspects

    @pytest.mark.asyncio
    async def test_a_suspect_that_fails_is_a_suspect_no_more(self, store: Store) -> None:
        first = await self.one(store, seconds=PAST)
        await self.rescue(store)
        alone = await self.alone(store)
        await store.settle_claims([alone], ClaimResults(failed=[Failure(alone.event, "refused", 1, PAST)]))
        assert not (await store.poll(JOBS, "ann", None)).suspects
        assert await store.reenter_due(JOBS, 10) == 1
        (again,) = await self.claim(store, seconds=PAST)
        assert (again.event.id, again.event.attempts) == (first.event.id, 2)
        assert await self.rescue(store) == Rescued(1, 0), "the crash was not while alone"

    @pytest.mark.asyncio
    async def test_a_refunded_suspect_is_charged_only_for_a_crash_while_alone(self, store: Store) -> None:
        await self.one(store, seconds=PAST)
        await self.rescue(store)
        alone = await self.alone(store)
        assert await store.settle_claims([alone], ClaimResults(refund=[alone.event])) == 0
        beside_others = await self.claim(store, seconds=PAST)
        if beside_others:
            assert await self.rescue(store) == Rescued(1, 0)
        again = await self.alone(store)
        assert (again.event.id, again.event.attempts) == (alone.event.id, 1)

    @pytest.mark.asyncio
    async def test_a_queue_is_worked_off_whatever_crashes(self, store: Store, other: Store) -> None:
        events = [job for shard in range(SHARDS) for job in self.jobs(5, shard=shard)]
        await store.add(events)
        published: list[UUID] = []

        async def work(connection: Store, worker: str) -> None:
            turn = 0
            while len(published) < len(events):
                shard = turn % (SHARDS + 1)
                claims = await connection.claim(JOBS, None if shard == SHARDS else shard, worker, 2, LEASE)
                if turn < 10:
                    await connection.renew_claims(claims, PAST)
                    await connection.rescue(JOBS, LONG, 100)
                for claim in claims:
                    refused = await connection.settle_claims([claim], ClaimResults(published=[claim.event]))
                    published.extend([] if refused else [claim.event.id])
                turn += 1

        async with asyncio.timeout(60):
            await asyncio.gather(work(store, "ann"), work(other, "bob"))
        assert sorted(published) == sorted(ids(events))
        assert await self.count(store, JOBS) == {Status.PUBLISHED: len(events)}
