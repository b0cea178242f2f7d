"""Two transactions at once, in a chosen order: the server is asked who waits, nothing is left to chance."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

import pytest
import pytest_asyncio

from pillarbox.conformance import Connect
from pillarbox.conformance.store_setup import JOBS, LEASE, LONG, PAST, SHARDS, STREAM, StoreSetup, ids
from pillarbox.errors import LeaseLost
from pillarbox.event import Event, Status
from pillarbox.store import Aside, Failure, Grant, KeyAside, Rescued, Settlement, Store
from pillarbox.stores import postgres as postgres_module
from pillarbox.stores.mysql import MysqlStore
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.sqlite import SqliteStore
from tests.servers import MariaDB, MySQL, Postgres

T = TypeVar("T")
_numbers = itertools.count(1)


class Clock:
    """The relay's own clock, moved by hand: how the floor of a read rises depends on it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Interleavings(StoreSetup):
    """What every database with several writers must get right; a subclass says how it locks and who waits."""

    @pytest.fixture
    def prefix(self) -> str:
        return f"lane{os.getpid()}x{next(_numbers)}"

    @pytest_asyncio.fixture
    async def ann(self, store: SqlStore) -> SqlStore:
        return store

    @pytest_asyncio.fixture
    async def bob(self, other: SqlStore) -> SqlStore:
        return other

    @asynccontextmanager
    async def holding(self, store: SqlStore, lock: str, **values: Any) -> AsyncIterator[Any]:
        """A transaction that holds what the statement locks until the block ends."""
        async with store.transaction() as tx:
            await tx.fetch(store._statement(lock), **values)
            yield tx

    def holding_event(self, store: SqlStore, event: Event) -> Any:
        return self.holding(store, "SELECT 1 FROM {event} WHERE id = :id FOR UPDATE", id=event.id)

    def holding_audit(self, store: SqlStore) -> Any:
        """Nobody else writes an audit row until the block ends."""
        raise NotImplementedError

    async def _waiting(self, store: SqlStore) -> int:
        """How many statements of this outbox wait for a lock."""
        raise NotImplementedError

    async def blocked(self, store: SqlStore, what: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Started, and as far as it comes before it waits for another transaction."""
        before = await self._waiting(store)
        task = asyncio.create_task(what)
        async with asyncio.timeout(20):
            while await self._waiting(store) == before:
                assert not task.done(), f"it did not wait: {task}"
        return task

    async def _assert_no_orphan(self, store: SqlStore) -> None:
        """A failed or held event whose key has no row would wait for ever."""
        select = store._statement(
            """SELECT id FROM {event} AS e WHERE key IS NOT NULL AND status IN ('failed', 'held') AND NOT EXISTS (
                SELECT 1 FROM {blocked_key} AS b WHERE b.stream = e.stream AND b.shard = e.shard AND b.key = e.key)"""
        )
        assert list(await store._db.fetch(select)) == []

    async def _begin_take(self, tx: Any, store: SqlStore, grant: Grant, worker: str) -> None:
        shards = [row[0] for row in await tx.fetch(store._sql["takeable"], stream=STREAM, limit=SHARDS)]
        assert shards == [grant.shard]
        await tx.execute(store._sql["take"], stream=STREAM, worker=worker, seconds=LEASE, shards=shards)

    @pytest.mark.asyncio
    async def test_a_take_over_waits_for_a_settle_that_has_begun(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        (event,) = await self.write(ann, grant, self.event())
        await ann.renew([grant], PAST)
        await bob.join(STREAM, "bob", LEASE)
        async with self.holding_event(bob, event):
            settle = await self.blocked(bob, ann.settle(grant, Settlement(published=[event])))
            assert not await bob.take(STREAM, "bob", SHARDS, LEASE)
        await settle
        (taken,) = await bob.take(STREAM, "bob", SHARDS, LEASE)
        assert await self.read(bob, taken) == []
        assert await self.count(ann) == {Status.PUBLISHED: 1}

    @pytest.mark.asyncio
    async def test_a_take_over_waits_for_a_failure_that_is_being_settled(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        (event,) = await self.write(ann, grant, self.event())
        await ann.renew([grant], PAST)
        await bob.join(STREAM, "bob", LEASE)
        async with self.holding_event(bob, event):
            settle = await self.blocked(bob, self.fail_head(ann, grant, event))
            assert not await bob.take(STREAM, "bob", SHARDS, LEASE)
        await settle
        (taken,) = await bob.take(STREAM, "bob", SHARDS, LEASE)
        assert set(await bob.keys_aside(taken)) == {event.key}

    @pytest.mark.asyncio
    async def test_a_settle_that_comes_after_a_take_over_is_refused(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        one, two = await self.write(ann, grant, *self.events(2))
        assert one.key is not None
        await ann.renew([grant], PAST)
        async with bob.transaction() as tx:
            await self._begin_take(tx, bob, grant, "bob")
            aside = {one.key: KeyAside(Aside.RETRY, PAST)}
            stale = [
                await self.blocked(bob, ann.settle(grant, settlement))
                for settlement in (
                    Settlement(published=[one]),
                    Settlement(published=[two], keep_published=False),
                    Settlement(failed=[Failure(one, "refused", 1)], aside=aside),
                    Settlement(dead=[Failure(two, "refused", 1)]),
                )
            ]
        for task in stale:
            with pytest.raises(LeaseLost):
                await task
        assert await self.count(ann) == {Status.PENDING: 2}

    @pytest.mark.asyncio
    async def test_a_renewal_that_comes_after_a_take_over_is_refused(self, ann: SqlStore, bob: SqlStore) -> None:
        grants = await self.own_all(ann)
        await ann.renew(grants[:1], PAST)
        async with bob.transaction() as tx:
            await self._begin_take(tx, bob, grants[0], "bob")
            renewal = await self.blocked(bob, ann.renew(grants, LEASE))
        assert list(await renewal) == grants[1:]

    @pytest.mark.asyncio
    async def test_a_renewal_waits_for_a_settle_and_holds(self, ann: SqlStore, bob: SqlStore) -> None:
        grants = await self.own_all(ann)
        (event,) = await self.write(ann, grants[0], self.event())
        async with self.holding_event(bob, event):
            settle = await self.blocked(bob, ann.settle(grants[0], Settlement(published=[event])))
            renewal = await self.blocked(bob, ann.renew(grants, LEASE))
        await settle
        assert list(await renewal) == grants

    @pytest.mark.asyncio
    async def test_a_stale_reader_learns_nothing_new(self, ann: SqlStore, bob: SqlStore) -> None:
        stale = await self.own(ann)
        key = self.key()
        one, two = await self.write(ann, stale, *self.events(2, key=key))
        grant = await self.lose(bob, stale)
        await self.fail_head(bob, grant, one, delay=LONG)
        assert await self.read(ann, stale) == [], "it would publish the second though the first has failed"
        with pytest.raises(LeaseLost):
            await self.publish(ann, stale, one, two)
        assert await self.count(bob) == {Status.FAILED: 1, Status.PENDING: 1}

    async def _begin_claim(self, tx: Any, store: SqlStore, limit: int) -> list[Any]:
        rows = await tx.fetch(store._sql["ready_ids"], stream=JOBS, shard=0, limit=limit)
        found = [row[0] for row in rows]
        await tx.execute(store._sql["claim"], ids=found, worker="ann", seconds=LEASE)
        return [store._as_uuid(each) for each in found]

    @pytest.mark.asyncio
    async def test_two_claimers_pass_each_other(self, ann: SqlStore, bob: SqlStore) -> None:
        events = self.events(5, stream=JOBS, key=None)
        await ann.add(events)
        async with ann.transaction() as tx:
            anns = await self._begin_claim(tx, ann, 3)
            bobs = await bob.claim(JOBS, 0, "bob", 10, LEASE)
            assert sorted(anns) == sorted(ids(events[:3]))
            assert ids(claim.event for claim in bobs) == ids(events[3:])
        assert await self.count(ann, JOBS) == {Status.PROCESSING: 5}

    @pytest.mark.asyncio
    async def test_a_rescue_passes_over_what_is_being_settled(self, ann: SqlStore, bob: SqlStore) -> None:
        await ann.add(self.events(1, stream=JOBS, key=None))
        (claim,) = await ann.claim(JOBS, 0, "ann", 1, PAST)
        async with ann.transaction() as tx:
            await tx.fetch(ann._sql["lock_claim"], ids=[claim.event.id])
            assert await bob.rescue(JOBS, LONG, 5, 10) == Rescued(0, 0)
            settle = await self.blocked(bob, ann.settle_claims([claim], Settlement(published=[claim.event])))
        assert await settle == 0
        assert await bob.rescue(JOBS, LONG, 5, 10) == Rescued(0, 0)
        assert await self.count(ann, JOBS) == {Status.PUBLISHED: 1}

    @pytest.mark.asyncio
    async def test_a_settle_of_what_is_being_rescued_is_refused(self, ann: SqlStore, bob: SqlStore) -> None:
        await ann.add(self.events(1, stream=JOBS, key=None))
        (claim,) = await ann.claim(JOBS, 0, "ann", 1, PAST)
        async with bob.transaction() as tx:
            await tx.fetch(bob._sql["stuck"], stream=JOBS, stuck=-LONG, limit=10)
            row = {"id": claim.event.id, "attempts": 0, "error": "crashed", "line": "{}"}
            await tx.execute(bob._sql["rescue"], **row)
            settle = await self.blocked(bob, ann.settle_claims([claim], Settlement(published=[claim.event])))
        assert await settle == 1
        assert await self.count(ann, JOBS) == {Status.FAILED: 1}

    @pytest.mark.asyncio
    async def test_a_prune_spares_what_was_made_pending_meanwhile(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        one, two = await self.write(ann, grant, *self.events(2))
        await self.publish(ann, grant, one, two)
        again = "UPDATE {event} SET status = 'pending', published_at = NULL WHERE id = :id"
        async with self.holding(bob, again, id=one.id):
            prune = await self.blocked(bob, ann.prune_published(PAST, 100))
        assert (await prune).deleted == 1
        assert ids(await self.read_soon(ann, grant, 1)) == [one.id]

    @pytest.mark.asyncio
    async def test_a_prune_and_a_settle_pass_each_other(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        one, two = await self.write(ann, grant, *self.events(2))
        await self.publish(ann, grant, one)
        async with self.holding_event(bob, two):
            settle = await self.blocked(bob, self.publish(ann, grant, two))
            assert (await bob.prune_published(PAST, 100)).deleted == 1
        await settle
        assert await self.count(ann) == {Status.PUBLISHED: 1}

    @pytest.mark.asyncio
    async def test_a_letter_that_is_being_replayed_is_not_pruned(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        (event,) = await self.write(ann, grant, self.event())
        await ann.settle(grant, Settlement(dead=[Failure(event, "refused", 1)]))
        async with self.holding_audit(bob):
            replay = await self.blocked(bob, ann.replay([event.id], "olga"))
            prune = await self.blocked(bob, ann.prune_dead(PAST, 10))
        assert (await replay, await prune) == (1, 0)
        assert await self.count(ann) == {Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_a_letter_that_is_being_pruned_is_not_replayed(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        (event,) = await self.write(ann, grant, self.event())
        await ann.settle(grant, Settlement(dead=[Failure(event, "refused", 1)]))
        async with bob.transaction() as tx:
            assert await tx.execute(bob._sql["prune_dead"], keep=-PAST, limit=10) == 1
            replay = await self.blocked(bob, ann.replay([event.id], "olga"))
        assert await replay == 0
        assert await self.count(ann) == {}

    @pytest.mark.asyncio
    async def test_two_operators_replay_a_letter_once(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        (event,) = await self.write(ann, grant, self.event())
        await self.kill_head(ann, grant, event)
        async with self.holding_audit(bob):
            first = await self.blocked(bob, ann.replay([event.id], "olga"))
            second = await self.blocked(bob, bob.discard([event.id], "igor"))
        assert (await first, await second) == (1, 0)
        assert await self.count(ann) == {Status.FAILED: 1}
        await self._assert_no_orphan(ann)

    async def _dead_and_waiting(self, store: SqlStore) -> tuple[Grant, str, Event, Event]:
        """The first of a key is dead and was skipped; the second has failed and is due."""
        grant = await self.own(store)
        key = self.key()
        dead, last = await self.write(store, grant, *self.events(2, key=key))
        await store.settle(grant, Settlement(dead=[Failure(dead, "refused", 1)]))
        await self.fail_head(store, grant, last)
        return grant, key, dead, last

    @pytest.mark.asyncio
    async def test_a_key_is_not_released_while_an_operator_replays(self, ann: SqlStore, bob: SqlStore) -> None:
        grant, key, dead, last = await self._dead_and_waiting(ann)
        async with self.holding_audit(bob):
            replay = await self.blocked(bob, bob.replay([dead.id], "olga"))
            settle = await self.blocked(bob, ann.settle(grant, Settlement(published=[last], release=[key])))
        assert await replay == 1
        assert set(await settle) == {key}
        await self._assert_no_orphan(ann)
        run = await self.read_due(ann, grant)
        assert run is not None
        assert ids(run[1]) == [dead.id]

    @pytest.mark.asyncio
    async def test_a_replay_finds_the_key_that_is_being_released(self, ann: SqlStore, bob: SqlStore) -> None:
        grant, key, dead, last = await self._dead_and_waiting(ann)
        async with self.holding_event(bob, last):
            settle = await self.blocked(bob, ann.settle(grant, Settlement(published=[last], release=[key])))
            replay = await self.blocked(bob, bob.replay([dead.id], "olga"))
        assert not await settle
        assert await replay == 1
        await self._assert_no_orphan(ann)
        assert ids(await self.read_soon(ann, grant, 1)) == [dead.id]

    @pytest.mark.asyncio
    async def test_a_key_that_dies_while_an_operator_replays_stays_blocked(self, ann: SqlStore, bob: SqlStore) -> None:
        grant, key, dead, last = await self._dead_and_waiting(ann)
        blocks = Settlement(dead=[Failure(last, "refused", 2)], aside={key: KeyAside(Aside.BLOCKED, None, last.id)})
        async with self.holding_audit(bob):
            replay = await self.blocked(bob, bob.replay([dead.id], "olga"))
            settle = await self.blocked(bob, ann.settle(grant, blocks))
        assert await replay == 1
        assert set(await settle) == {key}
        await self._assert_no_orphan(ann)
        assert [letter.event.id for letter in await ann.dead_letters(STREAM)] == [last.id]
        # Both are the operator's again: acting on the letter lets the key go on, from the replayed event.
        await ann.discard([last.id], "olga")
        run = await self.read_due(ann, grant)
        assert run is not None
        assert ids(run[1]) == [dead.id]

    @pytest.mark.asyncio
    async def test_a_new_owner_finds_what_is_being_replayed(self, ann: SqlStore, bob: SqlStore) -> None:
        stale = await self.own(ann)
        key = self.key()
        head, behind = await self.write(ann, stale, *self.events(2, key=key))
        await self.kill_head(ann, stale, head, behind)
        async with self.holding_audit(bob):
            replay = await self.blocked(bob, ann.replay([head.id], "olga"))
            grant = await self.lose(bob, stale)
            assert await self.read_due(bob, grant) is None
        assert await replay == 1
        assert (await bob.poll(STREAM, "bob", [grant])).due == {0}
        run = await self.read_due(bob, grant)
        assert run is not None
        assert ids(run[1]) == ids([head, behind])

    @pytest.mark.asyncio
    async def test_a_late_commit_takes_its_place_in_a_key_that_is_set_aside(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        key = self.key()
        late = self.event(key=key)
        async with bob.transaction() as tx:
            await bob.add([late], tx)
            (early,) = await self.write(ann, grant, self.event(key=key))
            await self.fail_head(ann, grant, early)
        (found,) = await self.read_soon(ann, grant, 1)
        assert set(await ann.settle(grant, Settlement(held=[found]))) == {key}
        run = await self.read_due(ann, grant)
        assert run is not None
        assert ids(run[1]) == [late.id, early.id]
        assert not await ann.settle(grant, Settlement(published=run[1], release=[key]))

    @pytest.mark.asyncio
    async def test_a_late_commit_waits_for_the_settle_that_releases_its_key(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        key = self.key()
        (head,) = await self.write(ann, grant, self.event(key=key))
        await self.fail_head(ann, grant, head)
        late = self.event(key=key)
        async with bob.transaction() as tx:
            await bob.add([late], tx)
            assert not await ann.settle(grant, Settlement(published=[head], release=[key]))
        assert ids(await self.read_soon(ann, grant, 1)) == [late.id]


class TestPostgresInterleavings(Interleavings):
    @pytest.fixture
    def connect(self, postgres: Postgres, prefix: str) -> Connect:
        return lambda *, shards=SHARDS: PostgresStore(postgres.url, prefix=prefix, shards=shards)

    def holding_audit(self, store: SqlStore) -> Any:
        return self.holding(store, "LOCK TABLE {audit} IN ACCESS EXCLUSIVE MODE")

    async def _waiting(self, store: SqlStore) -> int:
        select = store._statement(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND strpos(query, :prefix) > 0"
        )
        count: int = (await store._db.fetch(select, prefix=store._names.prefix))[0][0]
        return count

    async def _begin_claim(self, tx: Any, store: SqlStore, limit: int) -> list[Any]:
        values = {"stream": JOBS, "shard": 0, "worker": "ann", "limit": limit, "seconds": LEASE}
        return [row[0] for row in await tx.fetch(store._sql["claim_shard"], **values)]

    @pytest.mark.asyncio
    @pytest.mark.parametrize(("before", "rivals"), [(0, 3), (5, 3), (5, 3000)])
    async def test_a_writer_that_commits_late_keeps_the_order_of_its_key(
        self, ann: SqlStore, bob: SqlStore, before: int, rivals: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock()
        monkeypatch.setattr(postgres_module, "time", SimpleNamespace(monotonic=clock.monotonic))
        grant = await self.own(ann)
        key = self.key()
        first, second = self.event(key=key), self.event(key=key)
        await ann.add(self.events(before))
        await self._work_off(ann, grant, clock)
        async with bob.transaction() as tx:
            await bob.add([first], tx)
            for start in range(0, rivals, 1000):
                await ann.add(self.events(min(rivals, 1000, rivals - start)))
                await self._work_off(ann, grant, clock)
            # The floor has risen as high as it may, and the clock stands still: the next read begins there.
            await bob.add([second], tx)
        assert await self.count(ann) == {Status.PUBLISHED: before + rivals, Status.PENDING: 2}
        seen: list[UUID] = []
        for _ in range(100):
            seen = ids(await self.read(ann, grant))
            if seen:
                break
            clock.now += 0.05
        assert seen == ids([first, second]), "the second must not be seen before the first"

    async def _work_off(self, store: SqlStore, grant: Grant, clock: Clock) -> None:
        """Publish what is there, for as long as it takes the floor to rise as high as it may."""
        for _ in range(40):
            clock.now += 0.3
            events = await self.read(store, grant)
            if events:
                await self.publish(store, grant, *events)

    @pytest.mark.asyncio
    async def test_a_floor_hides_no_replay_and_no_promotion(
        self, ann: SqlStore, bob: SqlStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock()
        monkeypatch.setattr(postgres_module, "time", SimpleNamespace(monotonic=clock.monotonic))
        grant = await self.own(ann)
        dead, failed = await self.write(ann, grant, self.event(), self.event(key=None))
        failures = [Failure(failed, "refused", 1, PAST)]
        await ann.settle(grant, Settlement(failed=failures, dead=[Failure(dead, "refused", 1)]))
        await ann.add(self.events(20))
        await self._work_off(ann, grant, clock)
        await bob.replay([dead.id], "olga")
        await bob.promote(STREAM, 10)
        ready, found = [], []
        for _ in range(100):
            clock.now += 0.05
            ready.append(bool((await ann.poll(STREAM, "ann", [grant])).ready))
            found = ids(await self.read(ann, grant))
            if len(found) == 2 and ready[-1]:
                break
        assert ready[-1], "a poll must see it, or nobody reads"
        assert found == ids([dead, failed])


class MysqlInterleavings(Interleavings):
    @asynccontextmanager
    async def holding_audit(self, store: SqlStore) -> AsyncIterator[Any]:
        assert isinstance(store, MysqlStore)
        async with store._database.alone() as one:
            await one.run(f"LOCK TABLES {store._names.parts['audit']} WRITE")
            try:
                yield one
            finally:
                await one.run("UNLOCK TABLES")

    async def _waiting(self, store: SqlStore) -> int:
        # The server renews what it shows of transactions only for who has not asked for a tenth of a second.
        await asyncio.sleep(0.12)
        select = store._statement(
            """SELECT (SELECT count(*) FROM information_schema.innodb_trx
                WHERE trx_state = 'LOCK WAIT' AND instr(trx_query, :prefix) > 0)
            + (SELECT count(*) FROM information_schema.processlist
                WHERE state LIKE 'Waiting for table%' AND instr(info, :prefix) > 0)"""
        )
        count: int = (await store._db.fetch(select, prefix=store._names.prefix))[0][0]
        return count

    @pytest.mark.asyncio
    @pytest.mark.parametrize(("before", "rivals"), [(0, 3), (5, 3), (5, 3000)])
    async def test_a_writer_that_commits_late_keeps_the_order_of_its_key(
        self, ann: SqlStore, bob: SqlStore, before: int, rivals: int
    ) -> None:
        grant = await self.own(ann)
        key = self.key()
        first, second = self.event(key=key), self.event(key=key)
        await self._write_and_publish(ann, grant, before)
        async with bob.transaction() as tx:
            await bob.add([first], tx)
            await self._write_and_publish(ann, grant, rivals)
            await bob.add([second], tx)
        assert await self.count(ann) == {Status.PUBLISHED: before + rivals, Status.PENDING: 2}
        assert ids(await self.read(ann, grant)) == ids([first, second])

    async def _write_and_publish(self, store: SqlStore, grant: Grant, count: int) -> None:
        await store.add(self.events(count))
        while events := await self.read(store, grant):
            await self.publish(store, grant, *events)

    @pytest.mark.asyncio
    async def test_a_deadlock_is_run_again(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        one, two = await self.write(ann, grant, *self.events(2))
        async with self.holding_event(bob, two) as tx:
            # It has locked the lease and the first event, and waits for the second; now the other way round. The server
            # ends whichever it likes, and rolls back what changed least.
            settle = await self.blocked(bob, self.publish(ann, grant, one, two))
            row = {"operator": "o" * 200, "action": "a", "stream": STREAM, "event_id": None}
            await tx.execute_many(bob._sql["audit"], [row] * 50)
            await tx.fetch(bob._statement("SELECT 1 FROM {event} WHERE id = :id FOR UPDATE"), id=one.id)
            assert await self._waiting(bob) == 1, "it was rolled back, and has begun again"
        await settle
        assert await self.count(ann) == {Status.PUBLISHED: 2}

    @pytest.mark.asyncio
    async def test_a_statement_that_is_cancelled_leaves_no_lock(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        one, two = await self.write(ann, grant, *self.events(2))
        async with self.holding_event(bob, two) as tx:
            settle = await self.blocked(bob, self.publish(ann, grant, one, two))
            settle.cancel()
            await asyncio.wait([settle])
            assert settle.cancelled()
            async with asyncio.timeout(5):
                while await self._waiting(bob):
                    pass
                # It had locked this one, and its lease.
                await tx.fetch(bob._statement("SELECT 1 FROM {event} WHERE id = :id FOR UPDATE"), id=one.id)
            assert list(await ann.renew([grant], LEASE)) == [grant]
        assert await self.count(ann) == {Status.PENDING: 2}
        await self.publish(ann, grant, one, two)
        assert await self.count(ann) == {Status.PUBLISHED: 2}


class TestMysqlInterleavings(MysqlInterleavings):
    @pytest.fixture
    def connect(self, mysql: MySQL, prefix: str) -> Connect:
        return lambda *, shards=SHARDS: MysqlStore(mysql.url, prefix=prefix, shards=shards)


class TestMariadbInterleavings(MysqlInterleavings):
    @pytest.fixture
    def connect(self, mariadb: MariaDB, prefix: str) -> Connect:
        return lambda *, shards=SHARDS: MysqlStore(mariadb.url, prefix=prefix, shards=shards)


class TestSqliteRaces(StoreSetup):
    """SQLite lets one writer in at a time; which one comes first is left to chance, many times."""

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Connect:
        return lambda *, shards=SHARDS: SqliteStore(str(tmp_path / "outbox.db"), shards=shards)

    @pytest.mark.asyncio
    async def test_a_settle_and_a_take_over_do_not_cross(self, store: Store, other: Store) -> None:
        grant, worker = await self.own(store), itertools.count(1)
        for _ in range(20):
            (event,) = await self.write(store, grant, self.event())
            await store.renew([grant], PAST)
            name = f"w{next(worker)}"
            settled, taken = await asyncio.gather(
                store.settle(grant, Settlement(published=[event], keep_published=False)),
                other.take(STREAM, name, SHARDS, LEASE),
                return_exceptions=True,
            )
            assert not isinstance(taken, BaseException)
            (grant,) = taken
            left = await self.read(other, grant)
            assert ids(left) == ([event.id] if isinstance(settled, LeaseLost) else [])
            await self.publish(other, grant, *left)

    @pytest.mark.asyncio
    async def test_a_replay_and_a_release_lose_nothing(self, store: Store, other: Store) -> None:
        grant = await self.own(store)
        for _ in range(20):
            key = self.key()
            dead, last = await self.write(store, grant, *self.events(2, key=key))
            await store.settle(grant, Settlement(dead=[Failure(dead, "refused", 1)]))
            await self.fail_head(store, grant, last)
            aside, replayed = await asyncio.gather(
                store.settle(grant, Settlement(published=[last], release=[key])), other.replay([dead.id], "olga")
            )
            assert replayed == 1
            if aside:
                run = await self.read_due(store, grant)
                assert run is not None
                assert ids(run[1]) == [dead.id]
            else:
                assert ids(await self.read(store, grant)) == [dead.id]
            assert not await store.settle(grant, Settlement(published=[dead], release=[key]))

    @pytest.mark.asyncio
    async def test_a_call_that_is_cancelled_while_it_waits_leaves_no_transaction_open(
        self, store: Store, other: Store
    ) -> None:
        async with other.transaction() as tx:
            await other.add([self.event()], tx)
            task = asyncio.create_task(store.add([self.event()]))
            # One step takes it into the driver, where it waits for the other's lock.
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        for connection in (store, other):
            await connection.add([self.event()])
        assert await self.count(other) == {Status.PENDING: 3}

    @pytest.mark.asyncio
    async def test_two_migrations_at_once_many_times(self, tmp_path: Path) -> None:
        for place in range(10):
            stores = [SqliteStore(str(tmp_path / f"{place}.db")) for _ in range(3)]
            run = await asyncio.gather(*(store.migrate() for store in stores))
            assert sum(map(bool, run)) == 1
            for store in stores:
                await store.close()
