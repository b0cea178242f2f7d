"""Draws the plots of a run for the documentation, and its tables: `python -m benchmarks.plots [FILE]`

All figures come from the file of a run. A plot without measured rows is not drawn.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import page

Measured = dict[str, Any]
"""The file that :func:`benchmarks.report.write` wrote."""
Rows = Sequence[dict[str, Any]]

_FILE = Path("build/bench.json")
_DOCS = Path(__file__).resolve().parent.parent / "docs"
_OURS, _OTHER = "#1f6f8b", "#9aa5ab"
_STYLE: dict[Any, Any] = {
    # Text stays text, and the same run gives the same bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "pillarbox",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
}


def read(file: Path) -> Measured:
    found: Measured = json.loads(file.read_text())
    return found


def draw(measured: Measured, folder: Path) -> list[Path]:
    """Draw one file for each plot that the run has rows for, and remove other plots."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with matplotlib.rc_context(_STYLE):
        for name, plot in PLOTS.items():
            file = folder / f"{name}.svg"
            file.unlink(missing_ok=True)
            figure = plot(measured["rows"])
            if figure is not None:
                figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
                drawn.append(file)
    return drawn


def _axes(width: float = 6.4, height: float = 3.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def _named(rows: Rows, start: str) -> Rows:
    return [row for row in rows if row["name"].startswith(start)]


def _speed(axes: Axes, across: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel("events/s")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _middle(found: Sequence[float]) -> float:
    ordered = sorted(found)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _points(
    axes: Axes, places: Sequence[str], found: Sequence[Sequence[float]], label: str, color: str | None = None
) -> None:
    """Draw medians, and lines from the lowest to the highest round."""
    middles = [_middle(each) for each in found]
    below = [middle - min(each) for middle, each in zip(middles, found, strict=True)]
    above = [max(each) - middle for middle, each in zip(middles, found, strict=True)]
    axes.errorbar(places, middles, yerr=[below, above], label=label, color=color, marker="o", capsize=3)


def throughput(rows: Rows) -> Figure | None:
    """Throughput by batch and slots."""
    cells = _named(rows, "postgres-grid-")
    if not cells:
        return None
    figure, axes = _axes()
    for slots in sorted({row["slots"] for row in cells}):
        line = sorted((row for row in cells if row["slots"] == slots), key=lambda row: int(row["batch"]))
        label = "1 slot" if slots == 1 else f"{slots} slots"
        _points(axes, [f"{row['batch']:,}" for row in line], [row["ours_rounds"] for row in line], label)
    _speed(axes, "batch")
    axes.legend(frameon=False)
    return figure


def latency(rows: Rows) -> Figure | None:
    """The latencies of both sides at each rate."""
    paces = sorted(_named(rows, "postgres-latency-"), key=lambda row: int(row["per_second"]))
    if not paces:
        return None
    figure = Figure(figsize=(3.2 * len(paces), 3.2))
    for place, row in enumerate(paces, 1):
        axes = figure.add_subplot(1, len(paces), place)
        for side, color in (("ours", _OURS), ("floor", _OTHER)):
            cuts = row[f"{side}_percentiles"]
            axes.plot(cuts, range(1, len(cuts) + 1), label=side, color=color)
        axes.set_title(f"{row['per_second']} events/s", fontsize=10)
        axes.set_xlabel("ms, begin to acknowledgement")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 100)
        if place == 1:
            axes.set_ylabel("percent of events")
            axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    return figure


def backlog(rows: Rows) -> Figure | None:
    """Throughput by the length of the backlog."""
    found = [row for row in rows if "-backlog-" in row["name"]]
    if not found:
        return None
    figure, axes = _axes()
    for database in dict.fromkeys(row["name"].partition("-")[0] for row in found):
        line = sorted(_named(found, f"{database}-"), key=lambda row: int(row["waiting"]))
        # Each row has its own short backlog; show that of the first row.
        places = [line[0]["few_waiting"], *(row["waiting"] for row in line)]
        speeds = [line[0]["other_rounds"], *(row["ours_rounds"] for row in line)]
        _points(axes, [f"{place:,}" for place in places], speeds, database)
    _speed(axes, "events waiting")
    axes.legend(frameon=False)
    return figure


def workers(rows: Rows) -> Figure | None:
    """Throughput by number of processes."""
    found = sorted(_named(rows, "postgres-workers-"), key=lambda row: int(row["workers"]))
    if not found:
        return None
    figure, axes = _axes()
    places = ["1", *(str(row["workers"]) for row in found)]
    _points(axes, places, [found[0]["other_rounds"], *(row["ours_rounds"] for row in found)], "ours", _OURS)
    _speed(axes, "relay processes")
    return figure


PLOTS: dict[str, Callable[[Rows], Figure | None]] = {
    "throughput": throughput,
    "latency": latency,
    "backlog": backlog,
    "workers": workers,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description="A run, for the documentation.")
    parser.add_argument("file", nargs="?", type=Path, default=_FILE, help=f"of a run (default {_FILE})")
    parser.add_argument("--docs", type=Path, default=_DOCS, help="the folder of the documentation")
    arguments = parser.parse_args()
    measured = read(arguments.file)
    drawn = draw(measured, arguments.docs / "plots")
    written = page.fill(arguments.docs / "benchmarks.md", measured, [file.stem for file in drawn])
    print("\n".join(map(str, [*drawn, written])))


if __name__ == "__main__":
    main()
