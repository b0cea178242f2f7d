"""Two transactions at once on MongoDB, in a chosen order: a store stops between two of its commands."""

import asyncio
import itertools
import os
from contextlib import suppress
from typing import Any

import pytest
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import AutoReconnect

from pillarbox.conformance import Connect
from pillarbox.conformance.store_setup import (
    JOBS,
    LEASE,
    LONG,
    PAST,
    SHARDS,
    STREAM,
    StoreSetup,
    ids,
    read,
    refs,
    settle,
)
from pillarbox.errors import LeaseLost
from pillarbox.event import Event, Status
from pillarbox.store import PARKED, Failure, Grant, Hold, HoldMode, Rescued, Settlement
from pillarbox.stores.mongo import MongoStore, marks
from servers import Mongo
from tests.integration.mongos import Pause
from tests.integration.relays import mongo_outbox

_numbers = itertools.count(1)
pytestmark = pytest.mark.asyncio


async def _late(mark: asyncio.Task[set[str]]) -> None:
    """Wait for a mark whose owner may be told that it came too late."""
    with suppress(LeaseLost):
        await mark


class TestMongoInterleavings(StoreSetup):
    @pytest.fixture
    def connect(self, mongo: Mongo) -> Connect:
        outbox = mongo_outbox(mongo.url)
        prefix = f"turns{os.getpid()}x{next(_numbers)}"
        return lambda *, shards=SHARDS: outbox(prefix=prefix, shards=shards)

    @pytest.mark.parametrize("after", [False, True], ids=["before the events change", "before the commit"])
    async def test_a_settle_that_meets_a_take_over_gives_way(
        self, store: MongoStore, other: MongoStore, monkeypatch: pytest.MonkeyPatch, after: bool
    ) -> None:
        grant = await self.own(store)
        (event,) = await self.write(store, grant, self.event(key=None))
        await store.renew([grant], PAST)
        await self.join(other, STREAM, "bob", LEASE)
        inside = Pause(store, monkeypatch, "event", "bulk_write", after=after)
        settling = asyncio.create_task(settle(store, Settlement(grant, failed=[Failure(event, "refused", 1, LONG)])))
        await inside.reached()
        (taken,) = await other.take(STREAM, "bob", SHARDS, LEASE)
        inside.go.set()
        with pytest.raises(LeaseLost):
            await settling
        assert ids(await self.read(other, taken)) == [event.id]
        await self.publish(other, taken, event)
        assert await self.count(store) == {Status.PUBLISHED: 1}

    async def test_a_settle_and_a_take_over_at_once_never_both_have_the_event(
        self, store: MongoStore, other: MongoStore
    ) -> None:
        grant, workers = await self.own(store), itertools.count(1)
        for _ in range(20):
            (event,) = await self.write(store, grant, self.event())
            await store.renew([grant], PAST)
            settled, taken = await asyncio.gather(
                settle(store, Settlement(grant, dead=[Failure(event, "refused", 1)])),
                other.take(STREAM, f"w{next(workers)}", SHARDS, LEASE),
                return_exceptions=True,
            )
            assert not isinstance(taken, BaseException)
            (grant,) = taken
            left = await self.read(other, grant)
            assert ids(left) == ([event.id] if isinstance(settled, LeaseLost) else [])
            await self.publish(other, grant, *left)

    async def _late_mark(
        self, store: MongoStore, other: MongoStore, patch: pytest.MonkeyPatch, *events: Event, keep: bool = True
    ) -> tuple[Grant, list[Event], Pause, asyncio.Task[set[str]]]:
        """An owner that has published these events stops before it marks them, and another worker takes its shard and
        reads them: its grant and its events."""
        stale = await self.own(store)
        published = await self.write(store, stale, *events)
        inside = Pause(store, patch, "event", "update_many" if keep else "delete_many")
        mark = asyncio.create_task(settle(store, Settlement(stale, published=published, keep_published=keep)))
        await inside.reached()
        grant = await self.lose(other, stale)
        return grant, await self.read(other, grant), inside, mark

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize("is_slow", [True, False])
    async def test_an_owner_is_told_that_its_mark_came_too_late(
        self, store: MongoStore, other: MongoStore, monkeypatch: pytest.MonkeyPatch, is_slow: bool, keep: bool
    ) -> None:
        monkeypatch.setattr(marks, "_SLOW_SECONDS", -1.0 if is_slow else LONG)
        grant, found, inside, mark = await self._late_mark(store, other, monkeypatch, *self.events(2), keep=keep)
        if not is_slow:
            await self.publish(other, grant, found[0])
        inside.go.set()
        with pytest.raises(LeaseLost):
            await mark
        assert await self.read(other, grant) == []

    @pytest.mark.parametrize("keep", [True, False])
    async def test_a_late_mark_leaves_what_the_new_owner_says(
        self, store: MongoStore, other: MongoStore, monkeypatch: pytest.MonkeyPatch, keep: bool
    ) -> None:
        key = self.key()
        events = [*self.events(2, key=key), *self.events(2)]
        grant, found, inside, mark = await self._late_mark(store, other, monkeypatch, *events, keep=keep)
        failed, behind, dead, free = found
        await self.fail_head(other, grant, failed)
        await self.kill_head(other, grant, dead)
        inside.go.set()
        await _late(mark)
        published = {Status.PUBLISHED: 2} if keep else {}
        assert await self.count(other) == {Status.FAILED: 1, Status.DEAD: 1, **published}
        assert set(await other.held_keys(grant)) == {key, dead.key}
        assert await self.read(other, grant) == []
        assert await self.read_due(other, grant) == (key, [failed._replace(status=Status.FAILED, attempts=1)])
        assert {behind.id, free.id}.isdisjoint(ids(letter.event for letter in await other.dead_letters()))

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize("result", ["failed", "dead"])
    @pytest.mark.parametrize("meets", ["before", "in the transaction"])
    async def test_no_key_is_held_for_a_head_that_is_marked_meanwhile(
        self,
        store: MongoStore,
        other: MongoStore,
        monkeypatch: pytest.MonkeyPatch,
        meets: str,
        result: str,
        keep: bool,
    ) -> None:
        grant, (head,), inside, mark = await self._late_mark(store, other, monkeypatch, self.event(), keep=keep)
        refuse = self.fail_head if result == "failed" else self.kill_head
        if meets == "before":
            inside.go.set()
            await _late(mark)
            await refuse(other, grant, head)
        else:
            # The settle has seen the head as pending. The mark comes before its change.
            stopped = Pause(other, monkeypatch, "held_key", "update_one")
            settling = asyncio.create_task(refuse(other, grant, head))
            await stopped.reached()
            inside.go.set()
            await _late(mark)
            stopped.go.set()
            await settling
        assert await self.count(other) == ({Status.PUBLISHED: 1} if keep else {})
        assert await other.held_keys(grant) == set()
        assert not await other.dead_letters()

    @pytest.mark.parametrize("keep", [True, False])
    async def test_a_late_mark_waits_for_a_settle_that_has_changed_the_event(
        self, store: MongoStore, other: MongoStore, monkeypatch: pytest.MonkeyPatch, keep: bool
    ) -> None:
        grant, (head,), inside, mark = await self._late_mark(store, other, monkeypatch, self.event(), keep=keep)
        stopped = Pause(other, monkeypatch, "event", "bulk_write", after=True)
        settling = asyncio.create_task(self.fail_head(other, grant, head))
        await stopped.reached()
        inside.go.set()
        await asyncio.sleep(0.05)
        stopped.go.set()
        await asyncio.gather(_late(mark), settling)
        assert await self.count(other) == {Status.FAILED: 1}
        assert await self.read_due(other, grant) == (head.key, [head._replace(status=Status.FAILED, attempts=1)])

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize("action", ["replay", "discard"])
    async def test_a_late_mark_undoes_nothing_that_an_operator_did(
        self, store: MongoStore, other: MongoStore, monkeypatch: pytest.MonkeyPatch, action: str, keep: bool
    ) -> None:
        events = self.events(2)
        grant, (skipped, blocked), inside, mark = await self._late_mark(store, other, monkeypatch, *events, keep=keep)
        await settle(other, Settlement(grant, dead=[Failure(skipped, "refused", 1)]))
        await self.kill_head(other, grant, blocked)
        await getattr(other, action)(refs(skipped, blocked), "olga")
        inside.go.set()
        await _late(mark)
        replayed = {Status.PENDING: 1, Status.FAILED: 1} if action == "replay" else {}
        assert await self.count(other) == replayed
        assert ids(await self.read(other, grant)) == ([skipped.id] if replayed else [])
        run = await self.read_due(other, grant)
        assert run is not None
        assert ids(run[1]) == ([blocked.id] if replayed else [])

    @pytest.mark.parametrize("action", ["replay", "discard"])
    async def test_a_key_is_not_parked_again_for_a_head_that_an_operator_has_acted_on(
        self, store: MongoStore, action: str
    ) -> None:
        grant, key = await self.own(store), self.key()
        head, behind = await self.write(store, grant, *self.events(2, key=key))
        await self.fail_head(store, grant, head, behind)
        parked = {key: Hold(HoldMode.PARKED, PAST, head.id)}
        await settle(store, Settlement(grant, dead=[Failure(head, "refused", 2)], hold_keys=parked))
        run = await store.read_due(grant, 10, 1000)
        assert run is not None
        assert ids(run.events) == [behind.id]
        await getattr(store, action)(refs(head), "olga")
        await settle(store, Settlement(grant, dead=[Failure(run.events[0], PARKED, 0)], hold_keys=parked))
        run = await store.read_due(grant, 10, 1000)
        assert run is not None
        assert (run.mode, run.dead_head) == (HoldMode.RETRYING, None)
        assert ids(run.events) == ([head.id] if action == "replay" else [])

    @pytest.mark.parametrize("action", ["replay", "discard"])
    @pytest.mark.parametrize("first", ["settle", "operator"])
    async def test_an_operator_and_the_release_of_a_key_lose_nothing(
        self, store: MongoStore, other: MongoStore, monkeypatch: pytest.MonkeyPatch, first: str, action: str
    ) -> None:
        grant, key = await self.own(store), self.key()
        dead, last = await self.write(store, grant, *self.events(2, key=key))
        await settle(store, Settlement(grant, dead=[Failure(dead, "refused", 1)]))
        await self.fail_head(store, grant, last)
        if first == "settle":
            inside = Pause(store, monkeypatch, "event", "find_one")
        else:
            inside = Pause(other, monkeypatch, "audit", "insert_many")

        async def release() -> Any:
            return await settle(store, Settlement(grant, published=[last], release_keys=[key]))

        async def operate() -> Any:
            return await getattr(other, action)(refs(dead), "olga")

        begun, late = (release, operate) if first == "settle" else (operate, release)
        one = asyncio.create_task(begun())
        await inside.reached()
        two = asyncio.create_task(late())
        await asyncio.sleep(0.05)
        inside.go.set()
        answers = await asyncio.gather(one, two)
        aside, acted = answers if first == "settle" else answers[::-1]
        assert acted == 1
        wanted = [dead.id] if action == "replay" else []
        run = await self.read_due(store, grant)
        waiting = ids(run[1]) if run is not None else []
        assert waiting + ids(await self.read(store, grant)) == wanted, "it waits where somebody looks for it"
        assert bool(aside) == (run is not None)

    async def test_a_take_whose_second_half_fails_keeps_the_first(
        self, store: MongoStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await self.join(store, STREAM, "ann", LEASE)
        real, calls = AsyncCollection.find_one_and_update, itertools.count(1)

        async def unreliable(*arguments: Any, **named: Any) -> Any:
            if next(calls) > 2:
                raise AutoReconnect("cut")
            return await real(*arguments, **named)

        monkeypatch.setattr(AsyncCollection, "find_one_and_update", unreliable)
        assert [grant.shard for grant in await store.take(STREAM, "ann", SHARDS, LEASE)] == [0, 1]

    async def test_a_limit_of_nothing_touches_nothing(self, store: MongoStore) -> None:
        grant = await self.own(store)
        await self.write(store, grant, *self.events(3))
        await store.add([self.event(stream=JOBS)])
        assert len(await store.claim(JOBS, 0, "ann", 1, PAST)) == 1
        assert await read(store, grant, 0, 1000) == []
        assert await store.read_due(grant, 0, 1000) is None
        assert await store.reenter_due(STREAM, 0) == 0
        assert await store.rescue(JOBS, 600, 0) == Rescued(0, 0)
        assert await store.prune_dead(PAST, 0) == 0
        assert (await store.prune_published(PAST, 0)).deleted == 0
