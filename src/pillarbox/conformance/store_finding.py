"""Reads for operators: streams, events, dead letters and the audit."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from pillarbox.conformance.store_setup import JOBS, LEASE, LONG, PAST, SHARDS, STREAM, StoreSetup, ids, refs, settle
from pillarbox.event import Event, Status
from pillarbox.store import Failure, Filter, Found, HoldMode, Settlement, Store

_HOUR = timedelta(hours=1)


def found_ids(found: Sequence[Found]) -> list[UUID]:
    return [each.event.id for each in found]


class FindingTests(StoreSetup):
    """A read changes nothing and loads payloads only on request."""

    @pytest.mark.asyncio
    async def test_every_stream_is_told_with_its_states(self, store: Store) -> None:
        assert not await store.streams()
        grant = await self.own(store)
        one, two, dead, _ = await self.write(store, grant, *self.events(4))
        await self.publish(store, grant, one)
        await self.fail_head(store, grant, two, delay=LONG)
        await settle(store, Settlement(grant, dead=[Failure(dead, "refused", 1)]))
        await store.add([self.event(stream="letters", available_at=datetime.now(UTC) + _HOUR)])
        await store.pause("quiet", "olga")
        letters, orders, quiet = await store.streams()
        assert [each.stream for each in (letters, orders, quiet)] == ["letters", STREAM, "quiet"]
        states = (Status.PENDING, Status.PUBLISHED, Status.FAILED, Status.DEAD)
        assert dict(orders.counts) == dict.fromkeys(states, 1)
        assert [[each.name for each in found.workers] for found in (orders, letters, quiet)] == [["ann"], [], []]
        assert (dict(orders.held_keys), dict(quiet.held_keys)) == ({HoldMode.RETRYING: 1}, {})
        assert (orders.paused, quiet.paused) == (False, True)
        assert (orders.published_last_hour, letters.published_last_hour) == (1, 0)
        assert dict(letters.counts) == {Status.SCHEDULED: 1}
        assert not quiet.counts

    @pytest.mark.asyncio
    async def test_a_worker_that_is_gone_is_not_counted(self, store: Store) -> None:
        await self.join(store, STREAM, "ann", LEASE)
        await self.join(store, STREAM, "bob", PAST)
        (stream,) = await store.streams()
        assert [(each.name, each.live) for each in stream.workers] == [("ann", True)]

    @pytest.mark.asyncio
    async def test_a_worker_that_does_not_renew_is_named_until_its_shards_come_free(self, store: Store) -> None:
        await self.own_all(store, "ann")
        await store.join(STREAM, "ann", PAST)
        ((ann,),) = [each.workers for each in await store.streams()]
        assert (ann.name, ann.live, ann.shards) == ("ann", False, SHARDS)
        assert ann.seen_seconds is not None
        assert 0 < ann.free_seconds <= LEASE
        await store.leave(STREAM, "ann")
        ((ann,),) = [each.workers for each in await store.streams()]
        assert (ann.seen_seconds, ann.shards) == (None, SHARDS)

    @pytest.mark.asyncio
    async def test_held_keys_are_counted_by_their_mode(self, store: Store) -> None:
        grant = await self.own(store)
        retrying, blocked, parked, other = await self.write(store, grant, *self.events(4))
        await self.fail_head(store, grant, retrying, delay=LONG)
        await self.kill_head(store, grant, blocked)
        for head in (parked, other):
            await self.kill_head(store, grant, head, mode=HoldMode.PARKED)
        (stream,) = await store.streams()
        assert dict(stream.held_keys) == {HoldMode.RETRYING: 1, HoldMode.BLOCKED: 1, HoldMode.PARKED: 2}

    @pytest.mark.asyncio
    async def test_only_what_waits_has_an_age(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        (stream,) = await store.streams()
        assert stream.oldest_seconds is not None
        assert 0 <= stream.oldest_seconds < 60
        await self.publish(store, grant, event)
        await store.add([self.event(available_at=datetime.now(UTC) + _HOUR)])
        (stream,) = await store.streams()
        assert stream.oldest_seconds is None
        # It waits from its own instant on, not from the instant of writing.
        await store.add([self.event(stream=JOBS, available_at=datetime.now(UTC) - _HOUR)])
        await store.reenter_due(JOBS, 10)
        jobs = next(each for each in await store.streams() if each.stream == JOBS)
        assert jobs.oldest_seconds is not None
        assert 3500 < jobs.oldest_seconds < 3700

    @pytest.mark.asyncio
    async def test_events_are_found_by_what_they_are(self, store: Store) -> None:
        grant = await self.own(store)
        plain, typed, tenant = await self.write(
            store, grant, self.event(), self.event(type="order.paid"), self.event(tenant="acme")
        )
        await store.add([self.event(stream=JOBS, key=None)])
        await self.publish(store, grant, typed)
        await settle(store, Settlement(grant, dead=[Failure(tenant, "refused", 1)]))
        every = [plain.id, typed.id, tenant.id]
        assert found_ids(await store.find(Filter(stream=STREAM), 10)) == sorted(every, reverse=True)
        for where, wanted in (
            (Filter(type="order.paid"), [typed.id]),
            (Filter(tenant="acme"), [tenant.id]),
            (Filter(key=plain.key), [plain.id]),
            (Filter(status=Status.PUBLISHED), [typed.id]),
            (Filter(status=Status.DEAD), [tenant.id]),
            (Filter(status=Status.PENDING, stream=STREAM), [plain.id]),
            (Filter(ids=[typed.id, tenant.id]), sorted([typed.id, tenant.id], reverse=True)),
            (Filter(type="order.paid", tenant="acme"), []),
        ):
            assert found_ids(await store.find(where, 10)) == wanted, where

    @pytest.mark.asyncio
    async def test_events_are_found_by_when_they_were_written(self, store: Store) -> None:
        await store.add([self.event()])
        now = datetime.now(UTC)
        assert len(await store.find(Filter(since=now - _HOUR, until=now + _HOUR), 10)) == 1
        assert not await store.find(Filter(since=now + _HOUR), 10)
        assert not await store.find(Filter(until=now - _HOUR), 10)

    @pytest.mark.asyncio
    async def test_a_list_is_as_long_as_asked_in_the_order_asked(self, store: Store) -> None:
        grant = await self.own(store)
        events = await self.write(store, grant, *self.events(5))
        await settle(store, Settlement(grant, dead=[Failure(event, "refused", 1) for event in events[1:4:2]]))
        assert found_ids(await store.find(Filter(), 3)) == ids(events[:1:-1])
        assert found_ids(await store.find(Filter(), 3, newest_first=False)) == ids(events[:3])

    @pytest.mark.asyncio
    async def test_a_list_has_sizes_and_no_payloads(self, store: Store) -> None:
        grant = await self.own(store)
        live, dead = await self.write(store, grant, *self.events(2, payload=b"\x00secret"))
        await settle(store, Settlement(grant, dead=[Failure(dead, "refused", 1)]))
        listed = [*await store.find(Filter(), 10), *await store.find_dead(Filter(), 10)]
        assert [each.event.payload for each in listed] == [b""] * 3
        assert [each.payload_bytes for each in listed] == [7] * 3
        for event in (live, dead):
            (seen,) = await store.find_by_id(event.id)
            assert (seen.event.payload, seen.payload_bytes) == (b"\x00secret", 7)

    @pytest.mark.asyncio
    async def test_one_event_is_seen_whole(self, store: Store) -> None:
        grant = await self.own(store)
        instant = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
        await store.add([scheduled := self.event(available_at=instant, headers={"a": "b"})])
        failed, published = await self.write(store, grant, *self.events(2))
        await self.fail_head(store, grant, failed, delay=LONG)
        await self.publish(store, grant, published)

        async def find(event: Event) -> Found:
            (seen,) = await store.find_by_id(event.id)
            return seen

        later = await find(scheduled)
        assert (later.event.status, later.event.available_at) == (Status.SCHEDULED, instant)
        assert (later.next_attempt_at, dict(later.event.headers)) == (instant, {"a": "b"})
        broken = await find(failed)
        assert (broken.event.status, broken.event.attempts, broken.last_error) == (Status.FAILED, 1, "refused")
        assert [line["error"] for line in broken.errors] == ["refused"]
        assert broken.last_error_at is not None
        through = await find(published)
        assert through.published_at is not None
        assert through.published_at.tzinfo is not None
        assert (through.event.seq, through.event.stream) == (published.seq, STREAM)
        assert not await store.find_by_id(self.event().id)

    @pytest.mark.asyncio
    async def test_a_leased_event_says_who_has_it(self, store: Store) -> None:
        await store.add(self.events(1, stream=JOBS, key=None))
        (claim,) = await store.claim(JOBS, 0, "ann", 1, LEASE)
        (seen,) = await store.find_by_id(claim.event.id)
        assert (seen.event.status, seen.lease_owner, seen.lease_token) == (Status.PROCESSING, "ann", claim.token)
        assert seen.lease_until is not None
        assert seen.processing_started_at is not None

    @pytest.mark.asyncio
    async def test_dead_letters_are_found_in_order_of_seq(self, store: Store) -> None:
        grant = await self.own(store)
        events = await self.write(store, grant, *self.events(5))
        for event in reversed(events):
            await settle(store, Settlement(grant, dead=[Failure(event, f"refused {event.id}", 1)]))
        assert found_ids(await store.find_dead(Filter(), 10)) == ids(events)
        first = await store.find_dead(Filter(), 2)
        assert found_ids(first) == ids(events[:2])
        assert found_ids(await store.find_dead(Filter(), 2, after=first[-1].event.seq)) == ids(events[2:4])
        assert found_ids(await store.find_dead(Filter(key=events[3].key), 10)) == [events[3].id]
        assert not await store.find_dead(Filter(stream="letters"), 10)
        assert first[0].last_error == f"refused {events[0].id}"
        assert first[0].event.status is Status.DEAD

    @pytest.mark.asyncio
    async def test_a_dead_letter_is_found_by_when_it_died(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        await settle(store, Settlement(grant, dead=[Failure(event, "refused", 1)]))
        (letter,) = await store.find_dead(Filter(), 10)
        died_at = letter.last_error_at
        assert died_at is not None
        assert await store.find_dead(Filter(since=died_at, until=died_at + _HOUR), 10)
        assert not await store.find_dead(Filter(until=died_at), 10)
        assert not await store.find_dead(Filter(since=died_at + _HOUR), 10)

    @pytest.mark.asyncio
    async def test_a_dead_letter_says_whether_its_key_waits_for_it(self, store: Store) -> None:
        grant = await self.own(store)
        other, blocked, *parked = await self.write(
            store, grant, self.event(), self.event(), *self.events(3, key=self.key())
        )
        await settle(store, Settlement(grant, dead=[Failure(other, "refused", 1)]))
        await self.kill_head(store, grant, blocked)
        await self.kill_head(store, grant, *parked, mode=HoldMode.PARKED)

        async def holding() -> list[UUID]:
            return [each.event.id for each in await store.find_dead(Filter(), 10) if each.holds_key]

        assert await holding() == [blocked.id, parked[0].id]
        await store.discard(refs(parked[0]), "olga")
        assert await holding() == [blocked.id]

    @pytest.mark.asyncio
    async def test_what_operators_did_is_told_newest_first(self, store: Store) -> None:
        for by in ("olga", "igor", "ivan"):
            await store.pause(STREAM, by)
        assert [(each.by, each.action) for each in await store.audit(2)] == [("ivan", "pause"), ("igor", "pause")]
        assert (await store.audit(1))[0].at.tzinfo is not None
