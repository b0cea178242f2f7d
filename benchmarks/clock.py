"""The clock of a measured process."""

import asyncio
import time
from pathlib import Path
from typing import Any


class Clock:
    """Measures drains: from the first read to the settle of the last event."""

    def __init__(self, events: int) -> None:
        self.events = events  # of one drain
        self.settled = 0
        self.turns = 0
        self.seconds = 0.0
        self.done = asyncio.Event()
        self._goal = events
        self._begun: float | None = None
        self._cpu_before = 0.0
        self.cpu_seconds = 0.0

    def begin(self) -> None:
        if self._begun is None and not self.done.is_set():
            self._begun, self._cpu_before = time.monotonic(), time.process_time()

    def settle(self, events: int) -> None:
        self.settled += events
        self.turns += bool(events)
        if self.settled >= self._goal and self._begun is not None:
            self.seconds += time.monotonic() - self._begun
            self.cpu_seconds += time.process_time() - self._cpu_before
            self._begun = None
            self.done.set()

    def again(self) -> None:
        """Measure one more drain of as many events."""
        self._goal = self.settled + self.events
        self.done.clear()

    def report(self, drains: int = 1) -> dict[str, Any]:
        return {
            "per_second": drains * self.events / self.seconds,
            "cpu_us_per_event": 1e6 * self.cpu_seconds / (drains * self.events),
            "settled": self.settled,
            "turns": self.turns,
            "peak_mb": peak_memory_mb(),
        }


def peak_memory_mb() -> float:
    """The peak of this program alone. ``getrusage`` would start with the peak of the parent process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024
