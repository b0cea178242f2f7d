"""A database that is away, dies, refuses, or answers what it did not say."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pillarbox.batch import Batch
from pillarbox.conformance.probes import probe_of
from pillarbox.errors import SchemaError, StoreDown, StoreError
from pillarbox.event import Status
from pillarbox.publisher import Outcome, retry
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import supervisor
from pillarbox.store import Store
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.postgres.database import PostgresDatabase
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.sqlite import SqliteStore
from servers import Postgres
from servers.fixtures import OwnServer
from tests.integration.relays import (
    WAIT,
    Outbox,
    SqlOutbox,
    attempts,
    by_key,
    copies,
    counts,
    eventually,
    first_deliveries,
    in_order,
    in_the_midst,
    key_of,
    lease_in_doubt,
    mixed,
    numbered,
    postgres_outbox,
    refused,
    relay,
    settled,
    stream,
    until,
)

pytestmark = pytest.mark.asyncio

KEYS = [key_of(shard) for shard in range(4) for _ in range(2)]


async def retrying(write: Callable[[], Any]) -> None:
    """As an application would, until the database takes it."""

    async def attempt() -> bool:
        try:
            await write()
        except StoreDown:
            return False
        return True

    await eventually(attempt)


async def test_a_database_that_is_killed_under_load_loses_nothing(own_server: OwnServer) -> None:
    server = own_server(Postgres)
    outbox = postgres_outbox(server.url)
    store = outbox()
    await store.migrate()
    await store.open()
    to = MemoryPublisher()
    await store.add(mixed(KEYS, 600))
    async with relay(outbox(), stream(to, batch=20)):
        for goal in (100, 1000):
            await to.wait_for(goal, timeout=WAIT)
            async with in_the_midst(to):
                await asyncio.to_thread(server.kill)
            assert len(to.deliveries) < 4800
            await asyncio.to_thread(server.start)
        await retrying(lambda: store.add(mixed(KEYS, 5, first=601)))
        await settled(store, {Status.PUBLISHED: 4840})
    await store.close()
    assert first_deliveries(to.deliveries) == in_order(KEYS, 605)
    assert copies(to.deliveries) == 0, "what was published waits until it can be settled"


async def test_a_database_that_hangs_for_a_while_makes_no_copy(own_server: OwnServer) -> None:
    server = own_server(Postgres)
    outbox = postgres_outbox(server.url)
    store = outbox()
    await store.migrate()
    await store.open()
    to = MemoryPublisher()
    await store.add(mixed(KEYS, 100))
    async with relay(outbox(), stream(to, batch=10, lease=0.6)) as running:
        await to.wait_for(100)
        async with in_the_midst(to):
            await asyncio.to_thread(server.pause)
        assert len(to.deliveries) < 800
        await lease_in_doubt(running)
        await asyncio.to_thread(server.resume)
        await settled(store, {Status.PUBLISHED: 800})
    await store.close()
    assert by_key(to.deliveries) == in_order(KEYS, 100)


async def test_a_relay_waits_for_a_database_that_is_not_there_yet(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_CONNECT_SECONDS", 0.1)
    server = own_server(Postgres)
    outbox = postgres_outbox(server.url)
    store = outbox()
    await store.migrate()
    await store.open()
    await store.add(numbered("k", 3))
    await store.close()
    await asyncio.to_thread(server.kill)
    to = MemoryPublisher()
    waiting = relay(outbox(), stream(to))
    await waiting.start()
    await until(lambda: "store_down" in {getattr(record, "action", None) for record in caplog.records})
    await asyncio.to_thread(server.start)
    await waiting.ready()
    await to.wait_for(3)
    await waiting.stop()
    assert by_key(to.deliveries) == in_order(["k"], 3)
    told = [(record.levelname, getattr(record, "action", None)) for record in caplog.records]
    assert told.count(("WARNING", "store_down")) == 1, "said once, however often it is tried"
    assert told.count(("WARNING", "store_up")) == 1


async def test_a_wrong_password_is_told_in_one_sentence(own_server: OwnServer) -> None:
    server = own_server(Postgres)
    owner = postgres_outbox(server.url)()
    await owner.migrate()
    await probe_of(owner).run("CREATE ROLE ann LOGIN PASSWORD 'right'")
    rules = server.folder / "data" / "pg_hba.conf"
    rules.write_text("host all ann all scram-sha-256\n" + rules.read_text())
    await probe_of(owner).run("SELECT pg_reload_conf()")
    await owner.close()
    url = server.url.replace("postgres@", "ann:wrong@")

    async def ask() -> str:
        try:
            return await refused(PostgresStore(url))
        except pytest.fail.Exception:
            return ""

    said = await eventually(ask, lambda text: "refused" in text)
    assert "correct the URL" in said
    assert "wrong" not in said, "a secret"


async def test_a_missing_database_is_told_in_one_sentence(postgres: Postgres) -> None:
    url = postgres.url.rpartition("/")[0] + "/not_there"
    said = await refused(PostgresStore(url))
    assert "there is no such database; create it, or correct the URL" in said


async def test_missing_tables_are_told_in_one_sentence(outbox: Outbox) -> None:
    store = outbox()
    if isinstance(store, SqliteStore):
        Path(probe_of(store).url.removeprefix("sqlite:///")).touch()
    with pytest.raises(SchemaError, match=r"has no (tables|collections) yet; make them with"):
        async with relay(store, stream(MemoryPublisher())) as running:
            await running.ready()


async def test_a_missing_right_is_told_in_one_sentence(pg: SqlOutbox, store: SqlStore, postgres: Postgres) -> None:
    role = f"reader_{os.getpid()}"
    await probe_of(store).run(f"CREATE ROLE {role} LOGIN")
    await probe_of(store).run(f"GRANT SELECT ON {probe_of(store).tables['stream']} TO {role}")
    url = postgres.url.replace("postgres@", f"{role}@")
    said = await refused(PostgresStore(url, prefix=probe_of(store).prefix))
    assert "permission denied" in said
    assert "grant it to the user of the relay" in said


async def test_a_file_that_cannot_be_opened_is_told_in_one_sentence() -> None:
    assert "does not exist; correct the path" in await refused(SqliteStore("/nowhere/at/all.db"))
    with pytest.raises(StoreError, match="cannot be opened; check that its folder exists and is writable"):
        await SqliteStore("/nowhere/at/all.db").migrate()


async def test_a_start_that_fails_leaves_no_connection_behind(postgres: Postgres) -> None:
    store = PostgresStore(postgres.url, prefix=f"missing_{os.getpid()}")
    with pytest.raises(SchemaError):
        async with relay(store, stream(MemoryPublisher())) as running:
            await running.ready()
    assert isinstance(store.database, PostgresDatabase)
    still_open = store.database.is_open
    await store.close()
    assert not still_open


async def test_an_open_that_is_cancelled_leaves_no_connection_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    closed: list[sqlite3.Connection] = []

    class Noted(sqlite3.Connection):
        def close(self) -> None:
            super().close()
            closed.append(self)

    def connect(*arguments: Any, **named: Any) -> sqlite3.Connection:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(WAIT)
        return Noted(*arguments, **named)

    monkeypatch.setattr(sqlite3, "connect", connect)
    opening = asyncio.create_task(SqliteStore(str(tmp_path / "outbox.db")).migrate())
    await begun.wait()
    opening.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([opening])
    assert opening.cancelled()
    await until(lambda: closed)


class Deaf:
    """A connection on which the reply to every second settle is lost: the database has done it all the same."""

    def __init__(self, store: Store, patch: pytest.MonkeyPatch, name: str) -> None:
        self.lost = 0
        self._calls = 0
        self._real = getattr(store, name)
        patch.setattr(store, name, self)

    async def __call__(self, *arguments: Any) -> Any:
        answer = await self._real(*arguments)
        self._calls += 1
        if self._calls % 2:
            self.lost += 1
            raise StoreDown("the reply was lost")
        return answer


@pytest.mark.parametrize("keep", [0, 3600])
async def test_a_settle_whose_reply_is_lost_makes_no_copy(
    outbox: Outbox, store: Store, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    own = outbox()
    deaf = Deaf(own, monkeypatch, "settle")
    to = MemoryPublisher()
    to.fail_next(retry("busy"), key=KEYS[0])
    await store.add(mixed(KEYS, 20))
    async with relay(own, stream(to, batch=7, max_attempts=2), keep_published=keep):
        await to.wait_for(160)
        await settled(store, {Status.PUBLISHED: 160} if keep else {})
    assert deaf.lost > 5
    assert by_key(to.deliveries) == in_order(KEYS, 20)
    if keep:
        assert set(await attempts(store)) == {1, 2}, "nothing is charged twice"


async def test_a_settle_of_a_queue_whose_reply_is_lost_makes_no_copy(
    outbox: Outbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = outbox()
    deaf = Deaf(own, monkeypatch, "settle_claims")
    to = MemoryPublisher()
    await store.add(mixed(KEYS, 5))
    async with relay(own, stream(to, mode="queue")):
        await to.wait_for(40)
        await settled(store, {Status.PUBLISHED: 40})
    assert deaf.lost
    assert copies(to.deliveries) == 0
    assert set(await attempts(store)) == {1}


class Cutting(MemoryPublisher):
    """Ends every other session of the database after it has published."""

    def __init__(self, cut: Callable[[], Any]) -> None:
        super().__init__()
        self._cut = cut

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        outcomes = await super().publish(batch)
        await self._cut()
        return outcomes


async def test_sessions_that_are_cut_between_publish_and_settle_make_no_copy(pg: SqlOutbox, store: SqlStore) -> None:
    name = f"cut_{os.getpid()}"
    probe = probe_of(store)
    own = PostgresStore(f"{probe.url}?application_name={name}", prefix=probe.prefix)
    end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{name}'"
    to = Cutting(lambda: probe_of(store).run(end))
    await store.add(mixed(KEYS, 10))
    async with relay(own, stream(to, batch=5)):
        await to.wait_for(80)
        await settled(store, {Status.PUBLISHED: 80})
    assert by_key(to.deliveries) == in_order(KEYS, 10)
    assert (await counts(store)) == {Status.PUBLISHED: 80}
