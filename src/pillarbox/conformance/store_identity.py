"""The identity of an event is its id and its stream: the same event may stand in several streams."""

from typing import Any

import pytest

from pillarbox.conformance.store_setup import JOBS, LEASE, LONG, PAST, STREAM, StoreSetup, refs, settle
from pillarbox.errors import DuplicateEvent
from pillarbox.event import Event, Mode, Status
from pillarbox.store import ClaimResults, Failure, Filter, Grant, Settlement, Store

OTHER = "invoices"


class IdentityTests(StoreSetup):
    """One id in two streams is two events."""

    async def _in_both(self, store: Store, **fields: Any) -> tuple[Grant, Grant, Event, Event]:
        mine = await self.own(store)
        theirs = await self.own(store, stream=OTHER)
        event = self.event(**fields)
        await store.add([event, event._replace(stream=OTHER)])
        (here,) = await self.read(store, mine)
        (there,) = await self.read(store, theirs)
        return mine, theirs, here, there

    @pytest.mark.asyncio
    async def test_an_id_is_unique_within_its_stream(self, store: Store) -> None:
        _, _, here, there = await self._in_both(store)
        assert here.id == there.id
        assert (here.stream, there.stream) == (STREAM, OTHER)
        for event in (here, there):
            with pytest.raises(DuplicateEvent):
                await store.add([event])

    @pytest.mark.asyncio
    async def test_a_settle_changes_its_own_stream_only(self, store: Store) -> None:
        mine, theirs, here, there = await self._in_both(store)
        await self.publish(store, mine, here)
        assert await self.count(store) == {Status.PUBLISHED: 1}
        assert await self.count(store, OTHER) == {Status.PENDING: 1}
        await self.fail_head(store, theirs, there, delay=LONG)
        assert await self.count(store) == {Status.PUBLISHED: 1}
        assert await self.count(store, OTHER) == {Status.FAILED: 1}

    @pytest.mark.asyncio
    async def test_deleting_what_is_published_spares_the_other_stream(self, store: Store) -> None:
        mine, _, here, _ = await self._in_both(store)
        await settle(store, Settlement(mine, published=[here], keep_published=False))
        assert await self.count(store) == {}
        assert await self.count(store, OTHER) == {Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_an_event_dies_in_one_stream_and_lives_in_the_other(self, store: Store) -> None:
        mine, theirs, here, there = await self._in_both(store)
        await settle(store, Settlement(mine, dead=[Failure(here, "refused", 1)]))
        assert await self.count(store, OTHER) == {Status.PENDING: 1}
        await settle(store, Settlement(theirs, dead=[Failure(there, "refused too", 1)]))
        letters = {letter.event.stream: letter.error for letter in await store.dead_letters()}
        assert letters == {STREAM: "refused", OTHER: "refused too"}

    @pytest.mark.asyncio
    async def test_an_operator_decides_about_one_stream(self, store: Store) -> None:
        mine, theirs, here, there = await self._in_both(store)
        await settle(store, Settlement(mine, dead=[Failure(here, "refused", 1)]))
        await settle(store, Settlement(theirs, dead=[Failure(there, "refused", 1)]))
        assert await store.replay(refs(here), "olga") == 1
        assert await self.count(store) == {Status.PENDING: 1}
        assert await self.count(store, OTHER) == {Status.DEAD: 1}
        assert await store.discard(refs(there, here), "olga") == 1
        assert await self.count(store, OTHER) == {}
        assert await self.count(store) == {Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_an_id_is_found_in_every_stream(self, store: Store) -> None:
        mine, _, here, there = await self._in_both(store, payload=b"twice")
        await settle(store, Settlement(mine, dead=[Failure(here, "refused", 1)]))
        found = {each.event.stream: each for each in await store.find_by_id(here.id)}
        assert {stream: each.event.status for stream, each in found.items()} == {
            STREAM: Status.DEAD,
            OTHER: Status.PENDING,
        }
        assert [each.event.payload for each in found.values()] == [b"twice"] * 2
        assert len(await store.find(Filter(ids=[there.id]), 10)) == 2
        (only,) = await store.find(Filter(ids=[there.id], stream=OTHER), 10)
        assert only.event.stream == OTHER

    @pytest.mark.asyncio
    async def test_a_claim_is_of_its_stream(self, store: Store) -> None:
        event = self.event(key=None, stream=JOBS)
        await store.add([event, event._replace(stream=OTHER)])
        (claim,) = await store.claim(JOBS, 0, "ann", 10, LEASE)
        (other,) = await store.claim(OTHER, 0, "bob", 10, LEASE)
        assert await store.settle_claims([claim], ClaimResults(published=[claim.event])) == 0
        assert await self.count(store, OTHER) == {Status.PROCESSING: 1}
        results = ClaimResults(failed=[Failure(other.event, "refused", 1, LONG)])
        assert await store.settle_claims([other], results) == 0
        assert await self.count(store, JOBS) == {Status.PUBLISHED: 1}
        assert await self.count(store, OTHER) == {Status.FAILED: 1}

    @pytest.mark.asyncio
    async def test_pruning_walks_over_both(self, store: Store) -> None:
        mine, theirs, here, there = await self._in_both(store)
        await self.publish(store, mine, here)
        page = await store.prune_published(PAST, 100)
        assert page.deleted == 1
        await self.publish(store, theirs, there)
        assert (await store.prune_published(PAST, 100)).deleted == 1

    @pytest.mark.asyncio
    async def test_a_stream_says_how_and_to_where_it_is_served(self, store: Store) -> None:
        await store.add([self.event(stream=OTHER)])
        await store.announce(STREAM, Mode.ORDERED, "kafka one:9092")
        await store.announce(JOBS, Mode.QUEUE, "handlers (8)")
        await store.announce(STREAM, Mode.ORDERED, "kafka two:9092")
        await store.pause(JOBS, "olga")
        found = {each.stream: (each.mode, each.destination, each.paused) for each in await store.gauges()}
        assert found == {
            OTHER: (None, None, False),
            STREAM: (Mode.ORDERED, "kafka two:9092", False),
            JOBS: (Mode.QUEUE, "handlers (8)", True),
        }

    @pytest.mark.asyncio
    async def test_events_are_found_by_topic_and_aggregate(self, store: Store) -> None:
        grant = await self.own(store)
        order, invoice = await self.write(
            store,
            grant,
            self.event(topic="orders", aggregate_type="order", aggregate_id="7"),
            self.event(topic="money", aggregate_type="invoice", aggregate_id="7"),
        )
        for where, wanted in (
            (Filter(topic="orders"), [order.id]),
            (Filter(aggregate_type="invoice"), [invoice.id]),
            (Filter(aggregate_id="7"), [order.id, invoice.id]),
            (Filter(aggregate_id="7", topic="money"), [invoice.id]),
            (Filter(aggregate_id="8"), []),
        ):
            assert [each.event.id for each in await store.find(where, 10, newest_first=False)] == wanted, where
        await settle(store, Settlement(grant, dead=[Failure(each, "refused", 1) for each in (order, invoice)]))
        (letter,) = await store.find_dead(Filter(topic="money"), 10)
        assert letter.event.id == invoice.id
