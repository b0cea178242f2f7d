"""Cheap questions: streams at a glance, held keys, workers, and what comes before an event."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from pillarbox.conformance.store_setup import JOBS, LEASE, LONG, PAST, SHARDS, STREAM, StoreSetup, refs, settle
from pillarbox.event import Mode, Status
from pillarbox.store import Failure, HoldMode, Settlement, Store, StreamGauges, WorkerStatus

_HOUR = timedelta(hours=1)


class GaugeTests(StoreSetup):
    """A count below the limit is exact; above it says that there may be more."""

    async def gauges_of(self, store: Store, stream: str = STREAM, limit: int = 100) -> StreamGauges:
        (found,) = [each for each in await store.gauges(limit) if each.stream == stream]
        return found

    async def workers_of(self, store: Store, stream: str = STREAM) -> Sequence[WorkerStatus]:
        return (await store.workers()).get(stream, ())

    @pytest.mark.asyncio
    async def test_every_stream_is_told_with_its_states(self, store: Store) -> None:
        assert not await store.gauges()
        grant = await self.own(store)
        one, two, dead, _ = await self.write(store, grant, *self.events(4))
        await self.publish(store, grant, one)
        await self.fail_head(store, grant, two, delay=LONG)
        await settle(store, Settlement(grant, dead=[Failure(dead, "refused", 1)]))
        await store.add([self.event(stream="letters", available_at=datetime.now(UTC) + _HOUR)])
        await store.add(self.events(2, stream=JOBS, key=None))
        await store.claim(JOBS, 0, "ann", 1, LEASE)
        await store.pause("quiet", "olga")
        jobs, letters, orders, quiet = await store.gauges()
        assert [each.stream for each in (jobs, letters, orders, quiet)] == [JOBS, "letters", STREAM, "quiet"]
        assert dict(orders.counts) == {Status.PENDING: 1, Status.FAILED: 1, Status.DEAD: 1}
        assert dict(jobs.counts) == {Status.PENDING: 1, Status.PROCESSING: 1}
        assert (orders.mode, orders.destination) == (Mode.ORDERED, "memory")
        assert (letters.mode, letters.destination) == (None, None)
        assert (dict(orders.held_keys), dict(quiet.held_keys)) == ({HoldMode.RETRYING: 1}, {})
        assert (orders.paused, quiet.paused) == (False, True)
        assert (orders.workers, letters.workers) == (1, 0)
        assert dict(letters.counts) == {Status.SCHEDULED: 1}
        assert not quiet.counts
        assert not any(each.at_least for each in (jobs, letters, orders, quiet))

    @pytest.mark.asyncio
    async def test_a_count_ends_at_the_limit(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        head, *behind, one, two, three = await self.write(store, grant, *self.events(4, key=key), *self.events(3))
        await self.fail_head(store, grant, head, *behind, delay=LONG)
        await settle(store, Settlement(grant, dead=[Failure(each, "refused", 1) for each in (one, two, three)]))
        await store.add([*self.events(3), *(self.event(available_at=datetime.now(UTC) + _HOUR) for _ in range(3))])
        await store.announce(JOBS, Mode.QUEUE, "memory")
        await store.add(self.events(3, stream=JOBS, key=None))
        await store.claim(JOBS, 0, "ann", 3, LEASE)
        for stream, states in (
            (STREAM, {Status.PENDING: 3, Status.SCHEDULED: 3, Status.DEAD: 3}),
            (JOBS, {Status.PROCESSING: 3}),
        ):
            exact, capped = await self.gauges_of(store, stream, 5), await self.gauges_of(store, stream, 2)
            for status, count in states.items():
                assert (exact.counts[status], status in exact.at_least) == (count, False)
                assert (capped.counts[status], status in capped.at_least) == (2, True), status
        waiting = await self.gauges_of(store, STREAM, 5)
        assert (waiting.counts[Status.FAILED], waiting.counts[Status.HELD]) == (1, 3)
        waiting = await self.gauges_of(store, STREAM, 2)
        # One index may have both, so that either may have more.
        assert 1 <= waiting.counts.get(Status.HELD, 0) <= 2
        assert Status.HELD in waiting.at_least

    @pytest.mark.asyncio
    async def test_a_long_key_does_not_hide_that_others_fail(self, store: Store) -> None:
        grant = await self.own(store)
        for key in sorted((self.key(), self.key(), self.key())):
            head, *behind = await self.write(store, grant, *self.events(4, key=key))
            await self.fail_head(store, grant, head, *behind, delay=LONG)
        assert (await self.gauges_of(store, STREAM, 3)).counts[Status.FAILED] == 3

    @pytest.mark.asyncio
    async def test_held_keys_are_counted_by_their_mode(self, store: Store) -> None:
        grant = await self.own(store)
        retrying, blocked, parked, other = await self.write(store, grant, *self.events(4))
        await self.fail_head(store, grant, retrying, delay=LONG)
        await self.kill_head(store, grant, blocked)
        for head in (parked, other):
            await self.kill_head(store, grant, head, mode=HoldMode.PARKED)
        held = (await self.gauges_of(store)).held_keys
        assert dict(held) == {HoldMode.RETRYING: 1, HoldMode.BLOCKED: 1, HoldMode.PARKED: 2}

    @pytest.mark.asyncio
    async def test_only_what_waits_has_an_age(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        oldest = (await self.gauges_of(store)).oldest_seconds
        assert oldest is not None
        assert 0 <= oldest < 60
        await self.publish(store, grant, event)
        await store.add([self.event(available_at=datetime.now(UTC) + _HOUR)])
        assert (await self.gauges_of(store)).oldest_seconds is None
        # It waits from its own instant on, not from the instant of writing.
        await store.add([self.event(stream=JOBS, available_at=datetime.now(UTC) - _HOUR, shard=SHARDS - 1)])
        await store.reenter_due(JOBS, 10)
        await store.add([self.event(stream=JOBS)])
        oldest = (await self.gauges_of(store, JOBS)).oldest_seconds
        assert oldest is not None
        assert 3500 < oldest < 3700

    @pytest.mark.asyncio
    async def test_a_failed_event_and_a_leased_one_wait_too(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        await self.fail_head(store, grant, event, delay=LONG)
        assert (await self.gauges_of(store)).oldest_seconds is not None
        await store.add(self.events(1, stream=JOBS, key=None))
        await store.announce(JOBS, Mode.QUEUE, "memory")
        await store.claim(JOBS, 0, "ann", 1, LEASE)
        assert (await self.gauges_of(store, JOBS)).oldest_seconds is not None

    @pytest.mark.asyncio
    async def test_a_worker_that_is_gone_is_not_counted(self, store: Store) -> None:
        await self.join(store, STREAM, "ann", LEASE)
        await self.join(store, STREAM, "bob", PAST)
        assert [(each.name, each.live) for each in await self.workers_of(store)] == [("ann", True)]
        assert (await self.gauges_of(store)).workers == 1

    @pytest.mark.asyncio
    async def test_a_worker_that_does_not_renew_is_named_until_its_shards_come_free(self, store: Store) -> None:
        await self.own_all(store, "ann")
        await store.join(STREAM, "ann", PAST)
        (ann,) = await self.workers_of(store)
        assert (ann.name, ann.live, ann.shards) == ("ann", False, SHARDS)
        assert ann.seen_seconds is not None
        assert 0 < ann.free_seconds <= LEASE
        assert (await self.gauges_of(store)).workers == 0
        await store.leave(STREAM, "ann")
        (ann,) = await self.workers_of(store)
        assert (ann.seen_seconds, ann.shards) == (None, SHARDS)

    @pytest.mark.asyncio
    async def test_a_worker_says_why_it_waits_for_its_destination(self, store: Store) -> None:
        await self.join(store, STREAM, "ann", LEASE)
        (ann,) = await self.workers_of(store)
        assert (ann.circuit_error, ann.circuit_seconds) == (None, None)
        assert ann.version
        await store.join(STREAM, "ann", LEASE, "no $broker \0 there")
        (ann,) = await self.soon(
            lambda: self.workers_of(store), lambda workers: (workers[0].circuit_seconds or 0.0) > 0.01
        )
        assert ann.circuit_error is not None
        assert ann.circuit_error.startswith("no $broker")
        assert ann.circuit_seconds is not None
        assert (await self.gauges_of(store)).open_circuits == 1
        await store.join(STREAM, "ann", LEASE, "still none")
        (again,) = await self.workers_of(store)
        assert again.circuit_error == "still none"
        assert again.circuit_seconds is not None
        assert again.circuit_seconds >= ann.circuit_seconds, "it has been open since the first error"
        await store.join(STREAM, "ann", LEASE)
        (ann,) = await self.workers_of(store)
        assert (ann.circuit_error, ann.circuit_seconds) == (None, None)
        assert (await self.gauges_of(store)).open_circuits == 0

    @pytest.mark.asyncio
    async def test_a_stuck_key_names_the_event_that_it_waits_for(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        head, *behind, blocked, later = await self.write(
            store, grant, *self.events(3, key=key), *self.events(2, key=self.key())
        )
        await self.fail_head(store, grant, head, *behind, delay=LONG)
        await self.kill_head(store, grant, blocked, later)
        found = {each.key: each for each in await store.stuck_keys(STREAM)}
        retrying, stopped = found[key], found[str(blocked.key)]
        assert (retrying.mode, retrying.head, retrying.error) == (HoldMode.RETRYING, head.id, "refused")
        assert (retrying.waiting, stopped.waiting) == (3, 1)
        assert retrying.next_attempt_at is not None
        assert retrying.since is not None
        assert (stopped.mode, stopped.head, stopped.error) == (HoldMode.BLOCKED, blocked.id, "refused for good")
        assert stopped.next_attempt_at is None
        assert stopped.since is not None
        assert [each.key for each in await store.stuck_keys(STREAM, key=key)] == [key]
        assert not await store.stuck_keys(STREAM, key=self.key())
        assert len(await store.stuck_keys(STREAM, 1)) == 1
        assert not await store.stuck_keys(JOBS)
        await store.discard(refs(blocked), "olga")
        (gone,) = await store.stuck_keys(STREAM, key=str(blocked.key))
        assert (gone.mode, gone.head) == (HoldMode.RETRYING, later.id)

    @pytest.mark.asyncio
    async def test_what_comes_before_an_event_is_counted(self, store: Store) -> None:
        await store.add([self.event(), *(last := self.events(3)), self.event(shard=1), self.event(stream=JOBS)])
        (found,) = await store.find_by_id(last[2].id)
        nobody = await store.ahead(found)
        assert (nobody.owner, nobody.owned_seconds, nobody.events) == (None, 0.0, 3)
        assert (await store.ahead(found, 2)).events == 2
        grant = await self.own(store)
        owned = await store.ahead(found)
        assert owned.owner == "ann"
        assert 0 < owned.owned_seconds <= LEASE
        await self.publish(store, grant, *(await self.read_soon(store, grant, 4))[:3])
        assert (await store.ahead(found)).events == 0
        await store.renew([grant], PAST)
        assert (await store.ahead(found)).owner is None

    @pytest.mark.asyncio
    async def test_the_clock_is_an_instant(self, store: Store) -> None:
        clock = await store.clock()
        assert clock.tzinfo is not None
        assert abs(datetime.now(UTC) - clock) < _HOUR
