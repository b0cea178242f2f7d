"""A careful loop by hand: lock a batch, send it, wait for the confirmations and mark it, in one transaction."""

import asyncio
from typing import Any

import asyncpg

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.peers.backlog import BYTES, NUMBERED, load
from benchmarks.wire import BareProducer

_LIMIT = 500
_TABLE = """CREATE TABLE IF NOT EXISTS loop_outbox (id bigserial PRIMARY KEY, key text NOT NULL, payload bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(), sent_at timestamptz);
    CREATE INDEX IF NOT EXISTS loop_outbox_unsent ON loop_outbox (id) WHERE sent_at IS NULL"""
_FILL = f"INSERT INTO loop_outbox (key, payload) SELECT key, {BYTES} FROM {NUMBERED}"
_READ = f"""SELECT id, key, created_at, payload FROM loop_outbox WHERE sent_at IS NULL
    ORDER BY id LIMIT {_LIMIT} FOR UPDATE SKIP LOCKED"""
_MARK = "UPDATE loop_outbox SET sent_at = now() WHERE id = ANY($1)"


async def run(settings: dict[str, Any]) -> Clock:
    connection = await asyncpg.connect(settings["url"])
    await connection.execute(_TABLE)
    await load(settings["url"], "loop_outbox", _FILL, settings["events"])
    producer, clock = BareProducer(settings["servers"], settings["topic"]), Clock(settings["goal"])
    while not clock.done.is_set():
        clock.begin()
        async with connection.transaction():
            rows = await connection.fetch(_READ)
            producer.send(rows)
            await connection.execute(_MARK, [row["id"] for row in rows])
        clock.settle(len(rows))
    await connection.close()
    return clock


def main() -> None:
    answer(asyncio.run(run(settings_from_parent())).report())


if __name__ == "__main__":
    main()
