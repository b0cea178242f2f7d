"""One client of the application in its own process. It commits, rolls back, holds transactions open, and is killed."""

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from proof.content import INVALID
from proof.databases import kind_of
from proof.databases.base import Written
from proof.history import Attempted, Log


@dataclass(slots=True)
class Load:
    """The settings of a writer. Shares are of its transactions or of its events."""

    name: str
    folder: str
    store: str
    url: str
    seed: int
    keys: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    queued: float = 0.1  # of events, into the queue
    hot: float = 0.3  # of events on the first key
    rolled_back: float = 0.15
    held: float = 0.01
    hold_seconds: float = 2.0
    reject: float = 0.002
    flaky: float = 0.0
    invalid: float = 0.01  # of events: an invalid one is tried first
    rejected_bytes: int = 0
    pause_seconds: float = 0.005
    planted: str | None = None


def run(load: Load, stop: threading.Event) -> None:
    database = kind_of(load.store)(Path(load.folder), load.url)
    log = Log(Path(load.folder) / "writers.jsonl")
    writer = database.writer(load.planted)
    writer.wait = stop.wait
    chance = random.Random(load.seed)
    while not stop.is_set():
        keys = {_key(load, chance) for _ in range(chance.choice((1, 1, 1, 2, 3)))}
        wanted = [_wanted(load, chance, key) for key in sorted(keys)]
        hold = chance.uniform(0, load.hold_seconds) if chance.random() < load.held else 0.0
        result, ids = writer.transact(wanted, commit=chance.random() >= load.rolled_back, hold_seconds=hold)
        log.write(Attempted(time.monotonic(), result, ids))
        if result in ("failed", "unknown"):
            stop.wait(0.2)
        stop.wait(load.pause_seconds)
    writer.close()


def _key(load: Load, chance: random.Random) -> str:
    draw = chance.random()
    if draw < load.queued:
        return chance.choice(load.tasks)
    return load.keys[0] if draw < load.queued + load.hot else chance.choice(load.keys)


def _wanted(load: Load, chance: random.Random, key: str) -> Written:
    draw = chance.random()
    if draw < load.reject:
        return Written(key, "reject", load.rejected_bytes or 50)
    invalid = chance.randrange(len(INVALID)) if chance.random() < load.invalid else None
    fate = "flaky" if draw < load.reject + load.flaky else "deliver"
    return Written(key, fate, chance.randint(0, 400), invalid)


def as_argument(load: Load) -> str:
    return json.dumps(asdict(load))


def _end_with_the_harness() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=_end_with_the_harness, daemon=True).start()
    run(Load(**json.loads(sys.argv[1])), stop)


if __name__ == "__main__":
    main()
