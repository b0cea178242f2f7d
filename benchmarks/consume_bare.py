"""The floor of the rows `consumer-...`: a bare script with confluent-kafka and asyncpg, as fast as we can write it."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
from confluent_kafka import Consumer

from benchmarks.clock import Clock
from benchmarks.consume import BATCH, CONSUMER, EFFECT, EFFECTS, PLACES, ids_of
from pillarbox.consumer import decode
from pillarbox.event import Event
from pillarbox.source import Lane, Message

SIDE_BY_SIDE = 8  # transactions of a batch each

RECORD = "INSERT INTO consumed_inbox (consumer, event_id) VALUES ($1, $2) ON CONFLICT DO NOTHING"
RECORDS = (
    "INSERT INTO consumed_inbox (consumer, event_id) SELECT $1, id FROM unnest($2::uuid[]) AS new (id) ORDER BY id "
    "ON CONFLICT DO NOTHING RETURNING event_id"
)


async def bare(settings: dict[str, Any], clock: Clock) -> None:
    consumer: Any = Consumer({
        "bootstrap.servers": settings["servers"],
        "group.id": settings["topic"],
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "queued.min.messages": 5000,
        "fetch.queue.backoff.ms": 20,  # as ours: with the client's own second it would mostly wait
        "log_level": 2,
    })  # fmt: skip
    consumer.subscribe([settings["topic"]])
    pool = await asyncpg.create_pool(settings["url"], min_size=PLACES, max_size=PLACES)
    work = {"batch": _batch, "single": _single, "plain": _plain}[settings["kind"]]
    most = BATCH * SIDE_BY_SIDE if settings["kind"] == "batch" else BATCH
    committed_at = time.monotonic()
    while not clock.done.is_set():
        messages = [message for message in consumer.consume(most, 0.1) if message.error() is None]
        if not messages:
            continue
        clock.begin()
        await work(messages, pool, clock)
        if time.monotonic() - committed_at > 1:
            consumer.commit(asynchronous=True)
            committed_at = time.monotonic()
    consumer.close()
    await pool.close()


def _id(message: Any) -> UUID:
    return UUID(dict(message.headers())["event_id"].decode())


async def _batch(messages: Sequence[Any], pool: Any, clock: Clock) -> None:
    """Several transactions side by side, each with all messages of its keys: one alone would wait for the database."""
    shares = defaultdict(list)
    for message in messages:
        shares[hash(message.key()) % SIDE_BY_SIDE].append(_id(message))

    async def apply(ids: Sequence[UUID]) -> None:
        async with pool.acquire() as connection, connection.transaction():
            new = await connection.fetch(RECORDS, CONSUMER, ids)
            await connection.execute(EFFECTS, ids_of(new))
        clock.settle(len(ids))

    await asyncio.gather(*map(apply, shares.values()))


async def _single(messages: Sequence[Any], pool: Any, clock: Clock) -> None:
    by_key = defaultdict(list)
    for message in messages:
        by_key[message.key()].append(_id(message))

    async def apply(event_id: UUID) -> None:
        async with pool.acquire() as connection, connection.transaction():
            if await connection.execute(RECORD, CONSUMER, event_id) == "INSERT 0 1":
                await connection.execute(EFFECT, event_id)
        clock.settle(1)

    await _side_by_side(by_key.values(), apply)


async def _plain(messages: Sequence[Any], _pool: Any, clock: Clock) -> None:
    by_key = defaultdict(list)
    lane = Lane("bench")
    for message in messages:
        written_at = datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC)
        made = Message(
            lane, message.offset(), message.topic(), message.key(), message.value(), message.headers(), None, None,
            written_at,
        )  # fmt: skip
        by_key[message.key()].append(decode(made))

    async def handle(_event: Event) -> None:
        clock.settle(1)

    await _side_by_side(by_key.values(), handle)


async def _side_by_side(runs: Iterable[Sequence[Any]], work: Callable[[Any], Awaitable[None]]) -> None:
    """Each key's in order, up to so many keys at once."""
    left = iter(runs)

    async def one() -> None:
        for run in left:
            for each in run:
                await work(each)

    await asyncio.gather(*(one() for _ in range(PLACES)))
