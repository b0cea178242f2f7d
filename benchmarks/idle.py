"""Rows: what a relay costs that has nothing to do."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.costs import STORES, Database, database
from benchmarks.everyday import Spent, Writers, arrived, describe, spent
from benchmarks.report import Row
from benchmarks.scale import Scale
from benchmarks.trees import Tree
from benchmarks.watch import Arrivals

CPU_PERCENT = 1.0
STATEMENTS = 2.0
# Until its pauses have grown to their limit.
_REST_SECONDS = 4.0


@dataclass(frozen=True)
class Figures:
    """One round. The figures of the server are beyond those without a relay; None: there is no server."""

    relay_percent: float
    """Of a core."""
    server_percent: float | None
    statements: float | None
    """Per second."""

    def as_dict(self) -> dict[str, float]:
        found = {
            "relay CPU %": self.relay_percent,
            "server CPU %": self.server_percent,
            "statements/s": self.statements,
        }
        return {name: value for name, value in found.items() if value is not None}


def figures(cost: Spent, alone: Spent, seconds: float) -> Figures:
    """Of two spans of the same length, with a relay and without."""
    beyond = cost.since(alone)
    return Figures(
        100 * cost.relay_cpu / seconds,
        None if beyond.server_cpu is None else 100 * beyond.server_cpu / seconds,
        None if beyond.statements is None else beyond.statements.total() / seconds,
    )


def _at_rest(on: Database, relay: int | None, seconds: float) -> Spent:
    before = spent(on, relay)
    time.sleep(seconds)
    return spent(on, relay).since(before)


@contextmanager
def _resting(bed: Bed, tree: Tree, store: str, seconds: float) -> Iterator[Callable[[], Figures]]:
    """A relay that has published a few events and then gets none."""
    on, topic = database(bed, store), bed.topic(f"{store}-idle")
    with on.new() as url:
        tree.init(url, bed.folder)
        # The connections of an application that does nothing are there in both spans.
        with Child("everyday_writer", {"url": url}, bed.folder, source=tree.source) as child:
            writers = Writers(child)
            alone = _at_rest(on, None, seconds)
            with (
                Arrivals(bed.servers, topic) as arrivals,
                tree.relay(url, f"kafka://{bed.servers}?topic={topic}", bed.folder) as relay,
            ):
                arrived(arrivals, writers.write(50, 1).committed)
                time.sleep(_REST_SECONDS)
                yield lambda: figures(_at_rest(on, relay, seconds), alone, seconds)
    bed.drop_topic(topic)


def idle(store: str, bed: Bed, scale: Scale) -> list[Row]:
    """The CPU of relay and server, and the statements."""
    name, found = f"{store}-idle", []
    with _resting(bed, Tree(), store, scale.idle_seconds) as measure:
        for _ in range(scale.rounds):
            found.append(measure())
            say(describe(name, found[-1].as_dict()))

    def row(what: str, unit: str, ours: list[float], limit: float) -> Row:
        return Row(f"{name}-{what}", unit, ours, [limit] * len(ours), against="limit")

    server = [each.server_percent for each in found if each.server_percent is not None]
    statements = [each.statements for each in found if each.statements is not None]
    rows = [row("cpu", "% of a core", [each.relay_percent for each in found], CPU_PERCENT)]
    rows += [row("server-cpu", "% of a core", server, CPU_PERCENT)] if server else []
    rows += [row("statements", "per second", statements, STATEMENTS)] if statements else []
    return rows


def _compared(store: str, bed: Bed, tree: Tree, scale: Scale) -> dict[str, float]:
    with _resting(bed, tree, store, scale.idle_seconds) as measure:
        return measure().as_dict()


ROWS: dict[str, Callable[[Bed, Scale], list[Row]]] = {f"{store}-idle": partial(idle, store) for store in STORES}
COMPARED: dict[str, Callable[[Bed, Tree, Scale], dict[str, float]]] = {
    f"{store}-idle": partial(_compared, store) for store in STORES
}
