"""`python -m benchmarks.compare BASE [--only ROW ...] [--rounds N] [--quick]`: this tree against another commit.

Each round runs the benchmark of both trees, and every second round begins with the other tree. A side is a process with
its own servers, and it uses the code and the benchmark of its own tree. The ratio is taken within a round.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bed import say
from benchmarks.child import ROOT
from benchmarks.report import aligned
from benchmarks.rounds import in_turn

ROWS = ("postgres-kafka", "mongo-kafka", "sqlite-kafka", "add")
ROUNDS = 7
_HEAD = ("row", "speed", "low", "high", "CPU", "low", "high", "floor")


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


def compare(root: Path, base: str, rounds: int, options: Sequence[str]) -> str:
    commit = _git(root, "rev-parse", "--verify", "--short", f"{base}^{{commit}}")
    with checkout(root, commit) as other:
        ours, theirs = Side("this tree", root, options), Side("the base", other, options)
        ours.check()
        theirs.check()
        say(f"this tree against {commit}, {rounds} rounds")
        found = in_turn(rounds, ours.measure, theirs.measure)
    return table(*found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="This tree against a commit.")
    parser.add_argument("base", help="a commit, a branch or a tag")
    parser.add_argument("--only", nargs="+", default=ROWS, metavar="ROW", help=f"by default {' '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"by default {ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="smaller backlogs: to see that it works, not how fast")
    arguments = parser.parse_args()
    # As Ctrl-C, so that the worktree is removed on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = ["--only", *arguments.only, *(["--quick"] if arguments.quick else [])]
    try:
        print(compare(ROOT, arguments.base, arguments.rounds, options))
    except CompareError as error:
        print(f"pillarbox: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
