"""Reads for operators: streams, events, dead letters and the audit."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from pillarbox.conformance.store_setup import JOBS, LEASE, LONG, STREAM, StoreSetup, ids, refs, settle
from pillarbox.event import Event, Status
from pillarbox.store import Failure, Filter, Found, HoldMode, Settlement, Store

_HOUR = timedelta(hours=1)


def found_ids(found: Sequence[Found]) -> list[UUID]:
    return [each.event.id for each in found]


class FindingTests(StoreSetup):
    """A read changes nothing and loads payloads only on request."""

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
        await store.resume("letters", "olga")
        assert [(each.by, each.action) for each in await store.audit(3)][1:] == [("ivan", "pause"), ("igor", "pause")]
        assert [each.by for each in await store.audit(1, STREAM)] == ["ivan"]
        assert [each.stream for each in await store.audit(9, action="resume")] == ["letters"]
        assert not await store.audit(9, STREAM, "resume")
        assert (await store.audit(1))[0].at.tzinfo is not None
