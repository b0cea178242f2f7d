"""What the hot statements cost: the right index, and rows in proportion to the batch, without any statistics."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from pillarbox.ids import uuid7_floor
from pillarbox.store import Grant
from pillarbox.stores._id_walk import FIRST_ID, LAST_ID
from pillarbox.stores.sql import SqlStore, Statement
from pillarbox.stores.sql.ordered import fence
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
async def grant(store: SqlStore) -> Grant:
    """Shard 0 of a table of which nine tenths are settled, without an ANALYZE."""
    insert = "INSERT INTO {event} (id, stream, tenant, topic, type, key, key_hash, payload, content_type, status)"
    if "postgres" in store.description:
        await store._db.run(f"ALTER TABLE {store._names.parts['event']} SET (autovacuum_enabled = false)")
        rows = """SELECT gen_random_uuid(), :stream, 't', '', 'x', 'k' || n % 40, n % 40, 'p'::bytea, 'c', 'pending'
            FROM generate_series(1, :count) AS n"""
    else:
        rows = """SELECT printf('%08x-0000-7000-8000-000000000000', n), :stream, 't', '', 'x', 'k' || n % 40, n % 40,
            x'70', 'c', 'pending' FROM (WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c
            WHERE n < :count) SELECT n FROM c)"""
    await store._db.execute(store._statement(f"{insert} {rows}"), stream=STREAM, count=EVENTS)
    settle = "UPDATE {event} SET status = 'published', published_at = {now} WHERE seq <= :last"
    await store._db.execute(store._statement(settle), last=EVENTS * 9 // 10)
    await store.join(STREAM, "ann", 60)
    grants = await store.take(STREAM, "ann", 4, 60)
    return next(each for each in grants if each.shard == 0)


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
        return "ARRAY[" + ", ".join(map(literal, value)) + "]::uuid[]"
    return str(value) if isinstance(value, int | float) else f"'{value}'"


async def explain(store: SqlStore, statement: Statement, **values: Any) -> Explained:
    arguments = [values[name] for name in statement.names]
    how = "EXPLAIN (FORMAT JSON, ANALYZE)"
    call = f"({', '.join(map(literal, arguments))})" if arguments else ""
    async with store._database._connection() as one:  # type: ignore[attr-defined]
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
    return Explained([json.loads(text)[0]["Plan"] for text in texts], store._names.parts["event"])


async def test_a_read_walks_the_ready_index_from_its_head(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    plan = await explain(store, store._sql["read"], **fence(grant), limit=BATCH, inline=10**6, floor=0)
    assert store._names.parts["ready_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert BATCH <= plan.rows <= 2 * BATCH


async def test_a_read_from_a_floor_does_too(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    plan = await explain(store, store._sql["read"], **fence(grant), limit=BATCH, inline=10**6, floor=EVENTS - 1000)
    assert store._names.parts["ready_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 2 * BATCH


async def test_a_poll_touches_one_row_for_each_shard(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    shards = range(4)
    values = {f"shard_{n}": n for n in shards} | {f"floor_{n}": 0 for n in shards}
    plan = await explain(store, store._poll_statement(4), stream=STREAM, worker="ann", **values)
    assert store._names.parts["ready_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 8


async def test_a_poll_of_an_empty_stream_touches_nothing(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    values = {f"shard_{n}": n for n in range(4)} | {f"floor_{n}": 0 for n in range(4)}
    plan = await explain(store, store._poll_statement(4), stream="empty", worker="ann", **values)
    assert "Seq Scan" not in plan.kinds
    assert plan.rows == 0


async def test_a_due_key_is_read_by_its_own_index(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    hold = "UPDATE {event} SET status = 'held' WHERE status = 'pending' AND shard = 0"
    await store._db.execute(store._statement(hold))
    plan = await explain(store, store._sql["read_key"], **fence(grant), key="k4", limit=10, inline=10**6)
    assert plan.indexes & {store._names.parts["aside_index"]}
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 2 * 10


async def test_instants_that_have_come_are_found_by_their_index(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    later = "UPDATE {event} SET status = 'scheduled', next_attempt_at = {later:delay} WHERE status = 'pending'"
    await store._db.execute(store._statement(later), delay=3600.0)
    plan = await explain(store, store._sql["due_ids"], stream=STREAM, limit=BATCH)
    assert store._names.parts["due_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert plan.rows == 0
    now = "UPDATE {event} SET next_attempt_at = {now} WHERE status = 'scheduled' AND shard = 1"
    await store._db.execute(store._statement(now))
    plan = await explain(store, store._sql["due_ids"], stream=STREAM, limit=BATCH)
    assert plan.rows <= 500, "those that are due, and nothing else"


async def test_promotion_goes_by_the_primary_key(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    ids = [row[0] for row in await query(store, "SELECT id FROM {event} WHERE seq > 19000 LIMIT 20")]
    plan = await explain(store, store._sql["promote"], ids=ids)
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 2 * 20


async def test_a_settle_goes_by_the_primary_key(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    ids = [row[0] for row in await query(store, "SELECT id FROM {event} WHERE seq > 19000 AND shard = 0 LIMIT 20")]
    plan = await explain(store, store._sql["publish_fenced"], **fence(grant), ids=ids)
    assert "Seq Scan" not in plan.kinds
    assert 20 <= plan.rows <= 3 * 20


@pytest.mark.parametrize("bound", ["old", "last"])
async def test_a_page_of_prune_goes_by_the_primary_key(
    pg: SqlOutbox, store: SqlStore, grant: Grant, bound: str
) -> None:
    limit = uuid7_floor(4e9) if bound == "old" else LAST_ID
    plan = await explain(store, store._sql["prune_page_by_id"], keep=-3600.0, limit=BATCH, after=FIRST_ID, bound=limit)
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 2 * BATCH


async def test_a_claim_walks_the_ready_index(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    plan = await explain(
        store, store._sql["claim_shard"], stream=STREAM, shard=0, worker="ann", limit=BATCH, seconds=60.0
    )
    assert store._names.parts["ready_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 4 * BATCH


async def test_stuck_events_are_found_by_the_leased_index(pg: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    await store.claim(STREAM, 0, "ann", 100, 60.0)
    plan = await explain(store, store._sql["stuck"], stream=STREAM, stuck=-600.0, limit=BATCH)
    assert store._names.parts["leased_index"] in plan.indexes
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 100, "those that are leased, and nothing else"


async def test_streams_that_wait_are_found_without_counting_their_events(
    pg: SqlOutbox, store: SqlStore, grant: Grant
) -> None:
    await store.add(mixed(KEYS, 50, stream="another"))
    plan = await explain(store, store._sql["waiting_streams"])
    assert "Seq Scan" not in plan.kinds
    assert plan.rows <= 10


async def plan_of(store: SqlStore, statement: Statement) -> str:
    explained = Statement.__new__(Statement)
    explained.names = statement.names
    explained.text = f"EXPLAIN QUERY PLAN {statement.text}"
    rows = await store._db.fetch(explained, **dict.fromkeys(statement.names, 0))
    return "\n".join(row[3] for row in rows)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("read", "ready_index"),
        ("ready_ids", "ready_index"),
        ("read_key", "aside_index"),
        ("due_ids", "due_index"),
        ("suspect_ids", "due_index"),
        ("stuck", "leased_index"),
        ("due_key", "blocked_due_index"),
    ],
)
async def test_sqlite_uses_the_index_that_was_made_for_it(
    sqlite: SqlOutbox, store: SqlStore, grant: Grant, name: str, index: str
) -> None:
    plan = await plan_of(store, store._sql[name])
    assert store._names.parts[index] in plan
    assert f"SCAN {store._names.parts['event']}" not in plan
    if name != "due_key":
        assert "USE TEMP B-TREE" not in plan, "the index gives the order"


async def test_sqlite_polls_by_indexes_alone(sqlite: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    plan = await plan_of(store, store._poll_statement(4))
    assert plan.count(store._names.parts["ready_index"]) == 4
    assert f"SCAN {store._names.parts['event']}" not in plan


@pytest.mark.parametrize("name", ["publish", "hold", "remove", "promote", "prune_page", "prune"])
async def test_sqlite_finds_rows_by_id_or_seq(sqlite: SqlOutbox, store: SqlStore, grant: Grant, name: str) -> None:
    plan = await plan_of(store, store._sql[name])
    assert f"SEARCH {store._names.parts['event']}" in plan
    assert f"SCAN {store._names.parts['event']}" not in plan
