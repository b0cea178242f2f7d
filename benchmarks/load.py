"""Backlogs: outboxes in the state with which a row starts, the same for both sides of a pair."""

import asyncio
import base64
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import asyncpg

from benchmarks.load_events import COLUMNS, HOT_KEY, KEYS, PAYLOAD_BYTES, SHARDS, payload
from benchmarks.load_mongo import add_mongo, fill_mongo
from benchmarks.load_mysql import add_mysql, fill_mysql
from pillarbox.event import key_hash
from pillarbox.ids import uuid7
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.sqlite import SqliteStore


def _insert(text: str) -> str:
    """``text``: the SQL of the payload of event n."""
    return f"""INSERT INTO {{p}}_event ({COLUMNS})
        SELECT uuidv7(), 'default', 'default', '', 'order.created', 'order', key, key,
            (crc32(convert_to(key, 'UTF8')) & 2147483647)::int, convert_to({text}, 'UTF8'),
            'application/json', 'pending'
        FROM (SELECT n, 'order-' || n % {KEYS} AS key FROM generate_series(1, $1::int) AS n) AS numbered"""


_HEAD = """'{{"number":' || n || ',"text":"'"""
_POSTGRES = _insert(f"""rpad({_HEAD}, {PAYLOAD_BYTES - 2}, 'x') || '"}}}}'""")
_LARGE = _insert(f"""{_HEAD} || left($2::text, $3::int - 21 - length(n::text)) || '"}}}}'""")
_SETTLE_ALL = "UPDATE {p}_event SET status = 'published', published_at = now(), attempts = 1 WHERE status = 'pending'"
_HOT_EVENTS = f"""INSERT INTO {{p}}_event ({COLUMNS})
    SELECT uuidv7(), 'default', 'default', '', 'order.created', 'order', $2::text, $2, $3, $4::bytea,
        'application/json', CASE WHEN n = 1 THEN 'failed' ELSE 'held' END
    FROM generate_series(1, $1::int) AS n"""
_HOT_ROW = """INSERT INTO {p}_held_key (stream, shard, key, mode, next_attempt_at)
    VALUES ('default', $1, $2, 'retrying', now() + interval '1 day')"""
_WAITING = "SELECT count(*) FROM {p}_event WHERE status = 'pending'"
_SQLITE = f"INSERT INTO outbox_event ({COLUMNS}) VALUES ({', '.join('?' * len(COLUMNS.split(',')))})"


async def add_events(connection: Any, prefix: str, events: int, size: int = PAYLOAD_BYTES) -> None:
    """Add events in one statement."""
    if size == PAYLOAD_BYTES:
        await connection.execute(_POSTGRES.format(p=prefix), events)
    else:
        # PostgreSQL compresses large values, but not random ones.
        text = base64.b64encode(Random(size).randbytes(size)).decode()
        await connection.execute(_LARGE.format(p=prefix), events, text, size)


async def waiting(url: str, prefix: str) -> int:
    """The number of pending events in PostgreSQL; 0 if there is no such outbox."""
    connection = await asyncpg.connect(url)
    try:
        if await connection.fetchval("SELECT to_regclass($1)", f"{prefix}_event") is None:
            return 0
        return int(await connection.fetchval(_WAITING.format(p=prefix)))
    finally:
        await connection.close()


async def add_more(url: str, prefix: str, events: int) -> None:
    """Add events, in any database."""
    if url.startswith("mysql:"):
        await add_mysql(url, prefix, events)
        return
    if url.startswith("mongodb:"):
        await add_mongo(url, prefix, events)
        return
    connection = await asyncpg.connect(url)
    try:
        await add_events(connection, prefix, events)
    finally:
        await connection.close()


def fill(url: str, events: int, *, prefix: str = "outbox") -> None:
    """Make an outbox with so many pending events and nothing else, in any database."""
    if url.startswith("mysql:"):
        asyncio.run(fill_mysql(url, prefix, events))
    elif url.startswith("mongodb:"):
        asyncio.run(fill_mongo(url, prefix, events))
    else:
        fill_postgres(url, events, prefix=prefix)


async def _fill(url: str, prefix: str, events: int, held: int, settled: int, size: int) -> None:
    store = PostgresStore(url, prefix=prefix, shards=SHARDS, wake_up=False)
    await store.migrate()
    await store.close()
    connection = await asyncpg.connect(url)
    try:
        tables = ", ".join(f"{prefix}_{name}" for name in ("event", "lease", "worker", "held_key", "sleeper"))
        await connection.execute(f"TRUNCATE {tables} RESTART IDENTITY")
        # Kafka knows the batches of the old outbox.
        await connection.execute(f"DELETE FROM {prefix}_meta WHERE name = 'identity'")
        if held:
            number = key_hash(UUID(int=0), HOT_KEY)
            await connection.execute(_HOT_EVENTS.format(p=prefix), held, HOT_KEY, number, payload(0))
            await connection.execute(_HOT_ROW.format(p=prefix), number % SHARDS, HOT_KEY)
        if settled:
            await add_events(connection, prefix, settled)
            await connection.execute(_SETTLE_ALL.format(p=prefix))
        if events:
            await add_events(connection, prefix, events, size)
            await _check(connection, prefix, size)
        await connection.execute(f"VACUUM ANALYZE {prefix}_event")
        await connection.execute("CHECKPOINT")
    finally:
        await connection.close()


async def _check(connection: Any, prefix: str, size: int) -> None:
    row = await connection.fetchrow(
        f"SELECT key, key_hash, payload FROM {prefix}_event WHERE status = 'pending' LIMIT 1"
    )
    if row["key_hash"] != key_hash(UUID(int=0), row["key"]) or len(row["payload"]) != size:
        raise RuntimeError("the loader's events differ from those that pillarbox would write")


def fill_postgres(
    url: str, events: int, *, prefix: str = "outbox", held: int = 0, settled: int = 0, size: int = PAYLOAD_BYTES
) -> None:
    """Make a new outbox.

    events: pending ones, with payloads of ``size`` bytes. held: events of one held key. settled: published ones.
    """
    asyncio.run(_fill(url, prefix, events, held, settled, size))


def fill_sqlite(path: Path, events: int) -> None:
    """Make a new file with so many pending events."""
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()
    asyncio.run(_migrate_sqlite(path))
    connection = sqlite3.connect(path)
    with connection:
        connection.executemany(_SQLITE, _rows(events))
    connection.execute("ANALYZE")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


async def _migrate_sqlite(path: Path) -> None:
    store = SqliteStore(str(path), shards=SHARDS)
    await store.migrate()
    await store.close()


def _rows(events: int) -> Iterator[tuple[Any, ...]]:
    for number in range(events):
        event_id, key = uuid7(), f"order-{number % KEYS}"
        yield (
            str(event_id),
            "default",
            "default",
            "",
            "order.created",
            "order",
            key,
            key,
            key_hash(event_id, key),
            payload(number),
            "application/json",
            "pending",
        )
