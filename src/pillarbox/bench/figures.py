"""The figures of a bench."""

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_STATUS: Final = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a bench.

    events: of one backlog. bytes: of a payload. rate, seconds: of the latency test, which writes ``rate`` events a
    second.
    """

    events: int = 20_000
    rounds: int = 3
    bytes: int = 250
    rate: float = 200.0
    seconds: float = 5.0

    @property
    def single_writes(self) -> int:
        """The number of events of a backlog that are written one by one, which takes long."""
        return max(1, min(1000, self.events // 10))

    @property
    def write_batch(self) -> int:
        """The number of events in a batch: as many as fit into one packet of every database."""
        return max(1, min(500, 4_000_000 // self.bytes))


@dataclass(slots=True)
class Figures:
    """One number for each round; latencies, in seconds, have one for each event."""

    scale: Scale
    write_single: list[float] = field(default_factory=list)
    write_batch: list[float] = field(default_factory=list)
    drain: list[float] = field(default_factory=list)
    drain_floor: list[float] = field(default_factory=list)  # empty: there is no destination to compare with
    cpu_us_per_event: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    write_seconds: list[float] = field(default_factory=list)
    acknowledge_seconds: list[float] = field(default_factory=list)
    floor_seconds: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Rates in events per second, latencies in milliseconds."""
        ratios = [ours / floor for ours, floor in zip(self.drain, self.drain_floor, strict=False)]
        return {
            "write_single": _spread(self.write_single) | {"events_per_transaction": 1},
            "write_batch": _spread(self.write_batch) | {"events_per_transaction": self.scale.write_batch},
            "drain": _spread(self.drain)
            | {
                "floor": _spread(self.drain_floor) if ratios else None,
                "ratio": _spread(ratios) if ratios else None,
                "cpu_us_per_event": _short(statistics.median(self.cpu_us_per_event)),
            },
            "latency": {
                "reached_rate": _short(statistics.median(self.rate)),
                "events": len(self.acknowledge_seconds),
                "write_ms": _percentiles(self.write_seconds),
                "commit_to_acknowledgement_ms": _percentiles(self.acknowledge_seconds),
                "floor_ms": _percentiles(self.floor_seconds) if self.floor_seconds else None,
            },
            "peak_memory_mb": peak_memory_mb(),
        }


def _spread(rounds: Sequence[float]) -> dict[str, Any]:
    return {
        "median": _short(statistics.median(rounds)),
        "low": _short(min(rounds)),
        "high": _short(max(rounds)),
        "rounds": [_short(each) for each in rounds],
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{share}": _short(1000 * ordered[math.ceil(share / 100 * len(ordered)) - 1]) for share in (50, 95, 99)}


def _short(number: float) -> float:
    return round(number) if abs(number) >= 1000 else float(f"{number:.4g}")


def peak_memory_mb() -> float | None:
    """The peak of this process's memory; None where the system does not report it."""
    try:
        # Not getrusage: its maximum starts with that of the parent process.
        lines = _STATUS.read_text().splitlines()
        return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024, 1)
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ModuleNotFoundError:
        return None
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, kilobytes elsewhere
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)
