"""The backlog of `benchmarks/load.py` in a peer's own table. Runs in the environment of the peer."""

import asyncio
import json
import sys
from typing import Any

import asyncpg

from benchmarks.load_events import KEYS, PAYLOAD_BYTES, payload

# The same numbers, keys and payloads as ours, to select from.
NUMBERED = f"(SELECT n, 'order-' || n % {KEYS} AS key FROM generate_series(1, $1::int) AS n) AS numbered"
TEXT = f"""rpad('{{"number":' || n || ',"text":"', {PAYLOAD_BYTES - 2}, 'x') || '"}}'"""
BYTES = f"convert_to({TEXT}, 'UTF8')"


async def load(url: str, table: str, insert: str, events: int, body: str = "payload") -> None:
    """Load these events and nothing else, then vacuum and checkpoint as for ours.

    insert: a statement that takes the number of events. body: the column of the payload.
    """
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f"TRUNCATE {table} RESTART IDENTITY")
        if events:
            await connection.execute(insert, events)
            await _check(connection, table, body)
        await connection.execute(f"VACUUM ANALYZE {table}")
        await connection.execute("CHECKPOINT")
    finally:
        await connection.close()


async def _check(connection: Any, table: str, body: str) -> None:
    found = json.loads(await connection.fetchval(f"SELECT {body} FROM {table} LIMIT 1"))
    if found != json.loads(payload(found["number"])):
        raise RuntimeError(f"the events in {table} are not those of the other side")


async def told_to_stop() -> None:
    """Wait until the harness closes the input."""
    await asyncio.to_thread(sys.stdin.read)
