"""Re-entry: an event takes a new place at the end of its stream. Turns on several shards."""

from datetime import UTC, datetime, timedelta

import pytest

from pillarbox.conformance.store_setup import LONG, MAX_BYTES, PAST, STREAM, StoreSetup, ids, refs, settle
from pillarbox.event import Event, Status
from pillarbox.store import Failure, Hold, HoldMode, Settlement, Store


class ReentryTests(StoreSetup):
    """The place of events that are pending again."""

    @pytest.mark.asyncio
    async def test_scheduled_events_enter_at_the_end_in_order_of_their_instants(self, store: Store) -> None:
        grant = await self.own(store)
        key, now = self.key(), datetime.now(UTC)
        late, early = (self.event(key=key, available_at=now - timedelta(minutes=age)) for age in (1, 5))
        await store.add([late, early])
        (plain,) = await self.write(store, grant, self.event(key=key))
        assert await store.reenter_due(STREAM, 10) == 2
        found = await self.read_soon(store, grant, 3)
        assert ids(found) == ids([plain, early, late]), "where they were written does not count"
        assert [event.seq for event in found] == sorted({event.seq for event in found})

    @pytest.mark.asyncio
    async def test_a_limit_takes_the_earliest_first(self, store: Store) -> None:
        grant = await self.own(store)
        now = datetime.now(UTC)
        events = [self.event(available_at=now - timedelta(minutes=age)) for age in (1, 3, 2)]
        await store.add(events)
        for count, wanted in enumerate((events[1], events[2], events[0]), 1):
            assert await store.reenter_due(STREAM, 1) == 1
            assert (await self.read_soon(store, grant, count))[-1].id == wanted.id
        assert await store.reenter_due(STREAM, 1) == 0

    @pytest.mark.asyncio
    async def test_what_is_written_after_a_re_entry_comes_after_it(self, store: Store, other: Store) -> None:
        grant = await self.own(store)
        await store.add([scheduled := self.event(available_at=datetime.now(UTC) - timedelta(minutes=1))])
        await store.reenter_due(STREAM, 10)
        await other.add([later := self.event()])
        found = await self.read_soon(store, grant, 2)
        assert ids(found) == [scheduled.id, later.id]
        assert found[0].seq < found[1].seq

    @pytest.mark.asyncio
    async def test_a_re_entered_event_is_the_same_event(self, store: Store) -> None:
        grant = await self.own(store)
        instant = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=1)
        event = self.event(
            available_at=instant, payload=b"\x00\xff", headers={"a": "b"}, topic="t", aggregate_version=3
        )
        plain = self.event(available_at=instant + timedelta(seconds=1))
        await store.add([event, plain])
        await store.reenter_due(STREAM, 10)
        found, found_plain = await self.read_soon(store, grant, 2)
        changed = ("seq", "created_at", "occurred_at", "status")
        same = [name for name in Event._fields if name not in changed]
        assert [getattr(found, name) for name in same] == [getattr(event, name) for name in same]
        assert found_plain.available_at == plain.available_at
        await self.publish(store, grant, found)
        (seen,) = await store.find_by_id(event.id)
        assert (seen.event.available_at, seen.event.status) == (instant, Status.PUBLISHED)

    @pytest.mark.asyncio
    async def test_replayed_events_enter_at_the_end_in_their_old_order(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        one, two, three = await self.write(store, grant, *self.events(3, key=key))
        for event in (two, one):
            await settle(store, Settlement(grant, dead=[Failure(event, "refused", 5)]))
        assert await store.replay(refs(two, one), "olga") == 2
        found = await self.read_soon(store, grant, 3)
        assert ids(found) == ids([three, one, two])
        assert [event.attempts for event in found] == [0, 0, 0]
        assert found[1].seq > three.seq

    @pytest.mark.asyncio
    async def test_a_replayed_head_returns_to_the_front_of_its_held_key(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        head, *behind = await self.write(store, grant, *self.events(3, key=key))
        await self.kill_head(store, grant, head, *behind)
        await store.replay(refs(head), "olga")
        run = await store.read_due(grant, 10, MAX_BYTES)
        assert run is not None
        assert run.mode is HoldMode.RETRYING
        assert ids(run.events) == ids([head, *behind])
        assert [event.seq for event in run.events] == [event.seq for event in (head, *behind)]


class JointTests(StoreSetup):
    """One call for several shards."""

    @pytest.mark.asyncio
    async def test_a_read_of_several_shards_keeps_them_apart(self, store: Store) -> None:
        grants = await self.own_all(store)
        events = [[self.event(shard=shard) for _ in range(3)] for shard in (0, 1)]
        await store.add([event for pair in zip(*events, strict=True) for event in pair])
        parts = {part.shard: part for part in await store.read(grants, 10, MAX_BYTES)}
        assert parts.keys() == {0, 1}, "a shard without events is left out"
        for shard in (0, 1):
            assert ids(parts[shard].events) == ids(events[shard])
            assert parts[shard].token == grants[shard].token

    @pytest.mark.asyncio
    async def test_the_limits_of_a_read_are_for_all_its_shards(self, store: Store) -> None:
        grants = await self.own_all(store)
        events = [[self.event(shard=shard, payload=b"x" * 1000) for _ in range(3)] for shard in (0, 1, 2)]
        await store.add([event for some in zip(*events, strict=True) for event in some])
        for limit, max_bytes, most in ((4, MAX_BYTES, 4), (100, 4500, 4), (100, 10, 1)):
            parts = await store.read(grants, limit, max_bytes)
            assert 1 <= sum(len(part.events) for part in parts) <= most
            for part in parts:
                assert part.shard is not None
                assert ids(part.events) == ids(events[part.shard][: len(part.events)]), "a part is a beginning"

    @pytest.mark.asyncio
    async def test_nothing_is_read_while_the_stream_is_paused(self, store: Store) -> None:
        grants = await self.own_all(store)
        await store.add([self.event(shard=0), self.event(shard=1)])
        await store.pause(STREAM, "olga")
        assert list(await store.read(grants[:1], 10, MAX_BYTES)) == []
        assert list(await store.read(grants, 10, MAX_BYTES)) == []
        await store.resume(STREAM, "olga")
        assert len(await store.read(grants, 10, MAX_BYTES)) == 2

    @pytest.mark.asyncio
    async def test_a_read_leaves_out_a_shard_that_is_lost(self, store: Store, other: Store) -> None:
        grants = await self.own_all(store)
        await store.add([self.event(shard=0), self.event(shard=1)])
        await self.lose(other, grants[0])
        assert [part.shard for part in await store.read(grants[:2], 10, MAX_BYTES)] == [1]

    @pytest.mark.asyncio
    async def test_several_shards_are_settled_together(self, store: Store) -> None:
        grants = await self.own_all(store)
        gone, kept = ([self.event(shard=shard) for shard in (0, 1, 1, 2)] for _ in range(2))
        for events, keep in ((gone, False), (kept, True)):
            await store.add(events)
            parts = {part.shard: part.events for part in await store.read(grants, 10, MAX_BYTES)}
            settlements = [Settlement(each, published=parts[each.shard], keep_published=keep) for each in grants[:3]]
            for _ in range(2):  # the second time as if the first answer had been lost
                held = await store.settle(settlements)
                assert {shard: set(keys) for shard, keys in held.items()} == {0: set(), 1: set(), 2: set()}
            assert list(await store.read(grants, 10, MAX_BYTES)) == []
            assert await self.count(store) == ({Status.PUBLISHED: 4} if keep else {})
        found = [each for event in kept for each in await store.find_by_id(event.id)]
        assert [each.event.attempts for each in found] == [1] * 4

    @pytest.mark.asyncio
    async def test_a_settle_of_several_shards_leaves_out_what_is_lost(self, store: Store, other: Store) -> None:
        grants = await self.own_all(store)
        events = [self.event(shard=shard) for shard in (0, 1, 2)]
        await store.add(events)
        zero, one, two = [(await self.read(store, grant))[0] for grant in grants[:3]]
        await self.lose(other, grants[1])
        assert two.key is not None
        held = await store.settle(
            [
                Settlement(grants[0], published=[zero]),
                Settlement(grants[1], published=[one]),
                Settlement(
                    grants[2], failed=[Failure(two, "refused", 1)], hold_keys={two.key: Hold(HoldMode.RETRYING, LONG)}
                ),
            ]
        )
        assert {shard: set(keys) for shard, keys in held.items()} == {0: set(), 2: {two.key}}
        assert await self.count(store) == {Status.PUBLISHED: 1, Status.PENDING: 1, Status.FAILED: 1}

    @pytest.mark.asyncio
    async def test_a_call_for_no_shard_does_nothing(self, store: Store) -> None:
        await self.own_all(store)
        assert list(await store.read([], 10, MAX_BYTES)) == []
        assert dict(await store.settle([])) == {}
        assert list(await store.renew([], PAST)) == []
