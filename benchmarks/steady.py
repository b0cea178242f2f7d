"""Steady writers and producers: so many single events a second, each with the instants of its start and its end."""

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

# Events per second that one connection can surely write: a commit waits for the disk.
_PER_CONNECTION = 250
_KEYS = 1000

INSERT = """INSERT INTO outbox_event (id, stream, tenant, topic, type, aggregate_type, aggregate_id, key, key_hash,
    payload, content_type, occurred_at, status)
    VALUES ($1, 'default', 'default', '', 'order.created', 'order', $2, $2, $3, $4, 'application/json', now(),
        'pending')"""

Instants = dict[int, tuple[float, float]]
"""By number of the event: its start and its end on the monotonic clock."""
Values = Callable[[int], tuple[Any, ...]]
"""From the number of an event to the parameters of the INSERT."""


def key_of(number: int) -> str:
    return f"order-{number % _KEYS}"


def ours(number: int) -> tuple[Any, ...]:
    """The parameters of ``INSERT``."""
    event_id, key = uuid7(), key_of(number)
    return event_id, key, key_hash(event_id, key), payload(number)


async def _write(url: str, insert: str, values: Values, rate: float, numbers: range) -> Instants:
    writers = -(-int(rate) // _PER_CONNECTION)
    connections = [await asyncpg.connect(url) for _ in range(writers)]
    written: Instants = {}

    async def write_some(place: int) -> None:
        statement = await connections[place].prepare(insert)
        for count in range(place, len(numbers), writers):
            row = values(numbers[count])
            await asyncio.sleep(max(0.0, start + count / rate - time.monotonic()))
            begun = time.monotonic()
            await statement.fetch(*row)
            written[numbers[count]] = (begun, time.monotonic())

    start = time.monotonic() + 0.05
    await asyncio.gather(*map(write_some, range(writers)))
    for connection in connections:
        await connection.close()
    return written


def write(url: str, insert: str, values: Values, rate: float, seconds: float, first: int = 0) -> Instants:
    """Write transactions of one event."""
    return asyncio.run(_write(url, insert, values, rate, range(first, first + int(rate * seconds))))


def produce(servers: str, topic: str, rate: float, seconds: float, first: int = 0) -> Instants:
    """Produce events without a database, each flushed before the next."""
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
