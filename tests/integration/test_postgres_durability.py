"""Leases and settles wait for the disk, although the database's default is not to wait. Hints do not."""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TypeAlias

import asyncpg
import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox.conformance.events import make_event
from pillarbox.conformance.probes import probe_of
from pillarbox.event import Mode
from pillarbox.store import ClaimResults, Failure, Settlement
from pillarbox.stores.postgres import PostgresStore
from servers import Postgres
from tests.integration.relays import key_of

pytestmark = pytest.mark.asyncio

DATABASE: Final = f"durability_{os.getpid()}"
# A deferred trigger runs at the commit, with the setting that the commit obeys.
WITNESS: Final = (
    "CREATE TABLE IF NOT EXISTS witness (relation text, setting text)",
    "CREATE OR REPLACE FUNCTION witness() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO witness VALUES"
    " (TG_TABLE_NAME, current_setting('synchronous_commit')); RETURN NULL; END $$",
    "CREATE CONSTRAINT TRIGGER seen AFTER UPDATE OR DELETE ON outbox_event DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION witness()",
    "CREATE CONSTRAINT TRIGGER seen AFTER UPDATE OR DELETE ON outbox_lease DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION witness()",
)
Stores: TypeAlias = Callable[[str], AbstractAsyncContextManager[PostgresStore]]


@asynccontextmanager
async def own_pool(url: str) -> AsyncIterator[PostgresStore]:
    yield PostgresStore(url, wake_up=False)


@asynccontextmanager
async def behind_a_pooler(url: str) -> AsyncIterator[PostgresStore]:
    yield PostgresStore(url, wake_up=False, statement_cache=0)


@asynccontextmanager
async def borrowed_pool(url: str) -> AsyncIterator[PostgresStore]:
    async with asyncpg.create_pool(url, min_size=1, max_size=3) as pool:
        yield PostgresStore.of(pool, wake_up=False)


@asynccontextmanager
async def borrowed_engine(url: str) -> AsyncIterator[PostgresStore]:
    engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))
    yield PostgresStore.of(engine, wake_up=False)
    await engine.dispose()


@pytest_asyncio.fixture
async def database(postgres: Postgres, default: str) -> AsyncIterator[str]:
    """The URL of a database with this default."""
    server = await asyncpg.connect(postgres.url)
    await server.execute(f"CREATE DATABASE {DATABASE}")
    await server.execute(f"ALTER DATABASE {DATABASE} SET synchronous_commit = {default}")
    yield f"{postgres.url.rpartition('/')[0]}/{DATABASE}"
    await server.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")
    await server.close()


async def witnessed(store: PostgresStore) -> Sequence[Any]:
    probe = probe_of(store)
    seen = await probe.query("SELECT DISTINCT relation, setting FROM witness ORDER BY relation")
    await probe.run("TRUNCATE witness")
    return seen


@pytest.mark.parametrize(
    ("default", "stores"),
    [
        ("off", own_pool),
        ("local", own_pool),
        ("off", behind_a_pooler),
        ("off", borrowed_pool),
        ("off", borrowed_engine),
    ],
)
async def test_leases_and_settles_wait_for_the_disk(database: str, stores: Stores) -> None:
    async with stores(database) as store:
        await store.migrate()
        await store.open()
        for text in WITNESS:
            await probe_of(store).run(text)
        await store.announce("orders", Mode.ORDERED, "memory")
        grants = await store.take("orders", "ann", 16, 60.0)
        assert await witnessed(store) == [("outbox_lease", "on")]
        assert await store.renew(grants, 60.0)
        assert await witnessed(store) == [("outbox_lease", "on")]
        await store.add([make_event(stream="orders", key=key_of(shard, shards=16)) for shard in range(7)])
        found = {part.shard: part.events for part in await store.read(grants, 100, 1_000_000)}
        zero, one, two, *more = sorted(grants)
        for turn in (
            [Settlement(zero, published=found[0])],
            [Settlement(one, published=found[1], keep_published=False)],
            [Settlement(two, dead=[Failure(found[2][0], "refused", 1)])],
            [Settlement(grant, published=found[grant.shard]) for grant in more[:2]],
            [Settlement(grant, published=found[grant.shard], keep_published=False) for grant in more[2:4]],
        ):
            assert await store.settle(turn)
            assert await witnessed(store) == [("outbox_event", "on")]
        await store.announce("jobs", Mode.QUEUE, "memory")
        await store.add([make_event(stream="jobs", key="k")])
        (shard,) = (await store.poll("jobs", "ann", None)).ready
        (claim,) = await store.claim("jobs", shard, "ann", 5, 60.0)
        assert await witnessed(store) == [("outbox_event", "on")]
        assert await store.renew_claims([claim], 60.0)
        assert await witnessed(store) == [("outbox_event", "on")]
        assert await store.settle_claims([claim], ClaimResults(published=[claim.event])) == 0
        assert await witnessed(store) == [("outbox_event", "on")]
        await store.close()


@pytest.mark.parametrize("default", ["on"])
async def test_a_worker_that_falls_asleep_or_wakes_up_does_not_wait_for_the_disk(database: str) -> None:
    store = PostgresStore(database)
    await store.migrate()
    await store.open()
    for text in WITNESS:
        await probe_of(store).run(text)
    await probe_of(store).run(
        "CREATE CONSTRAINT TRIGGER seen AFTER INSERT OR DELETE ON outbox_sleeper DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION witness()"
    )
    for asleep in (True, False):
        await store.doze("orders", "ann", asleep)
        assert await witnessed(store) == [("outbox_sleeper", "off")]
    await store.close()
