"""Turns on one shard: reads and settles."""

from datetime import UTC, datetime, timedelta

import pytest

from pillarbox.conformance.store_setup import LONG, MAX_BYTES, PAST, STREAM, StoreSetup, ids, read, settle
from pillarbox.errors import DuplicateEvent, LeaseLost
from pillarbox.event import Status
from pillarbox.ids import uuid7
from pillarbox.store import Failure, Hold, HoldMode, Settlement, Store


class ReadTests(StoreSetup):
    """Reads of an owner."""

    @pytest.mark.asyncio
    async def test_a_stale_owner_reads_nothing(self, store: Store, other: Store) -> None:
        ann = await self.own(store)
        (event,) = await self.write(store, ann, self.event())
        bob = await self.lose(other, ann)
        assert await self.read(store, ann) == []
        assert ids(await self.read(other, bob)) == [event.id]
        await other.give([bob])
        assert await self.read(other, bob) == []

    @pytest.mark.asyncio
    async def test_the_order_is_that_of_seq(self, store: Store) -> None:
        now = datetime.now(UTC)
        identities = sorted(uuid7() for _ in range(6))
        key = self.key()
        events = [
            self.event(id=id, key=key, occurred_at=now + timedelta(days=place)) for place, id in enumerate(identities)
        ][::-1]
        for event in events:
            await store.add([event])
        grant = await self.own(store)
        assert ids(await self.read(store, grant)) == ids(events)

    @pytest.mark.asyncio
    async def test_no_more_is_read_than_the_limit(self, store: Store) -> None:
        events = self.events(5)
        await store.add(events)
        grant = await self.own(store)
        assert ids(await read(store, grant, 3, MAX_BYTES)) == ids(events[:3])
        assert ids(await read(store, grant, 1, MAX_BYTES)) == ids(events[:1])

    @pytest.mark.asyncio
    async def test_no_more_bytes_are_read_than_the_limit(self, store: Store) -> None:
        events = self.events(5, payload=b"x" * 1000)
        await store.add(events)
        grant = await self.own(store)
        assert ids(await read(store, grant, 100, 5000)) == ids(events)
        assert ids(await read(store, grant, 100, 2500)) == ids(events[:2])
        assert ids(await read(store, grant, 100, 2000)) == ids(events[:2])

    @pytest.mark.asyncio
    async def test_one_event_is_read_whatever_its_size(self, store: Store) -> None:
        events = [self.event(payload=b"x" * size) for size in (5000, 10, 10)]
        await store.add(events)
        grant = await self.own(store)
        assert ids(await read(store, grant, 100, 100)) == ids(events[:1])
        assert ids(await read(store, grant, 100, 0)) == ids(events[:1])

    @pytest.mark.asyncio
    async def test_an_empty_event_makes_no_room_for_a_large_one(self, store: Store) -> None:
        events = [self.event(payload=b"x" * size) for size in (0, 0, 5000, 10)]
        await store.add(events)
        grant = await self.own(store)
        assert ids(await read(store, grant, 100, 100)) == ids(events[:2])

    @pytest.mark.asyncio
    async def test_only_what_is_pending_in_the_shard_is_read(self, store: Store) -> None:
        grants = await self.own_all(store)
        published, failed, dead = await self.write(store, grants[0], *self.events(3))
        await self.publish(store, grants[0], published)
        await self.fail_head(store, grants[0], failed)
        await self.kill_head(store, grants[0], dead)
        mine, elsewhere = self.event(), self.event(shard=1)
        later = self.event(available_at=datetime.now(UTC) + timedelta(hours=1))
        await store.add([elsewhere, self.event(stream="invoices"), later, mine])
        assert ids(await self.read(store, grants[0])) == [mine.id]
        assert ids(await self.read(store, grants[1])) == [elsewhere.id]
        assert await self.read(store, grants[2]) == []

    @pytest.mark.asyncio
    async def test_what_is_not_settled_is_read_again(self, store: Store, other: Store) -> None:
        ann = await self.own(store)
        events = await self.write(store, ann, *self.events(3))
        assert await self.read(store, ann) == events
        bob = await self.lose(other, ann)
        assert await self.read(other, bob) == events

    @pytest.mark.asyncio
    async def test_a_late_commit_is_found(self, store: Store, other: Store) -> None:
        self.need_transactions()
        if not self.concurrent_writers:
            pytest.skip("no transaction stays open while others commit")
        grant = await self.own(store)
        late, early = self.event(), self.event()
        async with store.transaction() as tx:
            await store.add([late], tx)
            (second,) = await self.write(other, grant, early)
            await self.publish(other, grant, second)
            assert await self.read(other, grant) == []
        (first,) = await self.read_soon(other, grant, 1)
        assert first.id == late.id
        assert first.seq < second.seq, "seq is given at the insert"
        await self.publish(other, grant, first)
        assert await self.count(store) == {Status.PUBLISHED: 2}


