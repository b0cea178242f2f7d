"""Writes the figures of a run into `docs/benchmarks.md`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import grids

BEGIN = "<!-- figures: written by `make figures` -->"
END = "<!-- end of figures -->"
_CAPTIONS = {
    "throughput": "Events per second by batch and slots. Points are medians, lines reach from the lowest to the "
    "highest round, here and below.",
    "latency": "Share of events that were acknowledged within so many milliseconds of the start of their transaction.",
    "backlog": "Events per second by the length of the backlog.",
    "workers": "Events per second by the number of relay processes, which share the cores with the servers.",
}


def fill(file: Path, measured: dict[str, Any], plots: Sequence[str]) -> Path:
    """Replace everything between the two marks."""
    text = file.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{file} has no block for figures; it begins with {BEGIN!r} and ends with {END!r}")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    file.write_text(f"{before}{BEGIN}\n\n{render(measured, plots)}\n{END}{after}")
    return file


def render(measured: dict[str, Any], plots: Sequence[str]) -> str:
    parts = ["## Figures of a run", _conditions(measured), *map(_table, grids(measured["rows"]))]
    parts += [f"```{{figure}} plots/{name}.svg\n:alt: {name}\n\n{_CAPTIONS[name]}\n```" for name in plots]
    return "\n\n".join(parts) + "\n"


def _conditions(measured: dict[str, Any]) -> str:
    names = ("machine", "servers", "clients", "command", "load", "seconds")
    lines = [f"{name:<9} {measured[name]}" for name in names if name in measured]
    return "\n".join(["```text", *lines, "```"])


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rows = lines
    # Names and units are text, all other columns are figures.
    marks = ["---" if place < 2 else "---:" for place in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, marks, *rows])
