"""Held keys, and events that wait for an instant."""

from datetime import UTC, datetime, timedelta

import pytest

from pillarbox.conformance.store_setup import LONG, MAX_BYTES, PAST, STREAM, StoreSetup, ids, settle
from pillarbox.event import Event, Status
from pillarbox.store import Failure, Grant, Hold, HoldMode, Settlement, Store


class HeldKeyTests(StoreSetup):
    """A held key comes back in order, and only when it may."""

    async def _waiting(self, store: Store, count: int = 3, **fields: str) -> tuple[Grant, str, list[Event]]:
        """A key whose head failed and is due, with the rest of it held."""
        grant = await self.own(store)
        key = self.key()
        events = await self.write(store, grant, *self.events(count, key=key, **fields))
        await self.fail_head(store, grant, *events)
        return grant, key, events

    @pytest.mark.asyncio
    async def test_held_keys_belong_to_their_shard(self, store: Store) -> None:
        grants = await self.own_all(store)
        here, there = self.event(), self.event(shard=1)
        await store.add([here, there])
        await self.fail_head(store, grants[0], here)
        await self.fail_head(store, grants[1], there)
        assert [set(await store.held_keys(grant)) for grant in grants[:3]] == [{here.key}, {there.key}, set()]

    @pytest.mark.asyncio
    async def test_a_due_key_is_read_from_its_head_on(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        head, second, third, fourth = await self.write(store, grant, *self.events(4, key=key))
        await self.fail_head(store, grant, head, third)
        await settle(store, Settlement(grant, held=[second]))
        assert await self.read_due(store, grant) == (
            key,
            [
                head._replace(status=Status.FAILED, attempts=1),
                second._replace(status=Status.HELD),
                third._replace(status=Status.HELD),
            ],
        )
        assert ids(await self.read(store, grant)) == [fourth.id]

    @pytest.mark.asyncio
    async def test_a_due_key_is_read_within_the_limits(self, store: Store) -> None:
        grant, _, events = await self._waiting(store, 4)
        size = len(events[0].payload)
        for limit, max_bytes, count in ((2, MAX_BYTES, 2), (10, 3 * size, 3), (10, 0, 1)):
            run = await store.read_due(grant, limit, max_bytes)
            assert run is not None
            assert ids(run.events) == ids(events[:count])

    @pytest.mark.asyncio
    async def test_a_stale_owner_reads_no_due_key(self, store: Store, other: Store) -> None:
        ann, key, events = await self._waiting(store)
        bob = await self.lose(other, ann)
        stale = await self.read_due(store, ann)
        assert stale is None or not stale[1]
        run = await self.read_due(other, bob)
        assert run is not None
        assert (run[0], ids(run[1])) == (key, ids(events))

    @pytest.mark.asyncio
    async def test_a_key_is_not_due_before_its_time(self, store: Store) -> None:
        grant, key, events = await self._waiting(store)
        for mode, delay in ((HoldMode.RETRYING, LONG), (HoldMode.BLOCKED, None), (HoldMode.PARKED, None)):
            failed = [Failure(events[0], "again", 2)]
            await settle(store, Settlement(grant, failed=failed, hold_keys={key: Hold(mode, delay)}))
            assert await self.read_due(store, grant) is None
            assert not (await store.poll(STREAM, "ann", [grant])).due
            assert set(await store.held_keys(grant)) == {key}
        await settle(store, Settlement(grant, hold_keys={key: Hold(HoldMode.RETRYING, PAST)}))
        assert await self.read_due(store, grant) is not None

    @pytest.mark.asyncio
    async def test_every_due_key_has_its_turn(self, store: Store) -> None:
        grant = await self.own(store)
        events = await self.write(store, grant, *self.events(3))
        for event in events:
            await self.fail_head(store, grant, event)
        served = []
        for _ in events:
            run = await self.read_due(store, grant)
            assert run is not None
            served.append(run[0])
            await settle(store, Settlement(grant, published=run[1], release_keys=[run[0]]))
        assert sorted(served) == sorted(str(event.key) for event in events)
        assert await self.read_due(store, grant) is None

    @pytest.mark.asyncio
    async def test_a_key_with_a_future_attempt_does_not_hide_a_due_one(self, store: Store) -> None:
        grant = await self.own(store)
        later, due = await self.write(store, grant, *self.events(2))
        await self.fail_head(store, grant, later, delay=LONG)
        await self.fail_head(store, grant, due)
        run = await self.read_due(store, grant)
        assert run is not None
        assert run[0] == due.key

    @pytest.mark.asyncio
    async def test_a_key_is_released_when_nothing_of_it_waits(self, store: Store) -> None:
        grant, key, events = await self._waiting(store)
        assert not await settle(store, Settlement(grant, published=events, release_keys=[key]))
        assert not await store.held_keys(grant)
        assert await self.read_due(store, grant) is None
        (new,) = await self.write(store, grant, self.event(key=key))
        await self.publish(store, grant, new)
        assert await self.count(store) == {Status.PUBLISHED: 4}

    @pytest.mark.asyncio
    async def test_a_key_stays_held_while_something_of_it_waits(self, store: Store) -> None:
        grant, key, (head, *held) = await self._waiting(store)
        for event in (head, held[0]):
            assert set(await settle(store, Settlement(grant, published=[event], release_keys=[key]))) == {key}
            assert set(await store.held_keys(grant)) == {key}
        run = await self.read_due(store, grant)
        assert run is not None
        assert ids(run[1]) == [held[1].id]
        other = self.event()
        await self.write(store, grant, other)
        await self.fail_head(store, grant, other)
        assert not await settle(store, Settlement(grant, published=[held[1]], release_keys=[key])), (
            "another key's failure does not keep this one"
        )

    @pytest.mark.asyncio
    async def test_a_key_stays_held_while_its_head_is_failed(self, store: Store) -> None:
        grant, key, _ = await self._waiting(store, 1)
        assert set(await settle(store, Settlement(grant, release_keys=[key]))) == {key}
        assert set(await store.held_keys(grant)) == {key}

    @pytest.mark.asyncio
    async def test_only_an_operator_frees_a_key_that_is_blocked_or_parked(self, store: Store) -> None:
        grant = await self.own(store)
        events = await self.write(store, grant, *self.events(2))
        keys = {event.key for event in events if event.key is not None}
        for event, mode in zip(events, (HoldMode.BLOCKED, HoldMode.PARKED), strict=True):
            await self.kill_head(store, grant, event, mode=mode)
        assert set(await settle(store, Settlement(grant, release_keys=keys))) == keys
        assert set(await store.held_keys(grant)) == keys
        assert await self.read_due(store, grant) is None

    @pytest.mark.asyncio
    async def test_a_held_key_is_inherited(self, store: Store, other: Store) -> None:
        ann, key, events = await self._waiting(store)
        bob = await self.lose(other, ann)
        assert set(await other.held_keys(bob)) == {key}
        assert (await other.poll(STREAM, "bob", [bob])).due == {0}
        assert not await settle(other, Settlement(bob, published=events, release_keys=[key]))


class InstantTests(StoreSetup):
    """Events that wait for an instant of their own."""

    @pytest.mark.asyncio
    async def test_a_failed_event_without_a_key_comes_back_by_itself(self, store: Store) -> None:
        grant = await self.own(store)
        now, later, other = await self.write(store, grant, *self.events(3, key=None))
        failed = [Failure(now, "refused", 1, PAST), Failure(later, "refused", 2, LONG)]
        assert not await settle(store, Settlement(grant, failed=failed))
        assert not await store.held_keys(grant)
        assert ids(await self.read(store, grant)) == [other.id]
        assert await store.reenter_due("invoices", 10) == 0
        assert await store.reenter_due(STREAM, 10) == 1
        back = await self.read_soon(store, grant, 2)
        assert back == [now._replace(attempts=1), other]
        assert await store.reenter_due(STREAM, 10) == 0
        assert await self.count(store) == {Status.FAILED: 1, Status.PENDING: 2}

    @pytest.mark.asyncio
    async def test_a_failed_event_with_a_key_comes_back_by_its_key_only(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        await self.fail_head(store, grant, event)
        assert not (await store.poll(STREAM, "ann", [grant])).scheduled
        assert await store.reenter_due(STREAM, 10) == 0
        assert await self.count(store) == {Status.FAILED: 1}

    @pytest.mark.asyncio
    async def test_a_scheduled_event_waits(self, store: Store) -> None:
        grant = await self.own(store)
        await store.add([self.event(available_at=datetime.now(UTC) + timedelta(hours=1))])
        assert await self.count(store) == {Status.SCHEDULED: 1}
        assert await self.read(store, grant) == []
        assert not (await store.poll(STREAM, "ann", [grant])).ready
        assert await store.reenter_due(STREAM, 10) == 0
        assert await self.count(store) == {Status.SCHEDULED: 1}

    @pytest.mark.asyncio
    async def test_an_instant_of_long_ago_has_come(self, store: Store) -> None:
        grant = await self.own(store)
        start = datetime(1970, 1, 1, tzinfo=UTC)
        events = [self.event(available_at=start + timedelta(days=days)) for days in (-100_000, -1, 0, 1)]
        await store.add(events)
        assert (await store.poll(STREAM, "ann", [grant])).scheduled
        assert await store.reenter_due(STREAM, 10) == 4
        assert ids(await self.read_soon(store, grant, 4)) == ids(events)

    @pytest.mark.asyncio
    async def test_an_instant_keeps_its_microseconds_and_its_zone(self, store: Store) -> None:
        grant = await self.own(store)
        fine = datetime(2024, 2, 29, 23, 59, 59, 123456, tzinfo=UTC)
        instants = [fine, datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
        events = await self.write(store, grant, *[self.event(occurred_at=instant) for instant in instants])
        assert [event.occurred_at for event in events] == instants
        assert {event.occurred_at.utcoffset() for event in events} == {timedelta(0)}

    @pytest.mark.asyncio
    async def test_a_scheduled_event_comes_when_its_instant_has_come(self, store: Store) -> None:
        grant = await self.own(store)
        east = datetime.now(UTC).astimezone().tzinfo
        events = self.events(2, available_at=datetime.now(east) - timedelta(hours=1))
        await store.add(events)
        if await self.count(store) != {Status.PENDING: 2}:
            assert (await store.poll(STREAM, "ann", [grant])).scheduled
            assert await store.reenter_due(STREAM, 1) == 1
            assert await store.reenter_due(STREAM, 10) == 1
        assert ids(await self.read_soon(store, grant, 2)) == ids(events)

    @pytest.mark.asyncio
    async def test_a_promoted_event_that_fails_waits_for_its_key(self, store: Store) -> None:
        grant = await self.own(store)
        event = self.event(available_at=datetime.now(UTC) - timedelta(hours=1))
        await store.add([event])
        await store.reenter_due(STREAM, 10)
        (event,) = await self.read_soon(store, grant, 1)
        await self.fail_head(store, grant, event, delay=LONG)
        assert not (await store.poll(STREAM, "ann", [grant])).scheduled
        assert await store.reenter_due(STREAM, 10) == 0
        assert await self.count(store) == {Status.FAILED: 1}