class SettleTests(StoreSetup):
    """Changes by a settle."""

    @pytest.mark.asyncio
    async def test_what_is_published_is_not_read_again(self, store: Store) -> None:
        grant = await self.own(store)
        one, two, three = await self.write(store, grant, *self.events(3))
        assert not await settle(store, Settlement(grant, published=[one, three]))
        assert ids(await self.read(store, grant)) == [two.id]
        assert await self.count(store) == {Status.PUBLISHED: 2, Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_what_need_not_be_kept_is_deleted(self, store: Store) -> None:
        grant = await self.own(store)
        one, two = await self.write(store, grant, *self.events(2))
        await settle(store, Settlement(grant, published=[one], keep_published=False))
        assert await self.count(store) == {Status.PENDING: 1}
        assert ids(await self.read(store, grant)) == [two.id]

    @pytest.mark.asyncio
    async def test_a_stale_owner_settles_nothing(self, store: Store, other: Store) -> None:
        ann = await self.own(store)
        events = await self.write(store, ann, *self.events(5))
        first, second, third, failed, free = events
        assert failed.key is not None
        assert free.key is not None
        await settle(store, Settlement(ann, hold_keys={free.key: Hold(HoldMode.RETRYING, LONG)}))
        bob = await self.lose(other, ann)
        settlements = [
            Settlement(ann, published=[first]),
            Settlement(ann, published=[first], keep_published=False),
            Settlement(ann, dead=[Failure(second, "refused", 1)]),
            Settlement(ann, failed=[Failure(third, "refused", 1, PAST)]),
            Settlement(ann, hold_keys={failed.key: Hold(HoldMode.RETRYING, PAST)}),
            Settlement(ann, held=[free]),
            Settlement(ann, release_keys=[free.key]),
        ]
        for settlement in settlements:
            with pytest.raises(LeaseLost):
                await settle(store, settlement)
            assert await self.count(other) == {Status.PENDING: 5}, settlement
            assert set(await other.held_keys(bob)) == {free.key}, settlement
        assert await self.read(other, bob) == events
        assert not await other.dead_letters()

    @pytest.mark.asyncio
    async def test_whoever_gave_a_shard_back_settles_nothing(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        await store.give([grant])
        with pytest.raises(LeaseLost):
            await self.publish(store, grant, event)
        assert await self.count(store) == {Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_an_expired_lease_that_nobody_took_still_settles(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        await store.renew([grant], PAST)
        await self.publish(store, grant, event)
        assert await self.count(store) == {Status.PUBLISHED: 1}

    @pytest.mark.asyncio
    async def test_a_settle_that_is_repeated_changes_nothing_more(self, store: Store) -> None:
        grant = await self.own(store)
        published, failed, dead, held = await self.write(
            store, grant, *self.events(3), self.event(key=(key := self.key()))
        )
        assert failed.key is not None
        settlement = Settlement(
            grant,
            published=[published],
            failed=[Failure(failed, "refused", 1)],
            dead=[Failure(dead, "refused for good", 1)],
            held=[held],
            hold_keys={failed.key: Hold(HoldMode.RETRYING, PAST)},
        )
        await settle(store, Settlement(grant, hold_keys={key: Hold(HoldMode.RETRYING, LONG)}))
        for _ in range(2):
            assert set(await settle(store, settlement)) == {key, failed.key}
            states = (Status.PUBLISHED, Status.FAILED, Status.DEAD, Status.HELD)
            assert await self.count(store) == dict.fromkeys(states, 1)
        assert len(await store.dead_letters()) == 1
        run = await store.read_due(grant, 10, MAX_BYTES)
        assert run is not None
        assert [event.attempts for event in run.events] == [1]

    @pytest.mark.asyncio
    async def test_what_is_published_stays_so_whatever_a_late_settle_says(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        assert event.key is not None
        await settle(store, Settlement(grant, hold_keys={event.key: Hold(HoldMode.RETRYING, LONG)}))
        await self.publish(store, grant, event)
        await settle(store, Settlement(grant, held=[event], failed=[Failure(event, "refused", 1, PAST)]))
        await settle(store, Settlement(grant, dead=[Failure(event, "refused", 1)]))
        assert await self.count(store) == {Status.PUBLISHED: 1}

    @pytest.mark.asyncio
    async def test_nothing_to_settle(self, store: Store, other: Store) -> None:
        grant = await self.own(store)
        assert not await settle(store, Settlement(grant))

    @pytest.mark.asyncio
    async def test_the_key_of_a_failed_event_is_held(self, store: Store) -> None:
        grant = await self.own(store)
        failed, free = await self.write(store, grant, *self.events(2))
        assert failed.key is not None
        held_now = await settle(
            store,
            Settlement(
                grant, failed=[Failure(failed, "refused", 3)], hold_keys={failed.key: Hold(HoldMode.RETRYING, PAST)}
            ),
        )
        assert set(held_now) == {failed.key}
        assert set(await store.held_keys(grant)) == {failed.key}
        assert await self.count(store) == {Status.FAILED: 1, Status.PENDING: 1}
        assert ids(await self.read(store, grant)) == [free.id]
        run = await store.read_due(grant, 10, MAX_BYTES)
        assert run is not None
        assert (run.key, run.mode) == (failed.key, HoldMode.RETRYING)
        assert [(event.id, event.attempts, event.status) for event in run.events] == [(failed.id, 3, Status.FAILED)]

    @pytest.mark.asyncio
    async def test_what_follows_a_failed_event_is_held(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        head, behind, free = await self.write(store, grant, *self.events(2, key=key), self.event())
        await self.fail_head(store, grant, head, delay=LONG)
        assert set(await settle(store, Settlement(grant, held=[behind], published=[free]))) == {key}
        assert await self.count(store) == {Status.FAILED: 1, Status.HELD: 1, Status.PUBLISHED: 1}
        assert await self.read(store, grant) == []

    @pytest.mark.asyncio
    async def test_nothing_is_held_behind_a_key_that_is_free(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        assert not await settle(store, Settlement(grant, held=[event]))
        assert ids(await self.read(store, grant)) == [event.id], "nobody would ever release it"

    @pytest.mark.asyncio
    async def test_a_dead_event_is_a_dead_letter(self, store: Store) -> None:
        grant = await self.own(store)
        event, keyless = await self.write(
            store, grant, self.event(payload=b"\x00\xff", headers={"a": "b"}), self.event(key=None)
        )
        dead = [Failure(event, "refused for good", 4), Failure(keyless, "too large", 1)]
        await settle(store, Settlement(grant, dead=dead))
        assert await self.count(store) == {Status.DEAD: 2}
        assert await self.read(store, grant) == []
        letters = {letter.event.id: letter for letter in await store.dead_letters(STREAM)}
        for failure in dead:
            letter = letters[failure.event.id]
            assert letter.event == failure.event._replace(status=Status.DEAD, attempts=failure.attempts)
            assert letter.error == failure.error
            assert [line["error"] for line in letter.errors] == [failure.error]
            assert abs(letter.died_at - datetime.now(UTC)) < timedelta(hours=1)

    @pytest.mark.asyncio
    async def test_a_dead_letter_has_the_history_of_its_errors(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        assert event.key is not None
        for attempts, error in enumerate(("first", "second"), 1):
            held_now = {event.key: Hold(HoldMode.RETRYING, PAST)}
            await settle(store, Settlement(grant, failed=[Failure(event, error, attempts)], hold_keys=held_now))
        await settle(store, Settlement(grant, dead=[Failure(event, "third", 3)]))
        (letter,) = await store.dead_letters(STREAM)
        assert [(line["error"], line["attempts"]) for line in letter.errors] == [
            ("first", 1),
            ("second", 2),
            ("third", 3),
        ]

    @pytest.mark.asyncio
    async def test_an_error_may_contain_any_text(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event(key=None))
        error = 'line\r\nnext\u2028separator\u2029\x85\x1c\x0b"quoted" 東京 \U0001f4ee {x} %s'
        await settle(store, Settlement(grant, failed=[Failure(event, error, 1, PAST)]))
        await store.reenter_due(STREAM, 10)
        await settle(store, Settlement(grant, dead=[Failure(event, error, 2)]))
        (letter,) = await store.dead_letters(STREAM)
        assert letter.error == error
        assert [line["error"] for line in letter.errors] == [error, error]

    @pytest.mark.asyncio
    async def test_an_error_that_no_database_can_keep_stops_nothing(self, store: Store) -> None:
        grant = await self.own(store)
        failed, dead = await self.write(store, grant, *self.events(2, key=None))
        # Bytes that a client library could not decode end up like this in the text of its error.
        error = "cannot parse \x00 and \udcff"
        settlement = Settlement(grant, failed=[Failure(failed, error, 1, LONG)], dead=[Failure(dead, error, 1)])
        await settle(store, settlement)
        assert await self.count(store) == {Status.FAILED: 1, Status.DEAD: 1}
        (letter,) = await store.dead_letters(STREAM)
        assert letter.error.startswith("cannot parse ")

    @pytest.mark.asyncio
    async def test_what_follows_in_a_parked_key_dies_too(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        head, second, third, free = await self.write(store, grant, *self.events(3, key=key), self.event())
        await self.kill_head(store, grant, head, second, mode=HoldMode.PARKED)
        assert set(await settle(store, Settlement(grant, held=[third]))) == {key}
        assert await self.count(store) == {Status.DEAD: 3, Status.PENDING: 1}
        letters = await store.dead_letters(STREAM)
        assert {letter.event.id for letter in letters} == {head.id, second.id, third.id}
        assert all(letter.error for letter in letters)
        assert ids(await self.read(store, grant)) == [free.id]

    @pytest.mark.asyncio
    async def test_an_id_that_died_may_die_again(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event(key=None))
        await settle(store, Settlement(grant, dead=[Failure(event, "refused", 1)]))
        try:
            await store.add([event])
        except DuplicateEvent:
            return
        # A settle that raises would be tried forever, and its shard would stand still.
        await settle(store, Settlement(grant, dead=[Failure(event, "refused again", 1)]))
        assert await self.read(store, grant) == []
        assert {letter.event.id for letter in await store.dead_letters(STREAM)} == {event.id}

    @pytest.mark.asyncio
    async def test_a_settle_names_the_held_keys(self, store: Store) -> None:
        grant = await self.own(store)
        held_now, freed, held, free = (self.key() for _ in range(4))
        events = [self.event(key=key) for key in (held_now, freed, held, free)]
        one, two, three, four = await self.write(store, grant, *events)
        for event in (two, three):
            await self.fail_head(store, grant, event, delay=LONG)
        (behind,) = await self.write(store, grant, self.event(key=held))
        settlement = Settlement(
            grant,
            failed=[Failure(one, "refused", 1)],
            published=[two],
            hold_keys={held_now: Hold(HoldMode.RETRYING, LONG)},
            release_keys=[freed],
            held=[behind, four],
        )
        assert set(await settle(store, settlement)) == {held_now, held}
        assert set(await store.held_keys(grant)) == {held_now, held}
