"""Two transactions at once, in a chosen order: the server is asked who waits, nothing is left to chance."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

import pytest

from pillarbox.conformance import Connect
from pillarbox.conformance.probes import probe_of
from pillarbox.conformance.store_setup import (
    JOBS,
    LEASE,
    MAX_BYTES,
    PAST,
    SHARDS,
    STREAM,
    StoreSetup,
    ids,
    refs,
    settle,
)
from pillarbox.errors import LeaseLost
from pillarbox.event import Status
from pillarbox.store import Failure, Grant, Settlement, Store
from pillarbox.stores.mysql import MysqlStore, database
from pillarbox.stores.mysql.database import MysqlDatabase
from pillarbox.stores.postgres import PostgresStore, parts
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.sqlite import SqliteStore
from servers import MariaDB, MySQL, Postgres
from tests.integration.interleavings import Interleavings

T = TypeVar("T")
_numbers = itertools.count(1)


class Clock:
    """The relay's own clock, moved by hand: how the floor of a read rises depends on it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class TestPostgresInterleavings(Interleavings):
    @pytest.fixture
    def connect(self, postgres: Postgres, prefix: str) -> Connect:
        return lambda *, shards=SHARDS: PostgresStore(postgres.url, prefix=prefix, shards=shards)

    def holding_audit(self, store: SqlStore) -> Any:
        return self.holding(store, "LOCK TABLE {audit} IN ACCESS EXCLUSIVE MODE")

    async def _waiting(self, store: SqlStore) -> int:
        text = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND strpos(query, :prefix) > 0"
        probe = probe_of(store)
        ((count,),) = await probe.query(text, prefix=probe.prefix)
        return int(count)

    async def _begin_claim(self, tx: Any, store: SqlStore, limit: int) -> list[Any]:
        values = {"stream": JOBS, "shard": 0, "worker": "ann", "token": 7, "limit": limit, "seconds": LEASE}
        return [row[0] for row in await tx.fetch(store.statements["claim"], **values)]

    @pytest.mark.asyncio
    @pytest.mark.parametrize(("before", "rivals"), [(0, 3), (5, 3), (5, 3000)])
    async def test_a_writer_that_commits_late_keeps_the_order_of_its_key(
        self, ann: SqlStore, bob: SqlStore, before: int, rivals: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock()
        monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=clock.monotonic))
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

    @pytest.mark.asyncio
    async def test_two_writers_that_commit_late_keep_the_order_of_a_key(
        self, ann: SqlStore, bob: SqlStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No snapshot reaches up to the second one's transaction id while nothing above it has ended."""
        clock = Clock()
        monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=clock.monotonic))
        grant = await self.own(ann)
        key = self.key()
        first, second = self.event(key=key), self.event(key=key)
        async with bob.transaction() as slow:
            async with bob.transaction() as other:
                await bob.add([self.event(shard=1)], other)
                await bob.add([first], slow)
                await self._work_off(ann, grant, clock)
            await self._work_off(ann, grant, clock)
        await bob.add([second])
        assert ids(await self.read(ann, grant)) == ids([first, second])

    @pytest.mark.asyncio
    async def test_a_trigger_that_waits_before_the_insert_does_not_reorder_a_key(
        self, ann: SqlStore, bob: SqlStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A row has its seq before a user's own trigger runs, and is written after it."""
        clock = Clock()
        monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=clock.monotonic))
        grant = await self.own(ann)
        probe = probe_of(ann)
        await probe.run(
            f"""CREATE FUNCTION {probe.prefix}_slow() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN PERFORM pg_advisory_xact_lock(hashtext('{probe.prefix}')); RETURN NEW; END $$;
            CREATE TRIGGER slow BEFORE INSERT ON {probe.tables["event"]} FOR EACH ROW WHEN (NEW.type = 'slow')
            EXECUTE FUNCTION {probe.prefix}_slow()"""
        )
        # A sequence that has numbers in stock gives a transaction no id.
        await ann.add(self.events(3))
        await self._work_off(ann, grant, clock)
        key = self.key()
        first, second = self.event(key=key, type="slow"), self.event(key=key)
        async with self.holding(ann, f"SELECT pg_advisory_xact_lock(hashtext('{probe.prefix}'))"):
            writing = asyncio.create_task(bob.add([first]))
            waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            async with asyncio.timeout(20):
                while not await probe.query(waiting):
                    pass
            await ann.add(self.events(3))
            await self._work_off(ann, grant, clock)
        await writing
        await bob.add([second])
        assert ids(await self.read(ann, grant)) == ids([first, second])

    async def _work_off(self, store: SqlStore, grant: Grant, clock: Clock) -> None:
        """Publish what is there, for as long as it takes the floor to rise as high as it may."""
        for _ in range(40):
            clock.now += 0.3
            events = await self.read(store, grant)
            if events:
                await self.publish(store, grant, *events)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("shards", [1, 4])
    async def test_a_floor_does_not_rise_while_the_stream_is_paused(
        self, ann: SqlStore, bob: SqlStore, shards: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock()
        monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=clock.monotonic))
        grants = (await self.own_all(ann))[:shards]
        first, second = self.events(2, key=self.key())
        await ann.pause(STREAM, "olga")
        await bob.add([first])
        for _ in range(40):
            clock.now += 0.3
            assert list(await ann.read(grants, 10, MAX_BYTES)) == []
        await ann.resume(STREAM, "olga")
        await bob.add([second])
        (part,) = await ann.read(grants, 10, MAX_BYTES)
        assert ids(part.events) == ids([first, second])

    @pytest.mark.asyncio
    async def test_a_read_that_reached_its_limit_does_not_lift_the_floor_of_a_shard_that_it_left_out(
        self, ann: SqlStore, bob: SqlStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock()
        monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=clock.monotonic))
        grants = await self.own_all(ann)
        keys = [self.key(shard) for shard in range(SHARDS)]
        await ann.add([self.event(key=key) for key in keys])
        for _ in range(40):
            clock.now += 0.3
            assert sum(len(part.events) for part in await ann.read(grants, 2, MAX_BYTES)) == 2
        await bob.add([self.event(key=key) for key in keys])
        found = await ann.read(grants, 100, MAX_BYTES)
        assert [[event.key for event in part.events] for part in found] == [[key, key] for key in keys]

    @pytest.mark.asyncio
    async def test_a_floor_hides_no_event_that_comes_back(
        self, ann: SqlStore, bob: SqlStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock()
        monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=clock.monotonic))
        grant = await self.own(ann)
        dead, failed = await self.write(ann, grant, self.event(), self.event(key=None))
        failures = [Failure(failed, "refused", 1, PAST)]
        await settle(ann, Settlement(grant, failed=failures, dead=[Failure(dead, "refused", 1)]))
        await ann.add(self.events(20))
        await self._work_off(ann, grant, clock)
        await bob.replay(refs(dead), "olga")
        await bob.reenter_due(STREAM, 10)
        ready, found = [], []
        for _ in range(100):
            clock.now += 0.05
            ready.append(bool((await ann.poll(STREAM, "ann", [grant])).ready))
            found = ids(await self.read(ann, grant))
            if len(found) == 2 and ready[-1]:
                break
        assert ready[-1], "a poll must see it, or nobody reads"
        assert found == ids([failed, dead]), "one returns to its place, the other enters at the end"


