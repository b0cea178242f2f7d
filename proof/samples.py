"""Samples of the outbox and the relays during a run."""

import threading
import time
from pathlib import Path
from typing import Any, Final

from proof.crew import Crew
from proof.history import Log, Sample

_SECONDS: Final = 0.25
_MOST_SECONDS: Final = 1.0


class Samples:
    """Takes four samples a second, in a thread, because a server that is down does not answer."""

    def __init__(self, database: Any, crew: Crew, folder: Path) -> None:
        self._database = database
        self._crew = crew
        self._log = Log(folder / "samples.jsonl")
        self._stop = threading.Event()
        self.quiet = 0  # the number of empty samples in a row
        self.moved = time.monotonic()  # when the backlog last changed
        self._waiting = -1
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = _SECONDS
        while not self._stop.wait(pause):
            now = time.monotonic()
            try:
                waiting, oldest, connections = self._database.sample()
            except Exception:  # down, as the run wants it
                continue
            # Counting a long table takes long: spend a tenth of the time on it.
            pause = min(_MOST_SECONDS, max(_SECONDS, 10 * (time.monotonic() - now)))
            self.quiet = 0 if waiting else self.quiet + 1
            if waiting != self._waiting:
                self._waiting, self.moved = waiting, now
            self._log.write(Sample(now, waiting, oldest, connections, self._crew.peak_mb()))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
