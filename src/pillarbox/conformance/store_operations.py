"""Retention, and the actions of operators."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from pillarbox.conformance.store_setup import (
    JOBS,
    LEASE,
    LONG,
    MAX_BYTES,
    PAST,
    STREAM,
    AuditRow,
    StoreSetup,
    ids,
    refs,
    settle,
)
from pillarbox.event import Event, Status
from pillarbox.store import ClaimResults, Failure, Grant, Hold, HoldMode, Settlement, Store


class RetentionTests(StoreSetup):
    """Nothing unpublished is ever pruned."""

    async def _prune(self, store: Store, keep_seconds: float, limit: int = 100) -> int:
        """Prune all pages."""
        deleted, after = 0, None
        for _ in range(30):
            page = await store.prune_published(keep_seconds, limit, after)
            assert page.deleted <= limit
            deleted, after = deleted + page.deleted, page.after
            if after is None:
                return deleted
        pytest.fail("the walk never ends")

    @pytest.mark.asyncio
    async def test_only_what_is_published_is_pruned(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        head, held, gone, keyless, _ = await self.write(
            store, grant, *self.events(2, key=key), self.event(), self.event(key=None), self.event()
        )
        await store.add([self.event(available_at=datetime.now(UTC) + timedelta(hours=1))])
        await store.add(self.events(2, stream=JOBS, key=None))
        await store.claim(JOBS, 0, "ann", 1, LEASE)
        await self.fail_head(store, grant, head, held, delay=LONG)
        failed = [Failure(keyless, "refused", 1, LONG)]
        await settle(store, Settlement(grant, published=[gone], failed=failed))
        waiting = {Status.PENDING: 1, Status.FAILED: 2, Status.HELD: 1, Status.SCHEDULED: 1}
        assert await self.count(store) == waiting | {Status.PUBLISHED: 1}
        assert await self._prune(store, PAST) == 1
        assert await self.count(store) == waiting
        assert await self.count(store, JOBS) == {Status.PENDING: 1, Status.PROCESSING: 1}

    @pytest.mark.asyncio
    async def test_what_is_young_is_kept(self, store: Store) -> None:
        grant = await self.own(store)
        events = await self.write(store, grant, *self.events(3))
        await self.publish(store, grant, *events)
        assert await self._prune(store, LONG) == 0
        assert await self.count(store) == {Status.PUBLISHED: 3}

    @pytest.mark.asyncio
    async def test_the_pages_of_a_prune_walk_everything(self, store: Store) -> None:
        grant = await self.own(store)
        events = await self.write(store, grant, *self.events(20))
        await self.publish(store, grant, *events[:3], *events[5:14], events[19])
        assert await self._prune(store, PAST, limit=4) == 13
        assert await self.count(store) == {Status.PENDING: 7}

    @pytest.mark.asyncio
    async def test_a_published_event_is_pruned_whatever_its_id(self, store: Store) -> None:
        grant = await self.own(store)
        identities = [UUID(int=1), UUID("7" * 32), UUID("f" * 31 + "0")]
        events = await self.write(store, grant, *(self.event(id=id) for id in identities))
        await self.publish(store, grant, *events)
        assert await self._prune(store, PAST, limit=2) == 3
        assert await self.count(store) == {}

    @pytest.mark.asyncio
    async def test_old_dead_letters_are_pruned(self, store: Store) -> None:
        grant = await self.own(store)
        events = await self.write(store, grant, *self.events(2), *self.events(2, key=None))
        await settle(store, Settlement(grant, dead=[Failure(event, "refused", 1) for event in events]))
        assert await store.prune_dead(LONG, 100) == 0
        assert len(await store.dead_letters()) == 4
        assert await store.prune_dead(PAST, 3) == 3
        assert await store.prune_dead(PAST, 3) == 1
        assert not await store.dead_letters()

    @pytest.mark.asyncio
    async def test_a_dead_letter_that_an_operator_needs_is_kept(self, store: Store) -> None:
        grant = await self.own(store)
        blocked, parked, retried = await self.write(store, grant, *self.events(3))
        await self.kill_head(store, grant, blocked)
        await self.kill_head(store, grant, parked, mode=HoldMode.PARKED)
        assert retried.key is not None
        dead = [Failure(retried, "refused", 1)]
        await settle(store, Settlement(grant, dead=dead, hold_keys={retried.key: Hold(HoldMode.RETRYING, LONG)}))
        assert await store.prune_dead(PAST, 100) == 1
        assert {letter.event.id for letter in await store.dead_letters()} == {blocked.id, parked.id}

    @pytest.mark.asyncio
    async def test_old_rows_of_the_inbox_are_pruned(self, store: Store) -> None:
        await self.remember(store, "inbox", 4)
        assert await store.prune_inbox(LONG, 100) == 0
        assert await store.prune_inbox(PAST, 0) == 0
        assert [await store.prune_inbox(PAST, 3) for _ in range(3)] == [3, 1, 0]

    @pytest.mark.asyncio
    async def test_old_idempotency_keys_are_pruned_whatever_their_state(self, store: Store) -> None:
        await self.remember(store, "idempotency", 4)
        assert await store.prune_idempotency(LONG, 100) == 0
        assert await store.prune_idempotency(PAST, 0) == 0
        assert [await store.prune_idempotency(PAST, 3) for _ in range(3)] == [3, 1, 0]


class SteeringTests(StoreSetup):
    """Streams and their events."""

    @pytest.mark.asyncio
    async def test_pausing_and_resuming_is_audited(self, store: Store) -> None:
        await store.pause(STREAM, "olga")
        await store.resume(STREAM, "igor")
        assert list(await self.audit(store)) == [
            AuditRow("olga", "pause", STREAM, None),
            AuditRow("igor", "resume", STREAM, None),
        ]

    @pytest.mark.asyncio
    async def test_a_stream_that_nobody_serves_is_named(self, store: Store) -> None:
        assert not await store.unserved()
        await store.add([self.event(), self.event(stream="invoices"), self.event(stream="letters")])
        await self.join(store, "letters", "ann", LEASE)
        assert sorted(await store.unserved()) == ["invoices", STREAM]
        grant = await self.own(store)
        assert list(await store.unserved()) == ["invoices"]
        await self.join(store, "letters", "ann", PAST)
        assert sorted(await store.unserved()) == ["invoices", "letters"]
        await self.publish(store, grant, *await self.read(store, grant))
        await store.leave(STREAM, "ann")
        assert sorted(await store.unserved()) == ["invoices", "letters"], "nothing waits in the first any more"

    @pytest.mark.asyncio
    async def test_failed_and_scheduled_events_wait_for_a_worker_too(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event())
        await self.fail_head(store, grant, event)
        await store.leave(STREAM, "ann")
        await store.add([self.event(stream="letters", available_at=datetime.now(UTC) - timedelta(hours=1))])
        assert sorted(await store.unserved()) == ["letters", STREAM]

    @pytest.mark.asyncio
    async def test_events_are_counted_by_state(self, store: Store, other: Store) -> None:
        assert await self.count(store) == {}
        grant = await self.own(store)
        one, two, three, _ = await self.write(store, grant, *self.events(4))
        await store.add(self.events(2, stream="invoices"))
        await self.publish(store, grant, one)
        await self.fail_head(store, grant, two)
        await settle(store, Settlement(grant, dead=[Failure(three, "refused", 1)]))
        states = (Status.PUBLISHED, Status.FAILED, Status.DEAD, Status.PENDING)
        assert await self.count(other) == dict.fromkeys(states, 1)
        assert await self.count(other, "invoices") == {Status.PENDING: 2}

    @pytest.mark.asyncio
    async def test_dead_letters_are_listed_by_stream(self, store: Store) -> None:
        listed = {}
        for stream in (STREAM, "invoices"):
            grant = await self.own(store, stream=stream)
            events = await self.write(store, grant, *self.events(3, stream=stream))
            await settle(store, Settlement(grant, dead=[Failure(event, "refused", 1) for event in events]))
            listed[stream] = ids(events)
        for stream, wanted in listed.items():
            assert [letter.event.id for letter in await store.dead_letters(stream)] == wanted
        assert len(await store.dead_letters()) == 6
        assert len(await store.dead_letters(limit=4)) == 4
        assert not await store.dead_letters("letters")


class OperatorTests(StoreSetup):
    """Replaying and discarding dead letters."""

    async def _kill(self, store: Store, mode: HoldMode, count: int = 3) -> tuple[Grant, str, list[Event]]:
        """A key whose head is dead, with events behind it."""
        grant = await self.own(store)
        key = self.key()
        events = await self.write(store, grant, *self.events(count, key=key))
        await self.kill_head(store, grant, *events, mode=mode)
        return grant, key, events

    async def _due(self, store: Store, grant: Grant) -> list[UUID] | None:
        run = await self.read_due(store, grant)
        is_due = grant.shard in (await store.poll(STREAM, "ann", [grant])).due
        assert is_due == (run is not None)
        return None if run is None else ids(run[1])

    @pytest.mark.asyncio
    async def test_a_replayed_event_is_pending_again(self, store: Store) -> None:
        grant = await self.own(store)
        events = await self.write(
            store, grant, self.event(payload=b"\x00\xff", headers={"a": "b"}), self.event(key=None), self.event()
        )
        dead = [Failure(event, "refused", 5) for event in events[:2]]
        await settle(store, Settlement(grant, dead=dead))
        assert await store.replay(refs(*events[:2]), "olga") == 2
        found = await self.read_soon(store, grant, 3)
        wanted = (events[2], *events[:2])
        assert [event._replace(seq=0) for event in found] == [event._replace(seq=0) for event in wanted]
        assert not await store.dead_letters()
        assert await self.count(store) == {Status.PENDING: 3}
        await self.publish(store, grant, *found)
        assert await self.count(store) == {Status.PUBLISHED: 3}

    @pytest.mark.asyncio
    async def test_a_replayed_event_that_dies_again_keeps_its_history(self, store: Store) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event(key=None))
        await settle(store, Settlement(grant, dead=[Failure(event, "once", 1)]))
        await store.replay(refs(event), "olga")
        await settle(store, Settlement(grant, dead=[Failure(event, "twice", 1)]))
        (letter,) = await store.dead_letters()
        assert [line["error"] for line in letter.errors] == ["once", "twice"]

    @pytest.mark.asyncio
    async def test_what_is_not_dead_is_neither_replayed_nor_discarded(self, store: Store) -> None:
        grant = await self.own(store)
        pending, published, dead = await self.write(store, grant, *self.events(3))
        await settle(store, Settlement(grant, published=[published], dead=[Failure(dead, "refused", 1)]))
        unknown = refs(pending, published, self.event())
        assert await store.replay(unknown, "olga") == 0
        assert await store.discard(unknown, "olga") == 0
        assert await store.replay([], "olga") == 0
        assert await store.replay([*unknown, *refs(dead)], "olga") == 1
        assert await store.replay(refs(dead), "olga") == 0
        assert await self.count(store) == {Status.PENDING: 2, Status.PUBLISHED: 1}
        assert list(await self.audit(store)) == [AuditRow("olga", "replay", STREAM, dead.id)]

    @pytest.mark.asyncio
    async def test_a_discarded_event_is_gone_for_good(self, store: Store) -> None:
        grant = await self.own(store)
        one, two = await self.write(store, grant, *self.events(2))
        await settle(store, Settlement(grant, dead=[Failure(event, "refused", 1) for event in (one, two)]))
        assert await store.discard(refs(one), "igor") == 1
        assert await self.count(store) == {Status.DEAD: 1}
        assert await store.replay(refs(one), "igor") == 0
        assert list(await self.audit(store)) == [AuditRow("igor", "discard", STREAM, one.id)]

    @pytest.mark.asyncio
    async def test_replaying_the_head_of_a_blocked_key_lets_it_go_on_in_order(self, store: Store) -> None:
        grant, key, events = await self._kill(store, HoldMode.BLOCKED)
        assert await self._due(store, grant) is None
        assert await store.replay(refs(events[0]), "olga") == 1
        assert await self.read(store, grant) == [], "pending, it would be read beside its key"
        assert await self._due(store, grant) == ids(events)
        run = await self.read_due(store, grant)
        assert run is not None
        assert run[1][0].attempts == 0
        assert not await settle(store, Settlement(grant, published=run[1], release_keys=[key]))
        assert not await store.held_keys(grant)

    @pytest.mark.asyncio
    async def test_discarding_the_head_of_a_blocked_key_lets_it_go_on(self, store: Store) -> None:
        grant, key, events = await self._kill(store, HoldMode.BLOCKED)
        assert await store.discard(refs(events[0]), "olga") == 1
        assert await self._due(store, grant) == ids(events[1:])
        assert not await settle(store, Settlement(grant, published=events[1:], release_keys=[key]))

    @pytest.mark.asyncio
    async def test_a_discarded_head_with_nothing_behind_leaves_a_key_to_release(self, store: Store) -> None:
        grant, key, events = await self._kill(store, HoldMode.BLOCKED, 1)
        await store.discard(refs(events[0]), "olga")
        assert await self._due(store, grant) == []
        assert not await settle(store, Settlement(grant, release_keys=[key]))
        assert not await store.held_keys(grant)

    @pytest.mark.asyncio
    async def test_a_parked_key_goes_on_when_its_head_is_decided(self, store: Store) -> None:
        grant, key, events = await self._kill(store, HoldMode.PARKED)
        assert await self.count(store) == {Status.DEAD: 3}
        await store.replay(refs(events[1]), "olga")
        assert await self._due(store, grant) is None
        assert await self.read(store, grant) == []
        await store.discard(refs(events[2]), "olga")
        assert await self._due(store, grant) is None
        assert set(await store.held_keys(grant)) == {key}
        await store.replay(refs(events[0]), "olga")
        assert await self._due(store, grant) == ids(events[:2])

    @pytest.mark.asyncio
    async def test_a_parked_key_is_replayed_as_a_whole_in_order(self, store: Store) -> None:
        grant, key, events = await self._kill(store, HoldMode.PARKED)
        assert await store.replay(refs(*events[::-1]), "olga") == 3
        assert await self._due(store, grant) == ids(events)
        assert not await settle(store, Settlement(grant, published=events, release_keys=[key]))

    @pytest.mark.asyncio
    async def test_a_turn_that_read_a_parked_key_does_not_park_it_again(self, store: Store) -> None:
        grant, key, events = await self._kill(store, HoldMode.PARKED)
        await store.discard(refs(events[0]), "olga")
        # What the turn decided before the operator acted.
        await settle(store, Settlement(grant, hold_keys={key: Hold(HoldMode.PARKED, None, events[0].id)}))
        run = await store.read_due(grant, 10, MAX_BYTES)
        assert run is not None, "nobody would ever free the key again"
        assert run.mode is HoldMode.RETRYING

    @pytest.mark.asyncio
    async def test_a_replay_makes_a_waiting_key_due_now(self, store: Store) -> None:
        grant = await self.own(store)
        key = self.key()
        dead, failed = await self.write(store, grant, *self.events(2, key=key))
        await settle(store, Settlement(grant, dead=[Failure(dead, "refused", 1)]))
        await self.fail_head(store, grant, failed, delay=LONG)
        assert await self._due(store, grant) is None
        await store.replay(refs(dead), "olga")
        assert await self._due(store, grant) == ids([dead, failed])

    @pytest.mark.asyncio
    async def test_acting_on_one_key_leaves_another_as_it_is(self, store: Store) -> None:
        grant = await self.own(store)
        one, two = await self.write(store, grant, *self.events(2))
        for event in (one, two):
            await self.kill_head(store, grant, event)
        await store.replay(refs(one), "olga")
        assert await self._due(store, grant) == [one.id]
        await settle(store, Settlement(grant, published=[one], release_keys=[str(one.key)]))
        assert set(await store.held_keys(grant)) == {two.key}
        assert await self._due(store, grant) is None

    @pytest.mark.asyncio
    async def test_a_replayed_event_of_a_queue_is_claimed_again(self, store: Store) -> None:
        await store.add(self.events(1, stream=JOBS))
        (claim,) = await store.claim(JOBS, 0, "ann", 10, LEASE)
        await store.settle_claims([claim], ClaimResults(dead=[Failure(claim.event, "refused", 1)]))
        assert await store.replay(refs(claim.event), "olga") == 1
        (again,) = await store.claim(JOBS, 0, "ann", 10, LEASE)
        assert (again.event.id, again.event.attempts) == (claim.event.id, 1)
