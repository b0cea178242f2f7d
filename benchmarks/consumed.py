"""Rows: a consumer of a topic with events, against a bare script and against FastStream; and its latency."""

import asyncio
import statistics
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

from confluent_kafka import Producer

from benchmarks import arrival
from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.consume import effects, prepare
from benchmarks.failures import peer_side
from benchmarks.load_events import KEYS, payload
from benchmarks.report import Row, percentiles
from benchmarks.rounds import in_turn
from benchmarks.scale import Scale
from benchmarks.watch import Arrivals
from pillarbox.conformance.events import make_event
from pillarbox.envelopes import Envelope, kafka

_WARM_UP_SECONDS = 1.0
_LATEST_SECONDS = 30.0
# Of the events of a drain of the relay, because a consumer's work is slower.
_SHARES = {"batch": 4, "single": 16, "plain": 2}


def fill(bed: Bed, name: str, events: int) -> str:
    """A new topic with so many events."""
    topic = bed.topic(name)
    producer: Any = Producer({"bootstrap.servers": bed.servers, "linger.ms": 50, "log_level": 2})
    make = kafka(Envelope())
    for number in range(events):
        key = f"order-{number % KEYS}"
        event = make_event(key=key, aggregate_type="order", aggregate_id=key, payload=payload(number))
        message = make(event)
        producer.produce(topic, message.value, message.key, headers=message.headers)
        if number % 1000 == 0:
            producer.poll(0)
    if left := producer.flush(60):
        raise RuntimeError(f"{left} messages were not written")
    return topic


def _once(bed: Bed, name: str, kind: str, side: str, events: int) -> float:
    """Events per second of one side, on a topic of its own."""
    topic = fill(bed, name, events)
    told = {"side": side, "kind": kind, "servers": bed.servers, "topic": topic, "url": bed.url, "events": events}
    with Child("consume", told, bed.folder) as child:
        found = child.answer()
    bed.drop_topic(topic)
    say(f"  {name}: {side} {found['per_second']:,.0f} events/s, {found['cpu_us_per_event']:.0f} us of CPU per event")
    return float(found["per_second"])


def _row(bed: Bed, scale: Scale, name: str, kind: str, other: str, against: str) -> Row:
    events = scale.events // _SHARES[kind]

    def of_other() -> float:
        if against == "floor":
            return _once(bed, name, kind, other, events)
        with peer_side():
            return _once(bed, name, kind, other, events)

    ours, theirs = in_turn(scale.rounds, lambda: _once(bed, name, kind, "ours", events), of_other)
    return Row(name, "events/s", ours, theirs, {"events": events}, against)


def against_bare(kind: str) -> Callable[[Bed, Scale], Row]:
    return lambda bed, scale: _row(bed, scale, f"consumer-{kind}", kind, "bare", "floor")


def against_faststream(kind: str) -> Callable[[Bed, Scale], Row]:
    return lambda bed, scale: _row(bed, scale, f"peer-faststream-consumer-{kind}", kind, "faststream", "peer")


def _latencies(bed: Bed, name: str, side: arrival.Side, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds from each commit to the commit of its handler, and to a consumer that only receives."""
    topic = bed.topic(name)  # of its own, because each round has the same numbers
    asyncio.run(prepare(bed.url))
    told = {"side": "serve", "servers": bed.servers, "topic": topic, "url": bed.url}
    with Arrivals(bed.servers, topic) as arrivals, side.serving(topic), Child("consume", told, bed.folder) as child:
        child.answer()
        count = len(side.write(topic, _WARM_UP_SECONDS, 0))
        since = side.write(topic, seconds, count)
        deadline = time.monotonic() + _LATEST_SECONDS
        while not since.keys() <= arrivals.at.keys():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(since.keys() - arrivals.at.keys())} events did not come")
            time.sleep(0.05)
        # A stop finishes what runs, and leaves to the next start what has only been received.
        while (left := count + len(since) - asyncio.run(effects(bed.url))) > 0:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{left} events were not applied")
            time.sleep(0.05)
        applied: dict[str, float] = child.finish()
    bed.drop_topic(topic)
    ours = [1000 * (applied[str(number)] - at) for number, at in since.items()]
    return ours, [1000 * max(0.0, arrivals.at[number] - at) for number, at in since.items()]


def to_commit(bed: Bed, scale: Scale) -> list[Row]:
    """Latency through a relay, from a commit to the commit of its handler."""
    name, side = "consumer-latency", arrival.ours(bed, bed.url)
    rounds = [_latencies(bed, name, side, scale.latency_seconds) for _ in range(scale.rounds)]
    ours, floor = [times for times, _ in rounds], [times for _, times in rounds]
    extra: dict[str, Any] = {"per_second": arrival.PER_SECOND}
    extra |= percentiles("ours", list(chain.from_iterable(ours)))
    extra |= percentiles("floor", list(chain.from_iterable(floor)))
    say(f"  {name}: {statistics.median(chain.from_iterable(ours)):.2f} ms")
    return [
        Row(name, "ms", [*map(statistics.median, ours)], [*map(statistics.median, floor)], extra),
        Row(f"{name}-p99", "ms", [*map(_late, ours)], [*map(_late, floor)]),
    ]


def _late(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]
