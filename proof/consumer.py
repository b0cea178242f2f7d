"""The handlers of a run: each event has its effect once, through an inbox, and then its line in the ledger."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Final

from pillarbox import Event, Handlers, Inbox, Reject
from proof.content import fingerprint
from proof.databases.base import Database
from proof.history import Delivery, Log

_COPIED: Final = 10  # one call of so many comes as two at once
_CONCURRENCY: Final = 4  # of a stream in a relay; each call has a connection


def consumer(database: Database, ledger: Path, seed: int) -> Handlers:
    """Handlers that write effects into this database, and fail where the event says so."""
    log = Log(ledger)
    chance = random.Random(seed)
    calls = count()
    handlers = Handlers(concurrency=_CONCURRENCY)

    @Inbox("proof").once(database.sessions())
    def apply(event: Event, tx: Any) -> None:
        time.sleep(chance.uniform(0.0, 0.002))
        database.apply(tx, str(event.id))
        # After the effect, which a rollback has to take back.
        fate = event.headers.get("fate", "deliver")
        if fate == "reject":
            raise Reject("always rejected")
        if fate == "flaky" and event.attempts == 0:
            raise RuntimeError("fails once")

    @handlers.on("proof.event")
    def handle(event: Event) -> None:
        if next(calls) % _COPIED == 0:
            with ThreadPoolExecutor(1) as other:
                copy = other.submit(apply, event)
                apply(event)
                copy.result()
        else:
            apply(event)
        sha256 = fingerprint(event.key, event.payload, event.headers["proof"])
        log.write(Delivery(str(event.id), event.key, sha256, [], time.monotonic()))

    return handlers
