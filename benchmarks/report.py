"""Rows, the table that is printed, and the file."""

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import confluent_kafka

from tests.servers.kafka import VERSION as KAFKA_VERSION


@dataclass(frozen=True)
class Bar:
    """What a ratio should be."""

    ratio: float
    at_most: bool = False

    def met(self, ratio: float) -> bool:
        return ratio <= self.ratio if self.at_most else ratio >= self.ratio

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.ratio:g}"


@dataclass(frozen=True)
class Row:
    """Paired rounds of ours and its floor, or of ours and a peer."""

    name: str
    unit: str
    bar: Bar
    ours: Sequence[float]
    floor: Sequence[float]
    extra: dict[str, Any] = field(default_factory=dict)
    against: str = "floor"
    """What the other side is called."""

    @property
    def ratios(self) -> list[float]:
        return [ours / floor for ours, floor in zip(self.ours, self.floor, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        ratio = statistics.median(self.ratios)
        return {
            "name": self.name,
            self.against: _short(statistics.median(self.floor)),
            "ours": _short(statistics.median(self.ours)),
            "ratio": _short(ratio),
            "low": _short(min(self.ratios)),
            "high": _short(max(self.ratios)),
            "unit": self.unit,
            "bar": str(self.bar),
            "met": self.bar.met(ratio),
            "rounds": len(self.ratios),
            **{name: _short(value) if isinstance(value, float) else value for name, value in self.extra.items()},
        }


def _short(number: float) -> float:
    return round(number) if abs(number) >= 1000 else float(f"{number:.4g}")


def heading(command: str, postgres: str) -> str:
    """The machine, the versions and the command."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    clients = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("asyncpg", "confluent-kafka"))
    return "\n".join(
        [
            f"machine   {_processor()}, {cores} cores for everything, {memory:.0f} GB, {platform.system()}",
            f"servers   PostgreSQL {postgres} (fsync on), Kafka {KAFKA_VERSION} (acks=all, 1 broker)",
            f"clients   Python {platform.python_version()}, {clients}, librdkafka {confluent_kafka.libversion()[0]}",
            f"command   {command}",
        ]
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def table(rows: Sequence[Row]) -> str:
    """The ratio is the median of paired rounds, low and high the extremes of those pairs. Rows against floors and rows
    against peers are tables of their own."""
    names = dict.fromkeys(row.against for row in rows)
    return "\n\n".join(_table([row for row in rows if row.against == name], name) for name in names)


def _table(rows: Sequence[Row], against: str) -> str:
    columns = ("name", "unit", against, "ours", "ratio", "low", "high", "bar", "")
    lines: list[Sequence[str]] = [columns]
    for row in rows:
        found = row.as_dict()
        ratios = [f"{found[name]:.3f}" for name in ("ratio", "low", "high")]
        cells = [found["name"], found["unit"], f"{found[against]:,}", f"{found['ours']:,}", *ratios, found["bar"]]
        lines.append([*cells, "" if found["met"] else "missed"])
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place in (0, 1, 8) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def write(rows: Sequence[Row], file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps([row.as_dict() for row in rows], indent=2) + "\n")
