"""A relay as a program: told what to do by JSON, it writes each delivery as a line into a ledger."""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from pillarbox.batch import Batch
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Publisher, retry
from pillarbox.relay import Fixed, Relay, Stream
from pillarbox.urls import store_from_url


class Ledger(Publisher):
    """Appends each event; one of type ``poison`` ends the process. One that refuses takes none."""

    description = "ledger"

    def __init__(self, path: str, seconds_per_event: float, *, refuses: bool) -> None:
        self._seconds = seconds_per_event
        self._refuses = refuses
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        if self._refuses:
            heads = {event.key: event.id for event in reversed(batch)}
            return [retry("busy") if heads[event.key] == event.id else UNTRIED for event in batch]
        for event in batch:
            if self._seconds:
                await asyncio.sleep(self._seconds)
            if event.type == "poison":
                os._exit(9)
            line = {
                "pid": os.getpid(),
                "id": str(event.id),
                "key": event.key,
                "n": json.loads(event.payload)["n"],
            }
            os.write(self._file, json.dumps(line).encode() + b"\n")
        return [PUBLISHED] * len(batch)


def hang_in_settle(path: str) -> None:
    """The first settle of failures stops before it changes events, while MongoDB has its transaction open; the file
    says so."""
    from pymongo.asynchronous.collection import AsyncCollection

    real = AsyncCollection.bulk_write

    async def hang(collection: Any, *arguments: Any, **named: Any) -> Any:
        if collection.name.endswith("_event"):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
            await asyncio.Event().wait()
        return await real(collection, *arguments, **named)

    AsyncCollection.bulk_write = hang  # type: ignore[assignment,method-assign]


class SignalAt(logging.Handler):
    """Sends this process a signal when the publisher reaches a step of its protocol, as its log tells."""

    def __init__(self, action: str, number: int) -> None:
        super().__init__()
        self._action, self._number = action, number
        logger = logging.getLogger("pillarbox.publishers.kafka")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "action", "") == self._action:
            self._action = ""
            os.kill(os.getpid(), self._number)


def main() -> None:
    order = json.loads(sys.argv[1])
    if "signal_at" in order:
        SignalAt(*order["signal_at"])
    if "hang_in_settle" in order:
        hang_in_settle(order["hang_in_settle"])
    stream = Stream(
        order["stream"],
        order.get("to")
        or Ledger(order["ledger"], order.get("seconds_per_event", 0.0), refuses="hang_in_settle" in order),
        mode=order.get("mode", "ordered"),
        concurrency=order.get("concurrency", 4),
        batch=order.get("batch", 2000),
        max_attempts=order.get("max_attempts", 5),
        lease=order.get("lease", 0.6),
        retry=Fixed(0.0),
        poll=0.02,
        poll_limit=0.1,
    )
    asyncio.run(Relay(store_from_url(order["url"], prefix=order["prefix"]), [stream], grace=5.0).run())


if __name__ == "__main__":
    main()
