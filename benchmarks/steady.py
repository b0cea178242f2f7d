"""Steady writers and producers: so many events a second, each on its own, with the instants of its begin and end."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import asyncpg

from benchmarks.load_events import payload
from benchmarks.wire import BareProducer
from pillarbox.event import key_hash
from pillarbox.ids import uuid7

# What one connection keeps up with for sure: a commit waits for the disk.
_PER_CONNECTION = 250
_KEYS = 1000

INSERT = """INSERT INTO outbox_event (id, stream, tenant, topic, type, aggregate_type, aggregate_id, key, key_hash,
    payload, content_type, occurred_at, status)
    VALUES ($1, 'default', 'default', '', 'order.created', 'order', $2, $2, $3, $4, 'application/json', now(),
        'pending')"""

Instants = dict[int, tuple[float, float]]
"""By an event's number, on the monotonic clock: when it was begun and when it was done."""
Values = Callable[[int], tuple[Any, ...]]
"""Of an event's number, for the INSERT."""


def key_of(number: int) -> str:
    return f"order-{number % _KEYS}"


def ours(number: int) -> tuple[Any, ...]:
    """For ``INSERT``."""
    event_id, key = uuid7(), key_of(number)
    return event_id, key, key_hash(event_id, key), payload(number)


async def _write(url: str, insert: str, values: Values, rate: float, numbers: range) -> Instants:
    lanes = -(-int(rate) // _PER_CONNECTION)
    connections = [await asyncpg.connect(url) for _ in range(lanes)]
    written: Instants = {}

    async def lane(place: int) -> None:
        statement = await connections[place].prepare(insert)
        for count in range(place, len(numbers), lanes):
            row = values(numbers[count])
            await asyncio.sleep(max(0.0, start + count / rate - time.monotonic()))
            begun = time.monotonic()
            await statement.fetch(*row)
            written[numbers[count]] = (begun, time.monotonic())

    start = time.monotonic() + 0.05
    await asyncio.gather(*map(lane, range(lanes)))
    for connection in connections:
        await connection.close()
    return written


def write(url: str, insert: str, values: Values, rate: float, seconds: float, first: int = 0) -> Instants:
    """Transactions of one event."""
    return asyncio.run(_write(url, insert, values, rate, range(first, first + int(rate * seconds))))


def produce(servers: str, topic: str, rate: float, seconds: float, first: int = 0) -> Instants:
    """Without a database: each event flushed before the next."""
    producer = BareProducer(servers, topic)
    produced: Instants = {}
    start = time.monotonic()
    for count in range(int(rate * seconds)):
        time.sleep(max(0.0, start + count / rate - time.monotonic()))
        number = first + count
        row = (uuid7(), key_of(number), datetime.now(UTC), payload(number))
        begun = time.monotonic()
        producer.send([row])
        produced[number] = (begun, time.monotonic())
    return produced
