"""What cheap questions cost: they read indexes, and of each no more than the limit, however many events there are."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from pillarbox.conformance.probes import SqlProbe, probe_of
from pillarbox.event import Mode, Status, key_hash
from pillarbox.mongo.documents import to_document
from pillarbox.store import Grant, Store
from pillarbox.stores.mongo import MongoStore
from pillarbox.stores.sql import SqlStore
from servers import Mongo
from tests.integration.mongos import Recorder
from tests.integration.relays import STREAM, MongoOutbox, SqlOutbox, mongo_outbox, numbered
from tests.integration.test_mongo_plans import Recorded, cost
from tests.integration.test_relay_plans import explain

pytestmark = pytest.mark.asyncio

LIMIT = 1_000
MANY = 20_000
MILLION = 1_000_000
_PLACES = 7  # of the statement, each of which reads up to the limit
_CHUNK = 10_000
_COLUMNS = "id, stream, tenant, topic, type, key_hash, payload, content_type, status"
_ID: Mapping[str, str] = {
    "postgres": "gen_random_uuid()",
    "sqlite": "lower(hex(randomblob(4)) || '-0000-7000-8000-' || hex(randomblob(6)))",
    "mysql": "UNHEX(REPLACE(UUID(), '-', ''))",
}


async def fill(store: Store, settled: int, pending: int) -> None:
    """Published events, behind them some that wait, and as many in each other state as the limit. No statistics."""
    await store.announce(STREAM, Mode.ORDERED, "memory")
    if isinstance(store, MongoStore):
        await _fill_mongo(store, settled, pending)
        return
    assert isinstance(store, SqlStore)
    probe = probe_of(store)
    if "postgres" in store.description:
        await probe.run(f"ALTER TABLE {probe.tables['event']} SET (autovacuum_enabled = false)")
    await store.add(numbered("k", LIMIT))
    await _double(probe, "pending", settled)
    await probe.execute("UPDATE {event} SET status = 'published', published_at = created_at")
    await store.add(numbered("k", LIMIT))
    for status in ("failed", "held", "processing", "pending"):
        await _double(probe, status, LIMIT if status != "pending" else pending)


def _kind(probe: SqlProbe) -> str:
    return (
        next(kind for kind in _ID if probe.url.startswith((kind, kind.replace("mysql", "mariadb"))))
        if probe.url
        else "sqlite"
    )


async def _double(probe: SqlProbe, status: str, count: int) -> None:
    """Copy events that wait until there are so many of this state."""
    chosen = f"SELECT {_ID[_kind(probe)]}, {_COLUMNS[4:-8]}, '{status}' FROM {{event}} WHERE status = 'pending'"
    there = 0 if status != "pending" else LIMIT
    while there < count:
        copied = await probe.execute(f"INSERT INTO {{event}} ({_COLUMNS}) {chosen} LIMIT :more", more=count - there)
        assert copied
        there += copied


async def _fill_mongo(store: MongoStore, settled: int, pending: int) -> None:
    events = store.database.collection("event")
    shards = store.shards
    for status, count in (
        ("published", settled),
        ("failed", LIMIT),
        ("held", LIMIT),
        ("processing", LIMIT),
        ("pending", pending),
    ):
        for start in range(0, count, _CHUNK):
            made = [to_document(event, shards) for event in numbered(None, min(_CHUNK, count - start))]
            await events.insert_many([{**document, "status": status} for document in made], ordered=False)


async def counted(store: Store, limit: int) -> dict[Status, int]:
    ((found),) = await store.gauges(limit)
    assert found.at_least
    return dict(found.counts)


async def check(outbox: SqlOutbox, store: SqlStore, settled: int, pending: int) -> None:
    await fill(store, settled, pending)
    assert (await counted(store, LIMIT))[Status.PENDING] == LIMIT
    hot = {"stream": STREAM, "shard": key_hash(UUID(int=0), "k") % store.shards, "limit": LIMIT}
    await cheap(store, "gauges", stream=STREAM, limit=LIMIT, last_shard=store.shards - 1)
    await cheap(store, "held_key_events", **hot, key="k")
    await cheap(store, "before", **hot, seq=2**62)


async def cheap(store: SqlStore, name: str, **values: Any) -> None:
    """The statement reads no table from end to end, and of each index no more than the limit."""
    probe = probe_of(store)
    if "postgres" in store.description:
        plan = await explain(store, name, **values)
        assert "Seq Scan" not in plan.kinds
        assert plan.rows <= _PLACES * LIMIT
        return
    words = "EXPLAIN QUERY PLAN" if "sqlite" in store.description else "EXPLAIN"
    rows = await probe.query(f"{words} {probe.statements.texts[name]}", **values)
    table = probe.tables["event"]
    scans = [row for row in rows if (f"SCAN {table}" in str(row)) or (table in row and "ALL" in row)]
    assert rows
    assert not scans


async def test_gauges_read_no_more_of_an_index_than_the_limit(sql: SqlOutbox, store: SqlStore) -> None:
    await check(sql, store, MANY, 2 * LIMIT)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_gauges_of_a_million_events_cost_no_more(sql: SqlOutbox, store: SqlStore) -> None:
    await check(sql, store, LIMIT, MILLION)


async def test_gauges_on_mongodb_examine_no_more_than_the_limit(mongo: Mongo) -> None:
    await check_mongo(mongo_outbox(mongo.url), MANY, 2 * LIMIT)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_gauges_of_a_million_events_on_mongodb_cost_no_more(mongo: Mongo) -> None:
    await check_mongo(mongo_outbox(mongo.url), LIMIT, MILLION)


async def check_mongo(outbox: MongoOutbox, settled: int, pending: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        store = outbox()
        await store.migrate()
        await store.open()
    try:
        await fill(store, settled, pending)
        recorder.sent.clear()
        assert (await counted(store, LIMIT))[Status.PENDING] == LIMIT
        recorded = Recorded(store, recorder, [Grant(STREAM, 0, "ann", 1)])
        sent = list(recorder.sent)
        for explained in await recorded.explain("aggregate"):
            keys, documents, indexes = cost(explained)
            assert "COLLSCAN" not in indexes
            assert max(keys, documents) <= LIMIT + 1
        recorder.sent[:] = sent
        for explained in await recorded.explain("find"):
            keys, documents, indexes = cost(explained)
            assert "COLLSCAN" not in indexes
            assert max(keys, documents) <= 2 * store.shards
    finally:
        await store.close()
