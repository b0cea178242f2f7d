"""Rows: what an event costs at everyday rates, and how soon it is at a consumer.

A round has two phases of the same length with the same transactions: with a relay, and with the writers alone. What the
server spends more in the first phase is the cost of the relay.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.costs import STORES, Database, database
from benchmarks.report import Row, percentiles, short
from benchmarks.scale import Scale
from benchmarks.trees import Tree
from benchmarks.watch import Arrivals
from servers.process import cpu_seconds

RATES = (20, 200, 1000)
_WARM_UP_SECONDS = 2.0
_LATEST_SECONDS = 60.0
# The server finishes the relay's work: it purges old versions of rows and ends sessions.
_REST_SECONDS = 1.0


@dataclass(frozen=True)
class Written:
    """What the writers did in a phase."""

    seconds: float
    """That they were to take."""
    begun: float
    committed: Mapping[int, float]
    """By number of the event: the instant at which its commit returned."""

    @property
    def per_second(self) -> float:
        """Lower than the asked rate if the last commits were late."""
        return len(self.committed) / max(self.seconds, max(self.committed.values()) - self.begun)


@dataclass(frozen=True)
class Spent:
    """CPU seconds and statements: so far, or in a phase."""

    relay_cpu: float
    server_cpu: float | None
    statements: Counter[str] | None

    def since(self, before: "Spent") -> "Spent":
        return Spent(
            self.relay_cpu - before.relay_cpu,
            _less(self.server_cpu, before.server_cpu),
            None if self.statements is None else _more_of_each(self.statements, before.statements or Counter()),
        )


def _less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _more_of_each(one: Counter[str], other: Counter[str]) -> Counter[str]:
    """The differences that are not zero, negative ones too."""
    return Counter({kind: one[kind] - other[kind] for kind in one | other if one[kind] != other[kind]})


def spent(store: Database, relay: int | None) -> Spent:
    """relay: the id of its process; None: there is none."""
    return Spent(cpu_seconds(relay) if relay else 0.0, store.cpu_seconds(), store.statements())


@dataclass(frozen=True)
class Figures:
    """One round."""

    latencies: Sequence[float]
    """Milliseconds from the end of the commit to the consumer."""
    per_second: float
    alone_per_second: float
    """Of the writers without a relay."""
    relay_cpu_us: float
    """For each event, as are the next two, which are beyond the writers alone and None without a server."""
    server_cpu_us: float | None
    statements: Mapping[str, float] | None
    """By kind."""

    @property
    def statements_per_event(self) -> float | None:
        return None if self.statements is None else sum(self.statements.values())

    def as_dict(self) -> dict[str, float]:
        """The figures to compare, by name."""
        cuts = statistics.quantiles(self.latencies, n=100)
        found = {
            "p50 ms": cuts[49],
            "p95 ms": cuts[94],
            "p99 ms": cuts[98],
            "writers' events/s": self.per_second,
            "relay CPU us/event": self.relay_cpu_us,
            "server CPU us/event": self.server_cpu_us,
            "statements/event": self.statements_per_event,
        }
        return {name: value for name, value in found.items() if value is not None}


def figures(served: Written, at: Mapping[int, float], cost: Spent, alone: Written, alone_cost: Spent) -> Figures:
    """at: the instant of each event at the consumer."""
    events = len(served.committed)
    beyond = cost.since(alone_cost)
    return Figures(
        # A consumer may get an event before the writer gets the answer to its commit.
        [1000 * max(0.0, at[number] - committed) for number, committed in served.committed.items()],
        served.per_second,
        alone.per_second,
        1e6 * cost.relay_cpu / events,
        None if beyond.server_cpu is None else 1e6 * beyond.server_cpu / events,
        None if beyond.statements is None else {kind: n / events for kind, n in beyond.statements.items()},
    )


class Writers:
    """The application: it has its own process and the code of the tree."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._first = 0
        child.answer()

    def write(self, rate: float, seconds: float) -> Written:
        # The same seed in each phase: both have the same instants.
        self._child.tell({"rate": rate, "seconds": seconds, "first": self._first, "seed": round(rate)})
        found = self._child.answer()
        committed = {int(number): at for number, at in found["committed"].items()}
        self._first += len(committed)
        return Written(seconds, found["begun"], committed)


