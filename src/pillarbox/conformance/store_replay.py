"""Replay of published events."""

from datetime import UTC, datetime, timedelta

import pytest

from pillarbox.conformance.store_setup import JOBS, LEASE, LONG, STREAM, AuditRow, StoreSetup, ids, refs, settle
from pillarbox.event import Mode, Status
from pillarbox.store import ClaimResults, Failure, Filter, Hold, HoldMode, Settlement, Store


class ReplayTests(StoreSetup):
    """Published events are published again, in their old order, and nothing else changes."""

    @pytest.mark.asyncio
    async def test_published_events_enter_at_the_end_in_their_old_order(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        old = await self.write(
            store, grant, *self.events(3, key=key), self.event(key=None), self.event(headers={"a": "b"})
        )
        await self.publish(store, grant, *old)
        (waiting,) = await self.write(store, grant, self.event(key=key))
        assert await store.replay_published(refs(*old[::-1]), "olga") == 5
        found = await self.read_soon(store, grant, 6)
        assert ids(found) == ids([waiting, *old])
        assert found[1].seq > waiting.seq
        same = [each._replace(seq=0, available_at=None) for each in found[1:]]
        assert same == [each._replace(seq=0) for each in old]
        assert await self.count(store) == {Status.PENDING: 6}
        await self.publish(store, grant, *found)
        assert await self.count(store) == {Status.PUBLISHED: 6}
        assert await store.replay_published(refs(old[0]), "olga") == 1
        (found_by_id,) = await store.find_by_id(old[0].id)
        assert found_by_id.published_at is None

    @pytest.mark.asyncio
    async def test_only_what_is_published_is_published_again(self, store: Store) -> None:
        grant = await self.own(store)
        published, pending, failed, dead = await self.write(store, grant, *self.events(4))
        await self.publish(store, grant, published)
        await self.fail_head(store, grant, failed, delay=LONG)
        await settle(store, Settlement(grant, dead=[Failure(dead, "refused", 1)]))
        assert await store.replay_published(refs(pending, failed, dead, self.event()), "olga") == 0
        assert await store.replay_published([], "olga") == 0
        other = [ref._replace(stream=JOBS) for ref in refs(published)]
        assert await store.replay_published(other, "olga") == 0
        assert not await self.audit(store)
        assert await store.replay_published(refs(pending, published), "olga") == 1
        assert list(await self.audit(store)) == [AuditRow("olga", "replay published", STREAM, published.id)]

    @pytest.mark.asyncio
    async def test_a_published_event_of_a_held_key_returns_to_its_old_place(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        old, head, behind = await self.write(store, grant, *self.events(3, key=key))
        await self.publish(store, grant, old)
        await self.fail_head(store, grant, head, behind, delay=LONG)
        assert await store.replay_published(refs(old), "olga") == 1
        assert await self.read(store, grant) == [], "pending, it would be read beside its key"
        run = await self.read_due(store, grant)
        assert run is not None
        assert (run[0], ids(run[1])) == (key, ids([old, head, behind]))
        assert run[1][0].attempts == 0
        assert not await settle(store, Settlement(grant, published=run[1], release_keys=[key]))
        assert await self.count(store) == {Status.PUBLISHED: 3}

    @pytest.mark.asyncio
    async def test_a_replay_of_published_events_frees_no_blocked_key(self, store: Store) -> None:
        grant = await self.own(store)
        old, dead = await self.write(store, grant, *self.events(2, key=self.key()))
        await self.publish(store, grant, old)
        await self.kill_head(store, grant, dead)
        assert await store.replay_published(refs(old), "olga") == 1
        assert await self.read_due(store, grant) is None
        await store.discard(refs(dead), "olga")
        run = await self.read_due(store, grant)
        assert run is not None
        assert ids(run[1]) == [old.id]

    @pytest.mark.asyncio
    async def test_a_replayed_event_fails_like_a_new_one(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        key = str(event.key)
        await self.fail_head(store, grant, event, attempts=7)
        await settle(store, Settlement(grant, published=[event], release_keys=[key]))
        await store.replay_published(refs(event), "olga")
        (again,) = await self.read_soon(store, grant, 1)
        assert again.attempts == 0
        await settle(
            store, Settlement(grant, failed=[Failure(again, "no", 1)], hold_keys={key: Hold(HoldMode.RETRYING, LONG)})
        )
        assert await self.count(store) == {Status.FAILED: 1}

    @pytest.mark.asyncio
    async def test_a_replayed_event_waits_from_its_replay_on(self, store: Store) -> None:
        grant = await self.own(store)
        await store.add([event := self.event(available_at=datetime.now(UTC) - timedelta(hours=1))])
        await store.reenter_due(STREAM, 10)
        await self.publish(store, grant, *await self.read_soon(store, grant, 1))
        await store.replay_published(refs(event), "olga")
        (gauges,) = await store.gauges()
        assert gauges.oldest_seconds is not None
        assert gauges.oldest_seconds < 60

    @pytest.mark.asyncio
    async def test_a_published_event_of_a_queue_is_claimed_again(self, store: Store) -> None:
        await store.announce(JOBS, Mode.QUEUE, "memory")
        await store.add(self.events(2, stream=JOBS, key=None))
        claims = await store.claim(JOBS, 0, "ann", 10, LEASE)
        await store.settle_claims(claims, ClaimResults(published=[claim.event for claim in claims]))
        assert await store.replay_published(refs(*(claim.event for claim in claims)), "olga") == 2
        again = await store.claim(JOBS, 0, "ann", 10, LEASE)
        assert [each.event.id for each in again] == [each.event.id for each in claims]
        assert [each.event.attempts for each in again] == [1, 1]

    @pytest.mark.asyncio
    async def test_a_list_goes_on_behind_an_id(self, store: Store) -> None:
        events = sorted(self.events(5), key=lambda event: event.id)
        await store.add(events)
        found = await store.find(Filter(), 2, newest_first=False, after=events[1].id)
        assert [each.event.id for each in found] == ids(events[2:4])
        found = await store.find(Filter(), 2, after=events[3].id)
        assert [each.event.id for each in found] == ids(events[2:0:-1])
        assert not await store.find(Filter(), 2, newest_first=False, after=events[4].id)
