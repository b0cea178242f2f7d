"""`python -m benchmarks.compare BASE [--only ROW ...] [--rounds N] [--quick]`: this tree against another commit.

Each round measures both trees, and every second round begins with the other tree. The ratio is taken within a round.

Most rows run the benchmark of each tree: a side is a process with its own servers, and it uses the code and the
benchmark of its own tree. The rows of everyday rates and of idle relays use the benchmark of this tree for both: it
starts the relay and the writers of each tree in turn, on the same servers. So the base needs no such rows.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import drains, everyday, idle
from benchmarks.bed import Bed, say
from benchmarks.child import ROOT
from benchmarks.report import aligned, short
from benchmarks.rounds import in_turn
from benchmarks.rows import named
from benchmarks.scale import QUICK, Scale
from benchmarks.trees import Tree, TreeError

ROWS = ("postgres-kafka", "mongo-kafka", "sqlite-kafka", "add")
ROUNDS = 7
DRIVEN = {**everyday.COMPARED, **idle.COMPARED}
"""The rows for which this tree drives the relays of both."""
_HEAD = ("row", "speed", "low", "high", "CPU", "low", "high", "floor")
_DRIVEN_HEAD = ("row", "figure", "base", "this tree", "ratio", "low", "high")


class CompareError(Exception):
    """The trees cannot be compared; the text says why."""


@dataclass(frozen=True)
class Figures:
    """One row of one side in one round."""

    speed: float
    """Per second: events of a drain, transactions of `add`."""
    floor: float
    """The same of the bare script. Both trees should have the same floor: it shows what the machine did."""
    cpu: float | None = None
    """Of the relay, in microseconds for each event."""


Found = dict[str, Figures]


class Side:
    """One tree."""

    def __init__(self, name: str, root: Path, options: Sequence[str]) -> None:
        self._name = name
        self._root = root
        self._options = options
        # The tree itself comes first: an environment may have another tree installed.
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}

    def check(self) -> None:
        """Both sides would measure the same code if the wrong package were imported."""
        ask = "import benchmarks, pillarbox; print(benchmarks.__file__, pillarbox.__file__, sep='\\n')"
        files = self._run(["-c", ask], Path(tempfile.gettempdir())).splitlines()
        if wrong := [file for file in files if not Path(file).resolve().is_relative_to(self._root.resolve())]:
            raise CompareError(f"{self._name} would import {wrong[0]}, which is not in {self._root}")

    def measure(self) -> Found:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="pillarbox-compare-") as folder:
            self._run(["-m", "benchmarks", "--rounds", "1", *self._options], Path(folder))
            measured = json.loads((Path(folder) / "build" / "bench.json").read_text())
        found = dict(_figures(measured["rows"]))
        shown = ", ".join(f"{name} {figures.speed:,.0f}" for name, figures in found.items() if figures.cpu)
        say(f"  {self._name}: {time.monotonic() - begun:.0f} s; {shown}")
        return found

    def _run(self, arguments: Sequence[str], folder: Path) -> str:
        command = [sys.executable, *arguments]
        ended = subprocess.run(
            command, cwd=folder, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if ended.returncode:
            last = "\n".join(ended.stdout.splitlines()[-15:])
            raise CompareError(f"the benchmark of {self._name} failed; its last lines:\n{last}")
        return ended.stdout


def _figures(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Figures]]:
    for row in rows:
        if row["unit"] != "us":
            yield row["name"], Figures(row["ours"], row["other"], row.get("ours_cpu_us_per_event"))
            continue
        yield row["name"], Figures(1e6 / row["ours"], 1e6 / row["other"])
        if "ours_without_commit" in row:
            without = Figures(1e6 / row["ours_without_commit"], 1e6 / row["floor_without_commit"])
            yield f"{row['name']}, no commit", without


def table(ours: Sequence[Found], base: Sequence[Found]) -> str:
    """For each row, this tree divided by the base: the median of the rounds, the lowest and the highest."""
    lines = [list(_HEAD)]
    for name in ours[0]:
        pairs = [(mine[name], other[name]) for mine, other in zip(ours, base, strict=True) if name in other]
        if not pairs:
            lines.append([name, "not in the base", *[""] * (len(_HEAD) - 2)])
            continue
        speed = [mine.speed / other.speed for mine, other in pairs]
        cpu = [mine.cpu / other.cpu for mine, other in pairs if mine.cpu and other.cpu]
        floor = statistics.median(mine.floor / other.floor for mine, other in pairs)
        lines.append([name, *_spread(speed), *_spread(cpu), f"{floor:.3f}"])
    return aligned(lines, left=(0,))


def _spread(ratios: Sequence[float]) -> list[str]:
    if not ratios:
        return ["", "", ""]
    return [f"{each:.3f}" for each in (statistics.median(ratios), min(ratios), max(ratios))]


Driven = Mapping[str, Sequence[Mapping[str, float]]]
"""By row: for each round, the figures by name."""


def driven_table(ours: Driven, base: Driven) -> str:
    """For each figure of each row: the medians of both trees, and this tree divided by the base within a round."""
    lines = [list(_DRIVEN_HEAD)]
    for row, rounds in ours.items():
        for name in rounds[0]:
            pairs = [(mine[name], other[name]) for mine, other in zip(rounds, base[row], strict=True)]
            medians = [f"{short(statistics.median(side)):,}" for side in reversed(list(zip(*pairs, strict=True)))]
            # A difference of two measurements may be zero or less, and is then no base for a ratio.
            ratios = [mine / other for mine, other in pairs if other > 0]
            lines.append([row, name, *medians, *_spread(ratios)])
    return aligned(lines, left=(0, 1))


def driven(
    bed: Bed, trees: tuple[Tree, Tree], names: Sequence[str], rounds: int, scale: Scale
) -> tuple[dict[str, list[dict[str, float]]], dict[str, list[dict[str, float]]]]:
    """The figures of both trees. Each row is complete before the next begins."""
    ours: dict[str, list[dict[str, float]]] = {}
    base: dict[str, list[dict[str, float]]] = {}
    for name in names:

        def once(tree: Tree, name: str = name) -> dict[str, float]:
            found = DRIVEN[name](bed, tree, scale)
            say(everyday.describe(f"{name}, {tree.name}", found))
            return found

        ours[name], base[name] = in_turn(rounds, *(partial(once, tree) for tree in trees))
        say(driven_table({name: ours[name]}, {name: base[name]}))
    return ours, base


@contextmanager
def checkout(root: Path, commit: str) -> Iterator[Path]:
    """A temporary worktree of the commit."""
    with tempfile.TemporaryDirectory(prefix="pillarbox-base-") as folder:
        tree = Path(folder) / "base"
        _git(root, "worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def _git(root: Path, *arguments: str) -> str:
    ended = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if ended.returncode:
        raise CompareError(f"`git {' '.join(arguments)}` failed: {ended.stderr.strip()}")
    return ended.stdout.strip()


def compare(root: Path, base: str, rounds: int, names: Sequence[str], *, quick: bool = False) -> str:
    """The tables."""
    commit = _git(root, "rev-parse", "--verify", "--short", f"{base}^{{commit}}")
    ours = [name for name in names if name in DRIVEN]
    theirs = [name for name in names if name not in DRIVEN]
    with checkout(root, commit) as other:
        say(f"this tree against {commit}, {rounds} rounds")
        tables = []
        if theirs:
            tables.append(
                _compare_benchmarks(root, other, rounds, ["--only", *theirs, *(["--quick"] if quick else [])])
            )
        if ours:
            tables.append(
                _compare_driven((Tree(root=root), Tree("the base", other)), ours, rounds, QUICK if quick else Scale())
            )
    return "\n\n".join(tables)


def _compare_benchmarks(root: Path, other: Path, rounds: int, options: Sequence[str]) -> str:
    ours, theirs = Side("this tree", root, options), Side("the base", other, options)
    ours.check()
    theirs.check()
    return table(*in_turn(rounds, ours.measure, theirs.measure))


def _compare_driven(trees: tuple[Tree, Tree], names: Sequence[str], rounds: int, scale: Scale) -> str:
    try:
        for tree in trees:
            tree.check()
        with Bed() as bed:
            drains.warm_up(bed, QUICK)
            return driven_table(*driven(bed, trees, names, rounds, scale))
    except TreeError as error:
        raise CompareError(str(error)) from error


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="This tree against a commit.")
    parser.add_argument("base", help="a commit, a branch or a tag")
    parser.add_argument("--only", nargs="+", default=ROWS, metavar="ROW", help=f"by default {' '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"by default {ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="smaller backlogs: to see that it works, not how fast")
    arguments = parser.parse_args()
    # As Ctrl-C, so that the worktree is removed on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(compare(ROOT, arguments.base, arguments.rounds, named(arguments.only), quick=arguments.quick))
    except CompareError as error:
        print(f"pillarbox: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
