"""The schema, and writing into it."""

import asyncio
import itertools
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Final

import pytest

from pillarbox.conformance.store_setup import SHARDS, STREAM, Connect, StoreSetup, ids, settle
from pillarbox.errors import DuplicateEvent, SchemaError
from pillarbox.event import Event, Status
from pillarbox.store import Settlement, Store

PAYLOADS: Final = (
    b"",
    b"{}",
    b'{ "spaced" :  1.0, "b": 1e2, "a": [ ] , "b": 2 }\r\n',
    '{"name":"Zoë 東京 \U0001f4ee\u2028"}'.encode(),
    b"\x00\xff\xfe\r\n\x80 not text",
    b"\\x00 %s {} :name $1 ? '",
    bytes(range(256)) * 4096,
)
TEXT: Final = "Zoë 'quoted\" 東京 \U0001f4ee\u2028 \u05d0 \\n %s {x} :x $1 ?\ttab\nline"


class SchemaTests(StoreSetup):
    """The tables and their version."""

    @pytest.mark.asyncio
    async def test_describes_itself(self, store: Store) -> None:
        assert store.features == self.features
        assert store.description.strip()

    @pytest.mark.asyncio
    async def test_migrating_again_changes_nothing(self, connect: Connect) -> None:
        store = connect()
        assert await store.migrate(), "a new outbox needs at least one step"
        await store.open()
        await store.add([self.event()])
        assert not await store.migrate()
        await store.open()
        await store.close()
        assert await self.count(store) == {Status.PENDING: 1}, "it was opened twice, and closed once"
        await store.close()

    @pytest.mark.asyncio
    async def test_two_migrations_at_once(self, connect: Connect) -> None:
        stores = [connect(), connect()]
        run = await asyncio.gather(*(store.migrate() for store in stores))
        assert sorted(map(bool, run)) == [False, True], "every step is run once"
        for store in stores:
            await store.open()
        await stores[0].add([self.event()])
        assert await self.count(stores[1]) == {Status.PENDING: 1}
        for store in stores:
            await store.close()

    @pytest.mark.asyncio
    async def test_missing_tables_name_the_remedy(self, connect: Connect) -> None:
        store = connect()
        with pytest.raises(SchemaError, match="migrate"):
            await store.open()
        await store.migrate()
        await store.open()
        await store.add([self.event()])
        assert await self.count(store) == {Status.PENDING: 1}
        await store.close()

    @pytest.mark.asyncio
    async def test_a_schema_of_a_newer_release_is_refused(self, store: Store, connect: Connect) -> None:
        await self.set_schema_version(store, 999)
        late = connect()
        with pytest.raises(SchemaError, match="999"):
            await late.open()
        await late.close()

    @pytest.mark.asyncio
    async def test_a_schema_of_an_older_release_names_the_remedy(self, store: Store, connect: Connect) -> None:
        await self.set_schema_version(store, 0)
        late = connect()
        with pytest.raises(SchemaError, match="migrate"):
            await late.open()
        await late.close()

    @pytest.mark.asyncio
    async def test_the_number_of_shards_belongs_to_the_outbox(self, store: Store, connect: Connect) -> None:
        late = connect(shards=2 * SHARDS + 1)
        await late.open()
        await self.join(late, STREAM, "ann", 60)
        assert len(await late.take(STREAM, "ann", 100, 60)) == SHARDS
        await late.close()

    @pytest.mark.asyncio
    async def test_opened_and_closed_twice(self, connect: Connect) -> None:
        store = connect()
        await store.migrate()
        await store.open()
        await store.open()
        await store.add([self.event()])
        await store.close()
        await store.close()


