"""The rows that measure how soon an event of a steady writer is at a consumer, for ours and for peers that serve."""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.drains import Scale
from benchmarks.latency import INSERT, PER_SECOND, SETTLED
from benchmarks.load import fill_postgres
from benchmarks.load_events import payload
from benchmarks.peers.connect import Connect
from benchmarks.peers.debezium import TABLE, Connector
from benchmarks.peers.drains import TXOUTBOX, left_out
from benchmarks.peers.watch import Arrivals
from benchmarks.report import Bar, Row
from pillarbox.event import key_hash
from pillarbox.ids import uuid7
from tests.servers import MissingError

_BAR = Bar(1.0, at_most=True)
_WARM_UP_SECONDS = 1.0
_LATEST_SECONDS = 30.0
_AT_ONCE = {"poll.interval.ms": "1", "producer.override.linger.ms": "0"}
_TO_DEBEZIUM = f"INSERT INTO {TABLE} VALUES ($1, 'order', $2, 'order.created', $3)"
_TO_TXOUTBOX = "INSERT INTO tx_outbox (topic, key, payload, headers) VALUES ($1, $2, $3, '{}')"


@dataclass(frozen=True)
class Side:
    """One that publishes what is written while its block runs."""

    url: str
    insert: str
    values: Callable[[str, int], tuple[Any, ...]]
    """Of a topic and an event's number, for ``insert``."""
    serving: Callable[[str], AbstractContextManager[None]]


async def _write(side: Side, topic: str, first: int, seconds: float) -> dict[int, float]:
    """A steady writer: by number, when the commit of each event returned."""
    connection = await asyncpg.connect(side.url)
    insert = await connection.prepare(side.insert)
    committed = {}
    start = time.monotonic()
    for count in range(int(PER_SECOND * seconds)):
        await asyncio.sleep(max(0.0, start + count / PER_SECOND - time.monotonic()))
        number = first + count
        await insert.fetch(*side.values(topic, number))
        committed[number] = time.monotonic()
    await connection.close()
    return committed


def _measure(bed: Bed, side: Side, name: str, seconds: float) -> list[float]:
    """Milliseconds from the return of each commit to the consumer."""
    topic = bed.topic(name)
    with Arrivals(bed.servers, topic) as arrivals, side.serving(topic):
        count = len(asyncio.run(_write(side, topic, 0, _WARM_UP_SECONDS)))
        committed = asyncio.run(_write(side, topic, count, seconds))
        deadline = time.monotonic() + _LATEST_SECONDS
        while not committed.keys() <= arrivals.at.keys():
            if time.monotonic() > deadline:
                missing = len(committed.keys() - arrivals.at.keys())
                raise RuntimeError(f"{missing} events did not come within {_LATEST_SECONDS:g} s")
            time.sleep(0.05)
    bed.drop_topic(topic)
    # A consumer may have an event before the writer's own answer is back.
    return [1000 * max(0.0, arrivals.at[number] - at) for number, at in committed.items()]


def _rounds(bed: Bed, scale: Scale, name: str, ours: Side, peer: Side) -> Row:
    sides: dict[str, Side] = {"ours": ours, "peer": peer}
    medians: dict[str, list[float]] = {each: [] for each in sides}
    everything: dict[str, list[float]] = {each: [] for each in sides}
    for _ in range(scale.rounds):
        for each, side in sides.items():
            found = _measure(bed, side, name, scale.latency_seconds)
            medians[each].append(statistics.median(found))
            everything[each] += found
            say(f"  {name}: {each} {medians[each][-1]:.2f} ms")
    extra: dict[str, Any] = {}
    for each, found in everything.items():
        cuts = statistics.quantiles(found, n=100)
        extra |= {f"{each}_p50": cuts[49], f"{each}_p99": cuts[98]}
    return Row(name, "ms", _BAR, medians["ours"], medians["peer"], extra, against="peer")


def _ours(bed: Bed, url: str) -> Side:
    def values(_topic: str, number: int) -> tuple[Any, ...]:
        event_id, key = uuid7(), f"order-{number % 1000}"
        return event_id, key, key_hash(event_id, key), payload(number)

    @contextmanager
    def serving(topic: str) -> Iterator[None]:
        fill_postgres(url, 0, settled=SETTLED)
        told = {"servers": bed.servers, "topic": topic, "url": url, "prefix": "outbox", "note": False}
        with Child("ours", told, bed.folder) as child:
            child.answer()
            yield
            child.finish()

    return Side(url, INSERT, values, serving)


def txoutbox(bed: Bed, scale: Scale) -> list[Row]:
    """With LISTEN, as in the row of its throughput."""
    name = "peer-txoutbox-latency"
    try:
        python = TXOUTBOX.python()
    except MissingError as error:
        return left_out(name, error)

    @contextmanager
    def serving(topic: str) -> Iterator[None]:
        told = {"servers": bed.servers, "topic": topic, "url": bed.url}
        with Child("peers.drive_txoutbox", told, bed.folder, python) as child:
            child.answer()
            yield
            child.finish()

    def values(topic: str, number: int) -> tuple[Any, ...]:
        return topic, f"order-{number % 1000}", payload(number)

    return [_rounds(bed, scale, name, _ours(bed, bed.url), Side(bed.url, _TO_TXOUTBOX, values, serving))]


def debezium(bed: Bed, scale: Scale) -> list[Row]:
    """Told to wait for nothing, in a worker that runs for all rounds."""
    name = "peer-debezium-latency"
    try:
        connect = Connect(bed.servers).start()
    except MissingError as error:
        return left_out(name, error)

    @contextmanager
    def serving(topic: str) -> Iterator[None]:
        connector = Connector(bed, connect, topic, _AT_ONCE)
        connector.start()
        yield
        connector.remove()

    def values(_topic: str, number: int) -> tuple[Any, ...]:
        return uuid7(), f"order-{number % 1000}", payload(number)

    with connect:
        url = bed.logical_url
        peer = Side(url, _TO_DEBEZIUM, values, serving)
        # Java meets as many events once before it is measured.
        _measure(bed, peer, name, scale.latency_seconds)
        return [_rounds(bed, scale, name, _ours(bed, url), peer)]
