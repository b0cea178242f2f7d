"""The row that measures how soon an event is at the broker, and the one that measures a relay with nothing to do."""

import asyncio
import statistics
import time
from datetime import UTC, datetime
from typing import Any

import asyncpg
import psutil

from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.drains import Scale
from benchmarks.load import fill_postgres
from benchmarks.load_events import payload
from benchmarks.report import Bar, Row
from benchmarks.wire import BareProducer
from pillarbox.event import key_hash
from pillarbox.ids import uuid7

PER_SECOND = 200
# A table in service holds what was published lately; an empty one would have plans of its own.
SETTLED = 100_000
IDLE_CPU_PERCENT = 1.0
IDLE_STATEMENTS = 2.0

INSERT = """INSERT INTO outbox_event (id, stream, tenant, topic, type, aggregate_type, aggregate_id, key, key_hash,
    payload, content_type, occurred_at, status)
    VALUES ($1, 'default', 'default', '', 'order.created', 'order', $2, $2, $3, $4, 'application/json', now(),
        'pending')"""


async def _write(url: str, seconds: float) -> dict[str, tuple[float, float]]:
    """A steady writer: by id, when each transaction was begun and when its commit returned."""
    connection = await asyncpg.connect(url)
    insert = await connection.prepare(INSERT)
    written = {}
    start = time.monotonic()
    for number in range(int(PER_SECOND * seconds)):
        await asyncio.sleep(max(0.0, start + number / PER_SECOND - time.monotonic()))
        event_id, key = uuid7(), f"order-{number % 1000}"
        body, hashed = payload(number), key_hash(event_id, key)
        begun = time.monotonic()
        await insert.fetch(event_id, key, hashed, body)
        written[str(event_id)] = (begun, time.monotonic())
    await connection.close()
    return written


def _bare_produce(bed: Bed, topic: str, seconds: float) -> list[float]:
    """At the same pace, each event flushed before the next."""
    producer = BareProducer(bed.servers, topic)
    taken = []
    start = time.monotonic()
    for number in range(int(PER_SECOND * seconds)):
        time.sleep(max(0.0, start + number / PER_SECOND - time.monotonic()))
        row = (uuid7(), f"order-{number % 1000}", datetime.now(UTC), payload(number))
        begun = time.monotonic()
        producer.send([row])
        taken.append(time.monotonic() - begun)
    return taken


def _serve(bed: Bed, topic: str) -> Child:
    settings = {"servers": bed.servers, "topic": topic, "url": bed.url, "prefix": "outbox", "keep": True}
    return Child("ours", settings, bed.folder)


def _through_relay(bed: Bed, topic: str, seconds: float) -> tuple[list[float], list[float]]:
    """From the begin of the transaction, and from the return of its commit, to the acknowledgement."""
    with _serve(bed, topic) as child:
        child.answer()
        asyncio.run(_write(bed.url, 0.5))
        written = asyncio.run(_write(bed.url, seconds))
        time.sleep(0.5)
        # Both processes read the one monotonic clock of the machine.
        acknowledged: dict[str, float] = child.finish()["acknowledged_at"]
    begun = [acknowledged[each] - at for each, (at, _) in written.items()]
    committed = [acknowledged[each] - at for each, (_, at) in written.items()]
    return begun, committed


def latency(bed: Bed, scale: Scale) -> Row:
    """From the begin of a transaction of one event to the broker's acknowledgement of it."""
    topic = bed.topic("postgres-latency")
    ours, floor = [], []
    everything: list[float] = []
    after_commit: list[float] = []
    parts: dict[str, list[float]] = {"commit": [], "produce": []}
    for _ in range(scale.rounds):
        fill_postgres(bed.url, 0, settled=SETTLED)
        begun, committed = _through_relay(bed, topic, scale.latency_seconds)
        fill_postgres(bed.url, 0, settled=SETTLED)
        written = asyncio.run(_write(bed.url, scale.latency_seconds))
        commit = statistics.median(end - start for start, end in written.values())
        produce = statistics.median(_bare_produce(bed, topic, scale.latency_seconds))
        ours.append(1000 * statistics.median(begun))
        floor.append(1000 * (commit + produce))
        everything += begun
        after_commit += committed
        parts["commit"].append(1000 * commit)
        parts["produce"].append(1000 * produce)
        took = f"commit {1000 * commit:.2f} ms, produce {1000 * produce:.2f} ms"
        say(f"  postgres-latency: ours {ours[-1]:.2f} ms; bare: {took}")
    bed.drop_topic(topic)
    cuts = statistics.quantiles(everything, n=100)
    extra: dict[str, Any] = {"p50": 1000 * cuts[49], "p95": 1000 * cuts[94], "p99": 1000 * cuts[98]}
    extra["after_commit_p50"] = 1000 * statistics.median(after_commit)
    extra |= {f"bare_{name}": statistics.median(found) for name, found in parts.items()}
    return Row("postgres-latency", "ms", Bar(3.0, at_most=True), ours, floor, extra)


def idle(bed: Bed, scale: Scale) -> list[Row]:
    """What a relay costs while nothing happens: of a core, and of the database."""
    topic = bed.topic("postgres-idle")
    fill_postgres(bed.url, 0, settled=SETTLED)
    count = "SELECT xact_commit FROM pg_stat_database WHERE datname = 'bench'"
    share, statements = [], []
    with _serve(bed, topic) as child:
        child.answer()
        process = psutil.Process(child.pid)
        time.sleep(4)  # until it sleeps as long as it ever does
        for _ in range(scale.rounds):
            before, used, since = asyncio.run(bed.question(count)), process.cpu_times(), time.monotonic()
            time.sleep(scale.idle_seconds)
            seconds = time.monotonic() - since
            now = process.cpu_times()
            share.append(100 * (now.user + now.system - used.user - used.system) / seconds)
            statements.append((asyncio.run(bed.question(count)) - before) / seconds)
            say(f"  postgres-idle: {share[-1]:.2f} % of a core, {statements[-1]:.2f} transactions/s")
        child.finish()
    bed.drop_topic(topic)
    bar = Bar(1.0, at_most=True)
    return [
        Row("postgres-idle-cpu", "% of a core", bar, share, [IDLE_CPU_PERCENT] * len(share)),
        Row("postgres-idle-statements", "per second", bar, statements, [IDLE_STATEMENTS] * len(statements)),
    ]