class WritingTests(StoreSetup):
    """Writing events, in transactions."""

    @pytest.mark.asyncio
    async def test_every_field_comes_back(self, store: Store) -> None:
        occurred_at = datetime(2024, 2, 29, 23, 59, 59, 123000, tzinfo=timezone(timedelta(hours=5, minutes=30)))
        full = self.event(
            type="order.created",
            topic="orders.v1",
            tenant="acme",
            aggregate_type="order",
            aggregate_id="7",
            aggregate_version=2**40,
            routing_key="eu.orders",
            content_type="application/cbor",
            schema_id="urn:order",
            schema_version="1.2",
            headers={"traceparent": "00-1", "empty": "", "Ünï": "Zoë \U0001f4ee"},
            occurred_at=occurred_at,
            max_attempts=9,
        )
        bare = self.event(key=None)
        for event in (full, bare):
            await store.add([event])
        grant = await self.own(store)
        back = await self.read(store, grant)
        assert ids(back) == ids([full, bare])
        for event, wanted in zip(back, (full, bare), strict=True):
            assert event == self._as_stored(wanted, event)
            happened = occurred_at if wanted is full else event.created_at
            assert abs(event.occurred_at - happened) < timedelta(milliseconds=1)
            assert event.occurred_at.utcoffset() == event.created_at.utcoffset() == timedelta(0)
            assert abs(event.created_at - datetime.now(UTC)) < timedelta(hours=1), "the instant it was written"

    @pytest.mark.asyncio
    async def test_the_payload_comes_back_byte_for_byte(self, store: Store) -> None:
        events = [self.event(payload=payload) for payload in PAYLOADS]
        back = await self.write(store, await self.own(store), *events)
        for event, wanted in zip(back, events, strict=True):
            assert event.payload == wanted.payload, f"changed: {wanted.payload[:60]!r}"
            assert type(event.payload) is bytes

    @pytest.mark.asyncio
    async def test_text_comes_back_as_it_was(self, store: Store) -> None:
        names = ("type", "topic", "tenant", "routing_key", "aggregate_type", "aggregate_id")
        fields: dict[str, Any] = dict.fromkeys((*names, "content_type", "schema_id", "schema_version"), TEXT)
        event = self.event(key=f"{TEXT}{self.key()}", headers={TEXT: TEXT}, **fields)
        await store.add([event])
        grants = await self.own_all(store)
        (back,) = [event for grant in grants for event in await self.read(store, grant)]
        assert back == self._as_stored(event, back)

    def _as_stored(self, event: Event, back: Event) -> Event:
        return event._replace(seq=back.seq, created_at=back.created_at, occurred_at=back.occurred_at)

    @pytest.mark.asyncio
    async def test_seq_follows_the_order_of_writing(self, store: Store, other: Store) -> None:
        events = self.events(6)
        grant = await self.own(store)
        await store.add(events[:3])
        await other.add(events[3:4])
        await store.add(events[4:])
        back = await self.read(store, grant)
        assert ids(back) == ids(events)
        assert all(one.seq < two.seq for one, two in itertools.pairwise(back))

    @pytest.mark.asyncio
    async def test_a_seq_is_never_given_again(self, store: Store) -> None:
        grant = await self.own(store)
        first = await self.write(store, grant, *self.events(3))
        await settle(store, Settlement(grant, published=first, keep_published=False))
        (second,) = await self.write(store, grant, self.event())
        assert second.seq > first[-1].seq

    @pytest.mark.asyncio
    async def test_writing_nothing(self, store: Store) -> None:
        await store.add([])
        async with store.transaction() as tx:
            await store.add([], tx)
        assert await self.count(store) == {}

    @pytest.mark.asyncio
    async def test_a_committed_transaction_leaves_all_of_it(self, store: Store, other: Store) -> None:
        async with store.transaction() as tx:
            await store.add(self.events(2), tx)
            await store.add(self.events(1), tx)
        assert await self.count(other) == {Status.PENDING: 3}

    @pytest.mark.asyncio
    async def test_a_rolled_back_transaction_leaves_nothing(self, store: Store, other: Store) -> None:
        self.need_transactions()
        event = self.event()
        with pytest.raises(ZeroDivisionError):
            await self._add_and_break(store, event)
        grant = await self.own(store)
        for connection in (store, other):
            assert await self.count(connection) == {}
            assert await self.read(connection, grant) == []
        await store.add([event])
        assert ids(await self.read(store, grant)) == [event.id]

    async def _add_and_break(self, store: Store, event: Event) -> None:
        async with store.transaction() as tx:
            await store.add([event], tx)
            raise ZeroDivisionError

    @pytest.mark.asyncio
    async def test_an_event_is_invisible_until_the_commit(self, store: Store, other: Store) -> None:
        self.need_transactions()
        if other is store:
            pytest.skip("needs a second connection")
        grant = await self.own(store)
        async with store.transaction() as tx:
            await store.add([self.event()], tx)
            assert await self.count(other) == {}
            assert await self.read(other, grant) == []
            assert not (await other.poll(STREAM, "ann", [grant])).ready
        assert len(await self.read(other, grant)) == 1

    @pytest.mark.asyncio
    async def test_an_id_is_written_once(self, store: Store, other: Store) -> None:
        self.need_transactions()
        event = self.event(payload=b"first")
        grant = await self.own(store)
        await store.add([event])
        for again in ([event._replace(payload=b"second")], [self.event(), event], [event, self.event()]):
            with pytest.raises(DuplicateEvent):
                await other.add(again)
        (back,) = await self.read(store, grant)
        assert back.payload == b"first"

    @pytest.mark.asyncio
    async def test_a_duplicate_takes_its_transaction_with_it(self, store: Store) -> None:
        self.need_transactions()
        event, new = self.event(), self.event()
        grant = await self.own(store)
        await store.add([event])
        with pytest.raises(DuplicateEvent):
            await self._add_twice(store, new, event)
        assert ids(await self.read(store, grant)) == [event.id]
        await store.add([new])
        assert ids(await self.read(store, grant)) == [event.id, new.id]

    async def _add_twice(self, store: Store, new: Event, duplicate: Event) -> None:
        async with store.transaction() as tx:
            await store.add([new], tx)
            await store.add([duplicate], tx)

    @pytest.mark.asyncio
    async def test_an_id_that_is_published_is_still_taken(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        await self.publish(store, grant, event)
        with pytest.raises(DuplicateEvent):
            await store.add([event])
        assert await self.count(store) == {Status.PUBLISHED: 1}

    @pytest.mark.asyncio
    async def test_a_cancelled_write_leaves_the_store_usable(self, store: Store, other: Store) -> None:
        self.need_transactions()
        for steps in range(12):
            event = self.event()
            task = asyncio.create_task(store.add([event]))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            is_there = await self._is_there(other, event)
            for connection in (store, other):
                await connection.add([self.event()])
            assert await self._is_there(other, event) == is_there, "what was called back is there or not, for good"

    async def _is_there(self, store: Store, event: Event) -> bool:
        try:
            async with store.transaction() as tx:
                await store.add([event], tx)
                raise ZeroDivisionError
        except DuplicateEvent:
            return True
        except ZeroDivisionError:
            return False
