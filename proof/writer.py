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
from typing import Final

from proof.content import INVALID, sha256_of
from proof.databases import kind_of
from proof.databases.base import Writer, Written
from proof.history import Attempted, Log, Replied

_KEY_SECONDS: Final = 0.2  # for so long all writers use the same idempotency key
_OTHER_BODY: Final = 0.1  # of requests


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
    requests: float = 0.1  # of transactions: made as a request with an idempotency key
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
    replies = Log(Path(load.folder) / "replies.jsonl")
    writer = database.writer(load.planted)
    writer.wait = stop.wait
    chance = random.Random(load.seed)
    while not stop.is_set():
        keys = {_key(load, chance) for _ in range(chance.choice((1, 1, 1, 2, 3)))}
        wanted = [_wanted(load, chance, key) for key in sorted(keys)]
        commit = chance.random() >= load.rolled_back
        if chance.random() < load.requests:
            result, ids = _request(writer, chance, wanted, commit, replies)
        else:
            hold = chance.uniform(0, load.hold_seconds) if chance.random() < load.held else 0.0
            result, ids = writer.transact(wanted, commit=commit, hold_seconds=hold)
        if result != "nothing":
            log.write(Attempted(time.monotonic(), result, ids))
        if result in ("failed", "unknown"):
            stop.wait(0.2)
        stop.wait(load.pause_seconds)
    writer.close()


def _request(
    writer: Writer, chance: random.Random, wanted: list[Written], commit: bool, replies: Log
) -> tuple[str, list[str]]:
    """Send a request. Its key is that of the moment, or an older one. Returns the result of its own transaction."""
    key = str(int(time.monotonic() / _KEY_SECONDS) - chance.choice((0, 0, 0, 1, 5)))
    body = "other" if chance.random() < _OTHER_BODY else "usual"
    reply, ids = writer.request(key, body, wanted, commit=commit)
    if reply is not None:
        sha256 = sha256_of(reply.body)
        replies.write(Replied(time.monotonic(), key, body, reply.status, reply.is_replayed, sha256))
    if not ids:
        return "nothing", ids
    return {201: "ok", 402: "rolled_back"}.get(0 if reply is None else reply.status, "unknown"), ids


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
