"""Latency from a steady writer to a consumer: through ours, through a producer alone, or through a peer."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

from benchmarks import steady
from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.failures import peer_side
from benchmarks.load import fill_postgres
from benchmarks.report import Row, percentiles
from benchmarks.rounds import in_turn
from benchmarks.scale import Scale
from benchmarks.watch import Arrivals

PER_SECOND = 200
# A table in service holds recently published events; an empty one would get other query plans.
SETTLED = 100_000
_WARM_UP_SECONDS = 1.0
_LATEST_SECONDS = 30.0


@dataclass(frozen=True)
class Side:
    """Publishes what is written while its block runs."""

    write: Callable[[str, float, int], dict[int, float]]
    """Write to a topic for some seconds, from this number on. Returns by number the instant from which latency
    counts."""
    serving: Callable[[str], AbstractContextManager[None]]


def committed(
    url: str, insert: str, values: Callable[[str, int], tuple[Any, ...]]
) -> Callable[[str, float, int], dict[int, float]]:
    """The ``write`` of a side with an outbox: the instant at which each commit returned."""

    def write(topic: str, seconds: float, first: int) -> dict[int, float]:
        found = steady.write(url, insert, lambda number: values(topic, number), PER_SECOND, seconds, first)
        return {number: done for number, (_, done) in found.items()}

    return write


def ours(bed: Bed, url: str, delivery: str = "at-least-once") -> Side:
    fill_postgres(url, 0, settled=SETTLED)

    @contextmanager
    def serving(topic: str) -> Iterator[None]:
        told = {"servers": bed.servers, "topic": topic, "url": url, "prefix": "outbox", "note": False}
        told["delivery"] = delivery
        with Child("ours", told, bed.folder) as child:
            child.answer()
            yield
            child.finish()

    return Side(committed(url, steady.INSERT, lambda _topic, number: steady.ours(number)), serving)


def _bare(bed: Bed) -> Side:
    """The instants at which the producer was called."""

    def write(topic: str, seconds: float, first: int) -> dict[int, float]:
        found = steady.produce(bed.servers, topic, PER_SECOND, seconds, first)
        return {number: begun for number, (begun, _) in found.items()}

    return Side(write, lambda _topic: nullcontext())


def measure(bed: Bed, side: Side, name: str, seconds: float, warm_up: float = _WARM_UP_SECONDS) -> list[float]:
    """The latency of each event at the consumer, in milliseconds."""
    topic = bed.topic(name)
    with Arrivals(bed.servers, topic) as arrivals, side.serving(topic):
        count = len(side.write(topic, warm_up, 0))
        since = side.write(topic, seconds, count)
        deadline = time.monotonic() + _LATEST_SECONDS
        while not since.keys() <= arrivals.at.keys():
            if time.monotonic() > deadline:
                missing = len(since.keys() - arrivals.at.keys())
                raise RuntimeError(f"{missing} events did not come within {_LATEST_SECONDS:g} s")
            time.sleep(0.05)
    bed.drop_topic(topic)
    # A consumer may get an event before the writer gets the answer to its commit.
    return [1000 * max(0.0, arrivals.at[number] - at) for number, at in since.items()]


def rounds(bed: Bed, scale: Scale, name: str, ours: Side, other: Side, against: str) -> list[Row]:
    """One row with the medians of the rounds, and one with the 99th percentiles."""

    def once(each: str, side: Side) -> list[float]:
        with peer_side() if each == "peer" else nullcontext():
            times = measure(bed, side, name, scale.latency_seconds)
        say(f"  {name}: {each} {statistics.median(times):.2f} ms")
        return times

    both = in_turn(scale.rounds, lambda: once("ours", ours), lambda: once(against, other))
    found = dict(zip(("ours", against), both, strict=True))
    extra: dict[str, Any] = {"per_second": PER_SECOND}
    for each, times in found.items():
        extra |= percentiles(each, list(chain.from_iterable(times)))
    median = {each: [statistics.median(one) for one in times] for each, times in found.items()}
    late = {each: [statistics.quantiles(one, n=100)[98] for one in times] for each, times in found.items()}
    return [
        Row(name, "ms", median["ours"], median[against], extra, against),
        Row(f"{name}-p99", "ms", late["ours"], late[against], against=against),
    ]


def to_consumer(bed: Bed, scale: Scale) -> list[Row]:
    """Latency from commit to consumer, against a producer alone."""
    return rounds(bed, scale, "postgres-to-consumer", ours(bed, bed.url), _bare(bed), "floor")