def arrived(arrivals: Arrivals, numbers: Mapping[int, float]) -> None:
    """Wait for all of them."""
    deadline = time.monotonic() + _LATEST_SECONDS
    while not numbers.keys() <= arrivals.at.keys():
        if time.monotonic() > deadline:
            missing = len(numbers.keys() - arrivals.at.keys())
            raise RuntimeError(f"{missing} events did not come within {_LATEST_SECONDS:g} s")
        time.sleep(0.01)


def measure(bed: Bed, tree: Tree, store: str, rate: float, seconds: float) -> Figures:
    """One round, on a new database and a new topic."""
    on, topic = database(bed, store), bed.topic(f"everyday-{store}-{rate}")
    with on.new() as url:
        tree.init(url, bed.folder)
        with Child("everyday_writer", {"url": url}, bed.folder, source=tree.source) as child:
            writers = Writers(child)
            with (
                Arrivals(bed.servers, topic) as arrivals,
                tree.relay(url, f"kafka://{bed.servers}?topic={topic}", bed.folder) as relay,
            ):
                arrived(arrivals, writers.write(rate, min(seconds, _WARM_UP_SECONDS)).committed)
                before = spent(on, relay)
                served = writers.write(rate, seconds)
                arrived(arrivals, served.committed)
                cost = spent(on, relay).since(before)
            if cost.server_cpu is not None:
                time.sleep(_REST_SECONDS)
            before = spent(on, None)
            alone = writers.write(rate, seconds)
            alone_cost = spent(on, None).since(before)
    bed.drop_topic(topic)
    return figures(served, arrivals.at, cost, alone, alone_cost)


def describe(name: str, found: Mapping[str, float]) -> str:
    return f"  {name}: " + ", ".join(f"{figure} {short(value):,}" for figure, value in found.items())


def _median(found: Sequence[float | None]) -> float | None:
    known = [each for each in found if each is not None]
    return statistics.median(known) if known else None


def row(name: str, rate: float, found: Sequence[Figures]) -> Row:
    """The writers' rate with a relay against their rate alone; the other figures are beside it."""
    server = _median([each.server_cpu_us for each in found])
    statements = _median([each.statements_per_event for each in found])
    kinds = sorted({kind for each in found for kind in each.statements or {}})
    extra: dict[str, Any] = {
        "per_second": rate,
        **percentiles("ours", list(chain.from_iterable(each.latencies for each in found))),
        "relay_cpu_us_per_event": _median([each.relay_cpu_us for each in found]),
        "server_cpu_us_per_event": server,
        "statements_per_event": statements,
        "server_cpu_us_per_statement": server / statements if server is not None and statements else None,
        "statements": {kind: _median([(each.statements or {}).get(kind, 0.0) for each in found]) for kind in kinds},
    }
    with_relay, alone = [each.per_second for each in found], [each.alone_per_second for each in found]
    return Row(name, "events/s", with_relay, alone, extra, against="writers alone")


def everyday(store: str, rate: int, bed: Bed, scale: Scale) -> Row:
    name, found = f"everyday-{store}-{rate}", []
    for _ in range(scale.everyday_rounds):
        found.append(measure(bed, Tree(), store, rate, scale.everyday_seconds))
        say(describe(name, found[-1].as_dict()))
    return row(name, rate, found)


def _compared(store: str, rate: int, bed: Bed, tree: Tree, scale: Scale) -> dict[str, float]:
    return measure(bed, tree, store, rate, scale.everyday_seconds).as_dict()


_ALL = [(store, rate) for store in STORES for rate in RATES]
ROWS: dict[str, Callable[[Bed, Scale], Row]] = {
    f"everyday-{store}-{rate}": partial(everyday, store, rate) for store, rate in _ALL
}
COMPARED: dict[str, Callable[[Bed, Tree, Scale], dict[str, float]]] = {
    f"everyday-{store}-{rate}": partial(_compared, store, rate) for store, rate in _ALL
}
