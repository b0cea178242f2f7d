"""One measured consumer in its own process: ours, a bare script, or FastStream."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias
from uuid import UUID

import asyncpg

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from pillarbox import Consumer, Event, Handlers, Inbox
from pillarbox.urls import store_from_url

PREFIX: Final = "consumed"
CONSUMER: Final = "bench"
BATCH: Final = 500
PLACES: Final = 16

EFFECT: Final = "INSERT INTO consumed_effect (id, amount) VALUES ($1, 7)"
EFFECTS: Final = "INSERT INTO consumed_effect (id, amount) SELECT id, 7 FROM unnest($1::uuid[]) AS new (id)"

Side: TypeAlias = Callable[[dict[str, Any], Clock], Awaitable[None]]
"""Consumes a topic until the clock is done."""


async def prepare(url: str) -> None:
    """A place for effects and an inbox, both empty."""
    store = store_from_url(url, prefix=PREFIX)
    await store.migrate()
    await store.close()
    connection = await asyncpg.connect(url)
    table = "consumed_effect (id uuid PRIMARY KEY, amount integer NOT NULL)"
    await connection.execute(f"CREATE TABLE IF NOT EXISTS {table}")
    await connection.execute("TRUNCATE consumed_effect, consumed_inbox")
    await connection.close()


async def effects(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM consumed_effect"))
    finally:
        await connection.close()


async def ours(settings: dict[str, Any], clock: Clock) -> None:
    handlers, inbox = Handlers(concurrency=PLACES), Inbox(CONSUMER, prefix=PREFIX)
    pool = await asyncpg.create_pool(settings["url"], min_size=PLACES, max_size=PLACES)
    match settings["kind"]:
        case "batch":

            async def write_all(events: list[Event], tx: Any) -> None:
                await tx.execute(EFFECTS, [event.id for event in events])

            once = inbox.once(pool)(write_all)

            async def batch(events: list[Event]) -> None:
                clock.begin()
                await once(events)
                clock.settle(len(events))

            handlers.on_batch("*", size=BATCH)(batch)
        case "single":

            async def write(event: Event, tx: Any) -> None:
                await tx.execute(EFFECT, event.id)

            once_each = inbox.once(pool)(write)

            async def single(event: Event) -> None:
                clock.begin()
                await once_each(event)
                clock.settle(1)

            handlers.on("*")(single)
        case _:

            async def count(event: Event) -> None:
                clock.begin()
                clock.settle(1)

            handlers.on("*")(count)
    source = f"kafka://{settings['servers']}?topic={settings['topic']}&group={settings['topic']}"
    # As a process of its own, like `pillarbox consume`.
    consumer = Consumer(CONSUMER, source, to=handlers, on_dead="block", concurrency=PLACES)
    service = asyncio.create_task(consumer.run())
    await clock.done.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await service
    await pool.close()


async def serve(settings: dict[str, Any]) -> dict[str, float]:
    """Apply events one by one until told to stop: by number, the instant at which each commit returned."""
    handlers, inbox, at = Handlers(), Inbox(CONSUMER, prefix=PREFIX), dict[str, float]()
    pool = await asyncpg.create_pool(settings["url"], min_size=PLACES, max_size=PLACES)

    async def write(event: Event, tx: Any) -> None:
        await tx.execute(EFFECT, event.id)

    once = inbox.once(pool)(write)

    @handlers.on("*")
    async def apply(event: Event) -> None:
        await once(event)
        at[str(json.loads(event.payload)["number"])] = time.monotonic()

    source = f"kafka://{settings['servers']}?topic={settings['topic']}&group={settings['topic']}"
    async with Consumer(CONSUMER, source, to=handlers, on_dead="block") as consumer:
        await consumer.ready()
        answer({"ready": True})
        await asyncio.to_thread(sys.stdin.read)
    await pool.close()
    return at


async def drain(settings: dict[str, Any]) -> dict[str, Any]:
    clock, side = Clock(settings["events"]), settings["side"]
    await prepare(settings["url"])
    if side == "ours":
        await ours(settings, clock)
    elif side == "bare":
        from benchmarks.consume_bare import bare

        await bare(settings, clock)
    else:
        from benchmarks.consume_faststream import faststream

        await faststream(settings, clock)
    if settings["kind"] != "plain" and (found := await effects(settings["url"])) != settings["events"]:
        raise AssertionError(f"{found} of {settings['events']} events were applied")
    return clock.report()


def main() -> None:
    settings = settings_from_parent()
    answer(asyncio.run(serve(settings) if settings["side"] == "serve" else drain(settings)))


def ids_of(found: Sequence[Any]) -> list[UUID]:
    return [row[0] for row in found]


if __name__ == "__main__":
    main()
