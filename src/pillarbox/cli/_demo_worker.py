"""A relay of the demo, in a process of its own so that it can be killed."""

import asyncio
import json
import logging
import sqlite3
import sys

from pillarbox import Event, Handlers, Relay, Stream


def main(shop: str, ledger: str, name: str) -> None:
    logging.disable(logging.WARNING)
    handlers = Handlers()
    deliveries = sqlite3.connect(ledger, isolation_level=None, timeout=10, check_same_thread=False)

    @handlers.on("order.placed")
    async def deliver(event: Event) -> None:
        order = json.loads(event.payload)
        row = (str(event.id), event.key, order["number"], name)
        deliveries.execute("INSERT INTO delivery (event_id, key, number, worker) VALUES (?, ?, ?, ?)", row)

    # A short lease, so that the take-over can be watched.
    stream = Stream("default", to=handlers, lease_seconds=2.0, batch=50)
    asyncio.run(Relay(f"sqlite:///{shop}", [stream], name=name).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
