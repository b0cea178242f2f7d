"""What the hot statements cost: the right index, and rows in proportion to the batch, without any statistics."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio

from pillarbox.conformance.probes import probe_of
from pillarbox.event import Mode
from pillarbox.store import Grant
from pillarbox.stores._id_walk import FIRST_ID
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.sql.turns import fence, joint_fence
from tests.integration.relays import (
    STREAM,
    SqlOutbox,
    key_of,
    mixed,
    query,
)

pytestmark = pytest.mark.asyncio

EVENTS = 20_000
BATCH = 50
KEYS = [key_of(shard) for shard in range(4)]


@pytest_asyncio.fixture
async def grants(store: SqlStore) -> Sequence[Grant]:
    """The shards of a table of which nine tenths are settled, without an ANALYZE."""
    probe = probe_of(store)
    insert = "INSERT INTO {event} (id, stream, tenant, topic, type, key, key_hash, payload, content_type, status)"
    if "postgres" in store.description:
        await probe.run(f"ALTER TABLE {probe.tables['event']} SET (autovacuum_enabled = false)")
        rows = """SELECT gen_random_uuid(), :stream, 't', '', 'x', 'k' || n % 40, n % 40, 'p'::bytea, 'c', 'pending'
            FROM generate_series(1, :count) AS n"""
    else:
        rows = """SELECT printf('%08x-0000-7000-8000-000000000000', n), :stream, 't', '', 'x', 'k' || n % 40, n % 40,
            x'70', 'c', 'pending' FROM (WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c
            WHERE n < :count) SELECT n FROM c)"""
    await probe.execute(f"{insert} {rows}", stream=STREAM, count=EVENTS)
    settle = "UPDATE {event} SET status = 'published', published_at = created_at WHERE seq <= :last"
    await probe.execute(settle, last=EVENTS * 9 // 10)
    await store.announce(STREAM, Mode.ORDERED, "memory")
    await store.join(STREAM, "ann", 60)
    return sorted(await store.take(STREAM, "ann", 4, 60), key=lambda grant: grant.shard)


@pytest.fixture
def grant(grants: Sequence[Grant]) -> Grant:
    return grants[0]


def nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


class Explained:
    """A statement as PostgreSQL ran it: planned for its values, and planned once for all values."""

    def __init__(self, plans: list[Mapping[str, Any]], event: str) -> None:
        trees = [list(nodes(plan)) for plan in plans]
        scans = [[node for node in tree if node.get("Relation Name") == event] for tree in trees]
        self.kinds = {node["Node Type"] for tree in scans for node in tree}
        self.indexes = set.intersection(
            *({node["Index Name"] for node in tree if "Index Name" in node} for tree in trees)
        )
        self.rows = max(sum(map(touched, tree)) for tree in scans)


def touched(node: Mapping[str, Any]) -> float:
    found: float = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
    return found


def literal(value: Any) -> str:
    if isinstance(value, list):
        kind = "uuid[]" if isinstance(value[0], UUID) else "bigint[]"
        return "ARRAY[" + ", ".join(map(literal, value)) + f"]::{kind}"
    return str(value) if isinstance(value, int | float) else f"'{value}'"


async def explain(store: SqlStore, name: str, **values: Any) -> Explained:
    statement = probe_of(store).statements[name]
    arguments = [values[name] for name in statement.names]
    how = "EXPLAIN (FORMAT JSON, ANALYZE)"
    call = f"({', '.join(map(literal, arguments))})" if arguments else ""
    one = await asyncpg.connect(probe_of(store).url)
    try:
        transaction = one.transaction()
        await transaction.start()
        texts = [await one.fetchval(f"{how} {statement.text}", *arguments)]
        await transaction.rollback()
        transaction = one.transaction()
        await transaction.start()
        await one.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        await one.execute(f"PREPARE probe AS {statement.text}")
        texts.append(await one.fetchval(f"{how} EXECUTE probe {call}"))
        await one.execute("DEALLOCATE probe")
        await transaction.rollback()
    finally:
        await one.close()
    return Explained([json.loads(text)[0]["Plan"] for text in texts], probe_of(store).tables["event"])


async def test_a_read_walks_the_ready_index_from_its_head(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    plan = await explain(store, "read", **fence(grant), limit=BATCH, inline=10**6, floor=0)
    assert probe_of(store).tables["ready_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert BATCH <= plan.rows <= 2 * BATCH


async def test_a_read_from_a_floor_does_too(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    plan = await explain(store, "read", **fence(grant), limit=BATCH, inline=10**6, floor=EVENTS - 1000)
    assert probe_of(store).tables["ready_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 2 * BATCH


@pytest.mark.parametrize("floor", [0, EVENTS - 1000])
async def test_a_joint_read_ends_at_its_limit(
    pg: SqlOutbox, store: SqlStore, grants: Sequence[Grant], floor: int
) -> None:
    values = {**joint_fence(grants), "inline": 10**6, "floors": [floor] * 4}
    plan = await explain(store, "read_joint", limit=BATCH, **values)
    assert probe_of(store).tables["ready_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert BATCH <= plan.rows <= 2 * BATCH
    waiting = EVENTS // 10 if floor == 0 else 1001
    plan = await explain(store, "read_joint", limit=EVENTS, **values)
    assert probe_of(store).tables["ready_index"] in plan.indexes
    assert waiting <= plan.rows <= 2 * waiting
    assert "Seq Scan" not in plan.kinds


async def test_a_poll_touches_one_row_for_each_shard(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    values = {"shards": list(range(4)), "floors": [0] * 4}
    plan = await explain(store, "poll", stream=STREAM, worker="ann", **values)
    assert probe_of(store).tables["ready_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 8


async def test_a_poll_of_an_empty_stream_touches_nothing(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    values = {"shards": list(range(4)), "floors": [0] * 4}
    plan = await explain(store, "poll", stream="empty", worker="ann", **values)
    assert "Seq Scan" not in plan.kinds
    assert plan.rows == 0


async def test_a_due_key_is_read_by_its_own_index(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    await probe_of(store).execute("UPDATE {event} SET status = 'held' WHERE status = 'pending' AND shard = 0")
    plan = await explain(store, "read_key", **fence(grant), key="k4", limit=10, inline=10**6)
    assert plan.indexes & {probe_of(store).tables["held_index"]}
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 2 * 10


async def test_instants_that_have_come_are_found_by_their_index(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    probe = probe_of(store)
    await probe.execute("UPDATE {event} SET status = 'scheduled' WHERE status = 'pending'")
    await probe.move("event", "next_attempt_at", 3600.0, status="scheduled")
    plan = await explain(store, "due", stream=STREAM, limit=BATCH)
    assert probe_of(store).tables["due_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert plan.rows == 0
    await probe.move("event", "next_attempt_at", 0.0, status="scheduled", shard=1)
    plan = await explain(store, "due", stream=STREAM, limit=BATCH)
    assert plan.rows <= 500, "those that are due, and nothing else"


async def test_an_event_comes_back_by_the_primary_key(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    ids = [row[0] for row in await query(store, "SELECT id FROM {event} WHERE seq > 19000 LIMIT 20")]
    plan = await explain(store, "return", stream=STREAM, ids=ids)
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 2 * 20
    plan = await explain(store, "reenter", stream=STREAM, id=ids[0])
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 2


async def test_a_settle_goes_by_the_primary_key(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    ids = [row[0] for row in await query(store, "SELECT id FROM {event} WHERE seq > 19000 AND shard = 0 LIMIT 20")]
    plan = await explain(store, "publish_fenced", **fence(grant), ids=ids)
    assert "Seq Scan" not in plan.kinds
    assert 20 <= plan.rows <= 3 * 20


@pytest.mark.parametrize("name", ["publish_joint", "delete_joint"])
async def test_a_joint_settle_goes_by_the_primary_key(
    pg: SqlOutbox, store: SqlStore, grants: Sequence[Grant], name: str
) -> None:
    ids = [row[0] for row in await query(store, "SELECT id FROM {event} WHERE seq > 19000 LIMIT 20")]
    plan = await explain(store, name, **joint_fence(grants), ids=ids)
    assert "Seq Scan" not in plan.kinds
    assert 20 <= plan.rows <= 3 * 20


async def test_a_page_of_prune_goes_by_the_primary_key(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    values = {"keep": 3600.0, "limit": BATCH, "id": FIRST_ID, "stream": ""}
    plan = await explain(store, "prune_page", **values)
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 2 * BATCH
    ids = [row[0] for row in await query(store, "SELECT id FROM {event} WHERE seq <= 20")]
    plan = await explain(store, "prune", keep=-3600.0, ids=ids)
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 3 * 20


async def test_a_claim_walks_the_ready_index(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    plan = await explain(store, "claim", stream=STREAM, shard=0, worker="ann", token=7, limit=BATCH, seconds=60.0)
    assert probe_of(store).tables["ready_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 4 * BATCH


async def test_stuck_events_are_found_by_the_leased_index(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    await store.claim(STREAM, 0, "ann", 100, 60.0)
    plan = await explain(store, "stuck", stream=STREAM, stuck=600.0, limit=BATCH)
    assert probe_of(store).tables["leased_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 100, "those that are leased, and nothing else"


async def test_streams_that_wait_are_found_without_counting_their_events(
    pg: SqlOutbox, store: SqlStore, grant: Grant
) -> None:
    await store.add(mixed(KEYS, 50, stream="another"))
    plan = await explain(store, "next_waiting", after="")
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 10


async def plan_of(store: SqlStore, name: str) -> str:
    statements = probe_of(store).statements
    values = dict.fromkeys(statements[name].names, 0) | {
        "shards": [0, 1],
        "tokens": [7, 8],
        "ids": ["a", "b"],
        "seqs": [1, 2],
    }
    rows = await probe_of(store).query(f"EXPLAIN QUERY PLAN {statements.texts[name]}", **values)
    return "\n".join(row[3] for row in rows)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("read", "ready_index"),
        ("read_joint", "ready_index"),
        ("ready", "ready_index"),
        ("read_key", "held_index"),
        ("due", "due_index"),
        ("suspects", "due_index"),
        ("stuck", "leased_index"),
        ("due_key", "held_due_index"),
    ],
)
async def test_sqlite_uses_the_index_that_was_made_for_it(
    sqlite: SqlOutbox, store: SqlStore, grant: Grant, name: str, index: str
) -> None:
    plan = await plan_of(store, name)
    assert probe_of(store).tables[index] in plan
    assert f"SCAN {probe_of(store).tables['event']}" not in plan
    if name != "due_key":
        assert "USE TEMP B-TREE" not in plan, "the index gives the order"


async def test_sqlite_polls_by_indexes_alone(sqlite: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    plan = await plan_of(store, "poll")
    assert f"{probe_of(store).tables['ready_index']} (stream=? AND shard=?)" in plan
    assert f"SCAN {probe_of(store).tables['event']}" not in plan


@pytest.mark.parametrize("name", ["publish", "hold", "remove", "return", "reenter", "prune_page", "prune"])
async def test_sqlite_finds_rows_by_id_or_seq(sqlite: SqlOutbox, store: SqlStore, grant: Grant, name: str) -> None:
    plan = await plan_of(store, name)
    assert f"SEARCH {probe_of(store).tables['event']}" in plan
    assert f"SCAN {probe_of(store).tables['event']}" not in plan
