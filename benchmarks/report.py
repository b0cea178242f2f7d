"""Rows, printed tables, and the file of a run."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LATENCY_SIDES = ("ours", "floor", "peer", "after_commit")
_PERCENTILES = ("p50", "p95", "p99")
_COSTS = (
    ("relay_cpu_us_per_event", "relay's CPU/event"),
    ("server_cpu_us_per_event", "server's CPU/event"),
    ("statements_per_event", "statements/event"),
    ("server_cpu_us_per_statement", "server's CPU/statement"),
)


@dataclass(frozen=True)
class Bar:
    """The limit of a ratio; with ``difference``: how far ours may be above the other side, in the unit of the row."""

    limit: float
    at_most: bool = False
    difference: bool = False

    def met(self, ours: float, other: float, ratio: float) -> bool:
        if self.difference:
            return ours - other < self.limit
        return ratio <= self.limit if self.at_most else ratio >= self.limit

    def __str__(self) -> str:
        if self.difference:
            return f"< +{self.limit:g}"
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """The rounds of ours and of the other side: a floor, a limit or a peer."""

    name: str
    unit: str
    ours: Sequence[float]
    floor: Sequence[float]
    extra: dict[str, Any] = field(default_factory=dict)
    against: str = "floor"
    """The name of the other side."""
    bar: Bar | None = None
    """None: the row has no limit."""

    @property
    def ratios(self) -> list[float]:
        return [ours / floor for ours, floor in zip(self.ours, self.floor, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        ratio = statistics.median(self.ratios)
        ours, other = statistics.median(self.ours), statistics.median(self.floor)
        return {
            "name": self.name,
            "against": self.against,
            "other": short(other),
            "ours": short(ours),
            "ratio": short(ratio),
            "low": short(min(self.ratios)),
            "high": short(max(self.ratios)),
            "unit": self.unit,
            "bar": str(self.bar) if self.bar else "none",
            "met": self.bar.met(ours, other, ratio) if self.bar else None,
            "rounds": len(self.ratios),
            "ours_rounds": [short(each) for each in self.ours],
            "other_rounds": [short(each) for each in self.floor],
            **{name: _shortened(value) for name, value in self.extra.items()},
        }


def short(number: float) -> float:
    if abs(number) < 1e-9:
        return 0.0  # differences of clocks that should be zero
    return round(number) if abs(number) >= 1000 else float(f"{number:.4g}")


def _shortened(value: Any) -> Any:
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    return short(value) if isinstance(value, float) else value


def percentiles(side: str, found: Sequence[float]) -> dict[str, Any]:
    """The distribution of one side: all percentiles for the plot, and three by name."""
    cuts = statistics.quantiles(found, n=100)
    named = {f"{side}_{name}": cuts[int(name[1:]) - 1] for name in _PERCENTILES}
    return {**named, f"{side}_percentiles": cuts}


def grids(rows: Sequence[dict[str, Any]]) -> list[list[list[str]]]:
    """Tables as lists of cells; the first line has the names of the columns.

    Rows against floors, peers and other settings of ours are separate tables, and so are the percentiles of latencies
    and the costs of an event. The ratio is the median of the paired rounds; low and high are its extremes.
    """
    names = sorted(dict.fromkeys(row["against"] for row in rows), key=lambda name: name != "floor")
    found = [_grid([row for row in rows if row["against"] == name], name) for name in names]
    return [*found, *filter(None, (_latencies(rows), _costs(rows)))]


def _grid(rows: Sequence[dict[str, Any]], against: str) -> list[list[str]]:
    lines = [["name", "unit", against, "ours", "ratio", "low", "high", "bar", ""]]
    for row in rows:
        ratios = [f"{short(row[name]):.3f}" for name in ("ratio", "low", "high")]
        missed = "missed" if row["met"] is False else ""
        sides = [f"{short(row[name]):,}" for name in ("other", "ours")]
        lines.append([row["name"], row["unit"], *sides, *ratios, row["bar"], missed])
    return lines


def _latencies(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    lines = [["name", "side", *(f"{name} ms" for name in _PERCENTILES)]]
    for row in rows:
        for side in LATENCY_SIDES:
            if f"{side}_p50" in row:
                cells = [f"{row[f'{side}_{name}']:.2f}" for name in _PERCENTILES]
                lines.append([row["name"], side.replace("_", " "), *cells])
    return lines if len(lines) > 1 else []


def _costs(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """CPU in microseconds, the server's beyond that of the writers alone. SQLite has no server."""
    names = [name for name, _ in _COSTS]
    lines = [["name", "CPU in", *(title for _, title in _COSTS)]]
    for row in rows:
        if names[0] in row:
            cells = ["-" if row[name] is None else f"{short(row[name]):,}" for name in names]
            lines.append([row["name"], "us", *cells])
    return lines if len(lines) > 1 else []


def table(rows: Sequence[Row]) -> str:
    return "\n\n".join(aligned(grid) for grid in grids([row.as_dict() for row in rows]))


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int] = (0, 1, 8)) -> str:
    """Lines of cells as text; the columns in ``left`` begin at the left."""
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def write(file: Path, conditions: dict[str, Any], rows: Sequence[Row]) -> None:
    """Replace the file at once, so that a killed run leaves a complete file."""
    file.parent.mkdir(exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps({**conditions, "rows": [row.as_dict() for row in rows]}, indent=1) + "\n")
    unfinished.replace(file)