class MysqlInterleavings(Interleavings):
    def without_second_tries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(database, "_ATTEMPTS", 1)

    @asynccontextmanager
    async def holding_audit(self, store: SqlStore) -> AsyncIterator[Any]:
        assert isinstance(store.database, MysqlDatabase)
        async with store.database.alone() as one:
            await one.run(f"LOCK TABLES {probe_of(store).tables['audit']} WRITE")
            try:
                yield one
            finally:
                await one.run("UNLOCK TABLES")

    async def _waiting(self, store: SqlStore) -> int:
        # The server renews what it shows of transactions only for who has not asked for a tenth of a second.
        await asyncio.sleep(0.12)
        text = """SELECT (SELECT count(*) FROM information_schema.innodb_trx
                WHERE trx_state = 'LOCK WAIT' AND instr(trx_query, :prefix) > 0)
            + (SELECT count(*) FROM information_schema.processlist
                WHERE state LIKE 'Waiting for table%' AND instr(info, :prefix) > 0)"""
        probe = probe_of(store)
        ((count,),) = await probe.query(text, prefix=probe.prefix)
        return int(count)

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
            settling = await self.blocked(bob, self.publish(ann, grant, one, two))
            row = {"operator": "o" * 200, "action": "a", "stream": STREAM, "event_id": None, "consumer": ""}
            await tx.execute_many(bob.statements["audit"], [row] * 50)
            await tx.fetch(bob.statements.make("SELECT 1 FROM {event} WHERE id = :id FOR UPDATE"), id=one.id)
            # It was rolled back, and begins again.
            async with asyncio.timeout(20):
                while await self._waiting(bob) != 1:
                    assert not settling.done(), f"it did not wait: {settling}"
        await settling
        assert await self.count(ann) == {Status.PUBLISHED: 2}

    @pytest.mark.asyncio
    async def test_a_statement_that_is_cancelled_leaves_no_lock(self, ann: SqlStore, bob: SqlStore) -> None:
        grant = await self.own(ann)
        one, two = await self.write(ann, grant, *self.events(2))
        async with self.holding_event(bob, two) as tx:
            settling = await self.blocked(bob, self.publish(ann, grant, one, two))
            settling.cancel()
            await asyncio.wait([settling])
            assert settling.cancelled()
            async with asyncio.timeout(20):
                while await self._waiting(bob):
                    pass
                # It had locked this one, and its lease.
                await tx.fetch(bob.statements.make("SELECT 1 FROM {event} WHERE id = :id FOR UPDATE"), id=one.id)
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
                settle(store, Settlement(grant, published=[event], keep_published=False)),
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
            await settle(store, Settlement(grant, dead=[Failure(dead, "refused", 1)]))
            await self.fail_head(store, grant, last)
            aside, replayed = await asyncio.gather(
                settle(store, Settlement(grant, published=[last], release_keys=[key])), other.replay(refs(dead), "olga")
            )
            assert replayed == 1
            if aside:
                run = await self.read_due(store, grant)
                assert run is not None
                assert ids(run[1]) == [dead.id]
            else:
                assert ids(await self.read(store, grant)) == [dead.id]
            assert not await settle(store, Settlement(grant, published=[dead], release_keys=[key]))

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
