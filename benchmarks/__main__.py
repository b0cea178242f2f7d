"""`python -m benchmarks [--all | --only NAME ...] [--rounds N] [--quick]`"""

import argparse
import asyncio
import dataclasses
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks import drains, machine, report
from benchmarks.bed import Bed, say
from benchmarks.failures import PeerFailedError, first_line
from benchmarks.report import Row
from benchmarks.rows import DEFAULT_SECONDS, GROUPS, ROWS, chosen
from benchmarks.scale import QUICK, Scale
from servers import MissingError

FILE = Path("build/bench.json")
PLOTS = Path("build/plots")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Floor, ours and ratio.")
    choices = [*ROWS, *GROUPS]
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=choices, metavar="NAME", help=f"of {', '.join(choices)}")
    which.add_argument("--all", action="store_true", help="every row: some 43 minutes")
    parser.add_argument("--rounds", type=int, help="of each side")
    parser.add_argument("--quick", action="store_true", help="smaller backlogs: to see that it works, not how fast")
    return parser.parse_args()


def scale_of(arguments: argparse.Namespace) -> Scale:
    scale = QUICK if arguments.quick else Scale()
    return scale.with_rounds(arguments.rounds) if arguments.rounds else scale


class Run:
    """Measures rows and writes the file after each of them."""

    def __init__(self, scale: Scale, limit_seconds: float | None, begun: float) -> None:
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.conditions: dict[str, Any] = {}
        self._scale = scale
        self._limit_seconds = limit_seconds
        self._begun = begun
        self._expected = 0.0
        self._measuring_since = begun

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def measure(self, bed: Bed, names: list[str]) -> None:
        say("warming up")
        drains.warm_up(bed, self._scale)
        self._measuring_since = time.monotonic()
        late = []
        for name in names:
            if self._is_too_late(name):
                late.append(name)
                continue
            say(f"{name} ({self.seconds:.0f} s)")
            self._one(bed, name)
            self._expected += ROWS[name].seconds
            self.write()
        if late:
            _left_out(", ".join(late), "no time in a default run; ask for a row with --only, or for all with --all")

    def _one(self, bed: Bed, name: str) -> None:
        entry = ROWS[name]
        begun = time.monotonic()
        try:
            found = entry.measure(bed, self._scale.for_row(has_bar=entry.bar is not None, promised=entry.promised))
        except (MissingError, PeerFailedError) as error:
            _left_out(name, first_line(error))
            return
        except Exception as error:
            # Measure the other rows; the run fails at its end.
            traceback.print_exception(error)
            print(f"failed    {name}: {first_line(error)}", flush=True)
            self.failed.append(name)
            return
        took = {"took_seconds": time.monotonic() - begun}
        for row in found if isinstance(found, list) else [found]:
            self.rows.append(dataclasses.replace(row, bar=entry.bar_of(row), extra={**row.extra, **took}))

    def _is_too_late(self, name: str) -> bool:
        """Whether the row would end too late, at the pace of the rows before it."""
        if self._limit_seconds is None:
            return False
        pace = (time.monotonic() - self._measuring_since) / self._expected if self._expected else 1.0
        return self.seconds + pace * ROWS[name].seconds > self._limit_seconds

    def write(self) -> None:
        report.write(FILE, {**self.conditions, "seconds": round(self.seconds)}, self.rows)


def _left_out(name: str, reason: str) -> None:
    print(f"left out  {name}: {reason}", flush=True)


def main() -> int:
    arguments = _arguments()
    load, names = os.getloadavg()[0], chosen(arguments.only, arguments.all)
    is_default = arguments.only is None and not arguments.all
    run = Run(scale_of(arguments), DEFAULT_SECONDS if is_default else None, time.monotonic())
    # End like Ctrl-C, so that the servers are closed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    try:
        with Bed() as bed:
            version = asyncio.run(bed.question("SHOW server_version"))
            found = machine.conditions(" ".join(["python -m benchmarks", *sys.argv[1:]]), version, load)
            print(found, flush=True)
            run.conditions = found.as_dict()
            run.measure(bed, names)
    except KeyboardInterrupt:
        interrupted = True
    if run.rows:
        _finish(run)
    if interrupted:
        kept = f"{FILE} has the rows that were complete" if run.rows else "no row was complete"
        print(f"interrupted; the servers are closed, and {kept}")
    if run.failed:
        print(f"failed: {', '.join(run.failed)}")
    return 1 if interrupted or run.failed else 0


def _finish(run: Run) -> None:
    from benchmarks import plots  # imported late: matplotlib takes memory and time

    run.write()
    print(f"took      {run.seconds:.0f} s\n\n{report.table(run.rows)}\n")
    drawn = plots.draw(plots.read(FILE), PLOTS)
    print(f"{FILE}{''.join(f', {file}' for file in drawn)}")


if __name__ == "__main__":
    sys.exit(main())
