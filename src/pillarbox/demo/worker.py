"""A relay of the demo, in a process of its own so that it can be killed."""

import asyncio
import json
import logging
import os
import signal
import sqlite3
import sys
import threading
from typing import Final

from pillarbox import Event, Handlers, Relay, Stream
from pillarbox.demo.crew import BATCH, LEASE_SECONDS, SLOTS

_ANSWER_SECONDS: Final = 0.002


def main(shop: str, ledger: str, name: str) -> None:
    logging.disable(logging.WARNING)
    threading.Thread(target=_end_with_the_demo, name="lifeline", daemon=True).start()
    handlers = Handlers()
    deliveries = sqlite3.connect(ledger, isolation_level=None, timeout=10, check_same_thread=False)
    # The ledger must survive a kill, but not a power cut.
    deliveries.execute("PRAGMA synchronous = OFF")

    @handlers.on("order.placed")
    async def deliver(event: Event) -> None:
        order = json.loads(event.payload)
        row = (str(event.id), event.key, order["number"], name)
        deliveries.execute("INSERT INTO delivery (event_id, key, number, worker) VALUES (?, ?, ?, ?)", row)
        # Like a destination that answers after a moment: until then the event is not settled.
        await asyncio.sleep(_ANSWER_SECONDS)

    stream = Stream("default", to=handlers, lease=LEASE_SECONDS, slots=SLOTS, batch=BATCH)
    asyncio.run(Relay(f"sqlite:///{shop}", [stream], name=name).run())


def _end_with_the_demo() -> None:
    # Nothing is ever written to standard input: the read ends when the demo ends, even if it was killed.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
