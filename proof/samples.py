"""How the outbox and the relays are, while a run goes on."""

import threading
import time
from pathlib import Path
from typing import Any, Final

from proof.crew import Crew
from proof.history import Log, Sample

_SECONDS: Final = 0.25
_MOST_SECONDS: Final = 1.0


class Samples:
    """Taken four times a second, in a thread, because a server that is away does not answer."""

    def __init__(self, database: Any, crew: Crew, folder: Path) -> None:
        self._database = database
        self._crew = crew
        self._log = Log(folder / "samples.jsonl")
        self._stop = threading.Event()
        self.quiet = 0  # so many in a row found nothing waiting
        self.moved = time.monotonic()  # when the number of those that wait was last another one
        self._waiting = -1
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = _SECONDS
        while not self._stop.wait(pause):
            now = time.monotonic()
            try:
                waiting, oldest, connections = self._database.sample()
            except Exception:  # away, which is part of the run
                continue
            # The longer the table, the longer it takes to count: a small part of the machine is for that.
            pause = min(_MOST_SECONDS, max(_SECONDS, 10 * (time.monotonic() - now)))
            self.quiet = 0 if waiting else self.quiet + 1
            if waiting != self._waiting:
                self._waiting, self.moved = waiting, now
            self._log.write(Sample(now, waiting, oldest, connections, self._crew.peak_mb()))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
