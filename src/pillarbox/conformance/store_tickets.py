"""Tickets: what a destination keeps of a shard, and what the store makes of it after a crash."""

import pytest

from pillarbox.conformance.store_setup import LONG, PAST, SHARDS, STREAM, StoreSetup, refs, settle
from pillarbox.errors import ConfigError, LeaseLost, ProgressError, StoreError
from pillarbox.event import Event, Status
from pillarbox.store import Failure, Grant, Hold, HoldMode, Progress, Settlement, Store, batch_of, new_ticket


class TicketTests(StoreSetup):
    """A batch that was published is settled once, by its owner or by the next one."""

    @pytest.fixture(autouse=True)
    def _with_transactions(self) -> None:
        self.need_transactions()

    async def settled(self, store: Store, grant: Grant, *events: Event) -> bytes:
        """Settle a batch; returns its ticket."""
        before = (await store.settle_ticket(grant, b"")).batch
        ticket = new_ticket(events, before)
        await settle(store, Settlement(grant, published=events, ticket=ticket))
        return ticket

    @pytest.mark.asyncio
    async def test_a_shard_without_progress_has_nothing_to_settle(self, store: Store) -> None:
        grant = await self.own(store)
        await self.write(store, grant, self.event())
        assert await store.settle_ticket(grant, b"") == Progress(None)
        assert await self.count(store) == {Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_a_batch_is_settled_by_the_next_owner(self, store: Store, other: Store) -> None:
        ann = await self.own(store)
        one, two, three = await self.write(store, ann, *self.events(3))
        ticket = new_ticket([one, two], None)
        bob = await self.lose(other, ann)
        assert await other.settle_ticket(bob, ticket) == Progress(batch_of(ticket), 2)
        assert await self.read(other, bob) == [three]
        assert await other.settle_ticket(bob, ticket) == Progress(batch_of(ticket))
        following = new_ticket([three], batch_of(ticket))
        assert await other.settle_ticket(bob, following) == Progress(batch_of(following), 1)

    @pytest.mark.asyncio
    async def test_a_settled_batch_is_not_settled_again(self, store: Store, other: Store) -> None:
        ann = await self.own(store)
        (event,) = await self.write(store, ann, self.event())
        ticket = await self.settled(store, ann, event)
        assert await store.replay_published(refs(event), "olga")
        bob = await self.lose(other, ann)
        assert await other.settle_ticket(bob, ticket) == Progress(batch_of(ticket))
        assert Status.PUBLISHED not in await self.count(store), "the replay was not published yet"

    @pytest.mark.asyncio
    async def test_a_deleted_batch_is_settled_too(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        ticket = new_ticket([event], None)
        await settle(store, Settlement(grant, published=[event], keep_published=False, ticket=ticket))
        assert await self.count(store) == {}
        assert await store.settle_ticket(grant, ticket, keep_published=False) == Progress(batch_of(ticket))

    @pytest.mark.asyncio
    async def test_where_nothing_is_kept_the_events_are_deleted(self, store: Store) -> None:
        grant = await self.own(store)
        event, left = await self.write(store, grant, *self.events(2))
        ticket = new_ticket([event], None)
        assert await store.settle_ticket(grant, ticket, keep_published=False) == Progress(batch_of(ticket), 1)
        assert await self.read(store, grant) == [left]
        assert await self.count(store) == {Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_a_stale_owner_settles_no_batch(self, store: Store, other: Store) -> None:
        ann = await self.own(store)
        (event,) = await self.write(store, ann, self.event())
        bob = await self.lose(other, ann)
        ticket = new_ticket([event], None)
        for asked in (b"", ticket):
            with pytest.raises(LeaseLost):
                await store.settle_ticket(ann, asked)
        with pytest.raises(LeaseLost):
            await settle(store, Settlement(ann, published=[event], ticket=ticket))
        assert await other.settle_ticket(bob, b"") == Progress(None), "its batch must not count as settled"
        assert await self.count(other) == {Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_events_of_a_held_key_are_settled_too(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        head, behind = await self.write(store, grant, self.event(key=key), self.event(key=key))
        await self.fail_head(store, grant, head, behind)
        ticket = new_ticket([head, behind], None)
        assert await store.settle_ticket(grant, ticket) == Progress(batch_of(ticket), 2)
        assert await self.count(store) == {Status.PUBLISHED: 2}
        run = await store.read_due(grant, 10, 1000)
        assert run is not None
        assert not run.events
        await settle(store, Settlement(grant, release_keys=[key]))
        assert not await store.held_keys(grant)

    @pytest.mark.asyncio
    async def test_a_batch_is_noted_with_what_else_is_settled(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        published, following, held = await self.write(store, grant, *self.events(2), self.event(key=key))
        await settle(store, Settlement(grant, hold_keys={key: Hold(HoldMode.RETRYING, LONG)}))
        ticket = new_ticket([published], None)
        settlement = Settlement(grant, published=[published], held=[held], ticket=ticket)
        for _ in range(2):  # the first answer may be lost
            assert await settle(store, settlement) == {key}
            assert await store.settle_ticket(grant, ticket) == Progress(batch_of(ticket))
        assert await self.count(store) == {Status.PUBLISHED: 1, Status.HELD: 1, Status.PENDING: 1}
        after = new_ticket([following], batch_of(ticket))
        assert await store.settle_ticket(grant, after) == Progress(batch_of(after), 1)

    @pytest.mark.asyncio
    async def test_a_settlement_without_a_batch_leaves_the_last_one(self, store: Store) -> None:
        grant = await self.own(store)
        first, second, third = await self.write(store, grant, *self.events(3))
        ticket = await self.settled(store, grant, first)
        await settle(store, Settlement(grant, dead=[Failure(second, "refused", 1)]))
        following = new_ticket([third], batch_of(ticket))
        assert await store.settle_ticket(grant, following) == Progress(batch_of(following), 1)

    @pytest.mark.asyncio
    async def test_events_that_are_gone_are_named(self, store: Store) -> None:
        grant = await self.own(store)
        event, gone = await self.write(store, grant, *self.events(2))
        await settle(store, Settlement(grant, published=[gone], keep_published=False))
        ticket = new_ticket([gone, event], None)
        assert await store.settle_ticket(grant, ticket) == Progress(batch_of(ticket), 1, (gone.id,))

    @pytest.mark.asyncio
    async def test_what_does_not_fit_is_refused(self, store: Store) -> None:
        grant = await self.own(store)
        events = await self.write(store, grant, *self.events(3))
        first = await self.settled(store, grant, events[0])
        second = new_ticket([events[1]], batch_of(first))
        third = new_ticket([events[2]], batch_of(second))
        with pytest.raises(ProgressError, match=r"do not agree.*pillarbox identity --new"):
            await store.settle_ticket(grant, third)
        for unknown in (b"\x07" + third[1:], third[:-3]):
            with pytest.raises(ProgressError, match="cannot be read"):
                await store.settle_ticket(grant, unknown)
        with pytest.raises(ProgressError, match="progress topic was deleted"):
            await store.settle_ticket(grant, b"")
        assert await self.count(store) == {Status.PUBLISHED: 1, Status.PENDING: 2}
        assert (await store.settle_ticket(grant, second)).settled == 1

    @pytest.mark.asyncio
    async def test_the_last_settled_batch_is_told_to_the_owner(self, store: Store, other: Store) -> None:
        ann, *_ = await self.own_all(store)
        one, two = await self.write(store, ann, *self.events(2))
        assert await store.settled_batch(ann) is None
        ticket = await self.settled(store, ann, one)
        assert await store.settled_batch(ann) == batch_of(ticket)
        bob = await self.lose(other, ann)
        following = new_ticket([two], batch_of(ticket))
        await other.settle_ticket(bob, following)
        assert await other.settled_batch(bob) == batch_of(following)
        with pytest.raises(LeaseLost):
            await store.settled_batch(ann)

    @pytest.mark.asyncio
    async def test_a_batch_that_does_not_follow_the_last_one_is_not_settled(self, store: Store) -> None:
        grant = await self.own(store)
        one, two, three = await self.write(store, grant, *self.events(3))
        unknown = new_ticket([one], None)
        with pytest.raises(LeaseLost):
            await settle(store, Settlement(grant, published=[two], ticket=new_ticket([two], batch_of(unknown))))
        ticket = await self.settled(store, grant, one)
        for before in (None, batch_of(unknown)):
            with pytest.raises(LeaseLost):
                await settle(store, Settlement(grant, published=[two], ticket=new_ticket([two], before)))
        assert await store.settled_batch(grant) == batch_of(ticket)
        assert await self.read(store, grant) == [two, three]

    @pytest.mark.asyncio
    async def test_shards_and_streams_have_progress_of_their_own(self, store: Store) -> None:
        grants = await self.own_all(store)
        other = await self.own(store, stream="invoices")
        (event,) = await self.write(store, grants[0], self.event())
        ticket = await self.settled(store, grants[0], event)
        assert await store.settle_ticket(grants[1], b"") == Progress(None)
        assert await store.settle_ticket(other, b"") == Progress(None)
        await store.give(grants)
        again = await self.own(store)
        assert await store.settle_ticket(again, ticket) == Progress(batch_of(ticket))


class OutboxIdentityTests(StoreSetup):
    """The name of an outbox for destinations."""

    @pytest.mark.asyncio
    async def test_an_outbox_keeps_its_identity(self, store: Store, other: Store) -> None:
        identity = await store.identity()
        assert identity
        assert await other.identity() == identity
        await store.migrate()
        assert await store.identity() == identity

    @pytest.mark.asyncio
    async def test_a_new_identity_forgets_what_was_settled(self, store: Store) -> None:
        self.need_transactions()
        grants = await self.own_all(store)
        (event,) = await self.write(store, grants[0], self.event())
        await settle(store, Settlement(grants[0], published=[event], ticket=new_ticket([event], None)))
        with pytest.raises(StoreError, match="is served by ann; stop its relays"):
            await store.set_identity("shop-2")
        await store.renew(grants, PAST)
        await store.set_identity("shop-2")
        assert await store.identity() == "shop-2"
        again = sorted(await store.take(STREAM, "ann", SHARDS, LONG), key=lambda grant: grant.shard)
        assert await store.settle_ticket(again[0], b"") == Progress(None)

    @pytest.mark.asyncio
    async def test_a_name_that_kafka_would_not_take_is_refused(self, store: Store) -> None:
        for identity in ("", "a.b", "a b", "x" * 61):
            with pytest.raises(ConfigError, match="identity"):
                await store.set_identity(identity)
