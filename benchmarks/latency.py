"""Rows: latency to the broker."""

import statistics
import time
from functools import partial
from typing import Any

from benchmarks import steady
from benchmarks.arrival import SETTLED
from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.load import fill_postgres
from benchmarks.report import Row, percentiles
from benchmarks.scale import Scale

RATES = (50, 200, 1000)
_WARM_UP_SECONDS = 0.5


def _serve(bed: Bed, topic: str) -> Child:
    settings = {"servers": bed.servers, "topic": topic, "url": bed.url, "prefix": "outbox", "keep": True}
    return Child("ours", settings, bed.folder)


def _through_relay(bed: Bed, topic: str, rate: int, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds until the acknowledgement: from the start of the transaction, and from the end of its commit."""
    ids: dict[int, str] = {}

    def values(number: int) -> tuple[Any, ...]:
        found = steady.ours(number)
        ids[number] = str(found[0])
        return found

    with _serve(bed, topic) as child:
        child.answer()
        steady.write(bed.url, steady.INSERT, steady.ours, rate, _WARM_UP_SECONDS)
        written = steady.write(bed.url, steady.INSERT, values, rate, seconds)
        time.sleep(0.5)
        # Both processes read the same monotonic clock of the machine.
        acknowledged: dict[str, float] = child.finish()["acknowledged_at"]
    begun = [1000 * (acknowledged[ids[number]] - at) for number, (at, _) in written.items()]
    committed = [1000 * (acknowledged[ids[number]] - at) for number, (_, at) in written.items()]
    return begun, committed


def _bare(bed: Bed, topic: str, rate: int, seconds: float) -> list[tuple[float, float]]:
    """Milliseconds of a commit alone and of a produce alone, in pairs and at the same rate."""
    written = steady.write(bed.url, steady.INSERT, steady.ours, rate, seconds)
    produced = steady.produce(bed.servers, topic, rate, seconds)
    both = [(written[number], produced[number]) for number in written]
    return [(1000 * (c_end - c_begin), 1000 * (p_end - p_begin)) for (c_begin, c_end), (p_begin, p_end) in both]


def latency(rate: int, bed: Bed, scale: Scale) -> Row:
    """Latency from the start of a transaction with one event to the broker's acknowledgement."""
    name = f"postgres-latency-{rate}"
    topic = bed.topic(name)
    medians: dict[str, list[float]] = {"ours": [], "floor": [], "commit": [], "produce": []}
    everything: dict[str, list[float]] = {"ours": [], "floor": [], "after_commit": []}
    for _ in range(scale.rounds):
        fill_postgres(bed.url, 0, settled=SETTLED)
        begun, committed = _through_relay(bed, topic, rate, scale.latency_seconds)
        fill_postgres(bed.url, 0, settled=SETTLED)
        parts = _bare(bed, topic, rate, scale.latency_seconds)
        floor = [commit + produce for commit, produce in parts]
        everything["ours"] += begun
        everything["floor"] += floor
        everything["after_commit"] += committed
        medians["ours"].append(statistics.median(begun))
        medians["floor"].append(statistics.median(floor))
        medians["commit"].append(statistics.median(commit for commit, _ in parts))
        medians["produce"].append(statistics.median(produce for _, produce in parts))
        took = ", ".join(f"{part} {found[-1]:.2f} ms" for part, found in medians.items())
        say(f"  {name}: {took}")
    bed.drop_topic(topic)
    extra: dict[str, Any] = {"per_second": rate}
    extra |= {f"bare_{part}": statistics.median(medians[part]) for part in ("commit", "produce")}
    for side, found in everything.items():
        extra |= percentiles(side, found)
    return Row(name, "ms", medians["ours"], medians["floor"], extra)


LATENCIES = {f"postgres-latency-{rate}": partial(latency, rate) for rate in RATES}
