"""The application of the everyday rows: transactions of one event at random instants, in its own process.

It uses the public interface of pillarbox only, because it runs with the code of the tree that is measured.
"""

import asyncio
import json
import random
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.child import answer, settings_from_parent
from benchmarks.load_events import PAYLOAD_BYTES
from pillarbox import Outbox

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

# Enough that a slow commit does not lower the rate.
CONNECTIONS = 16
_KEYS = 1000

Write = Callable[[int], Awaitable[float]]
"""Writes the event of this number in a transaction. Returns the instant at which the commit returned."""


def instants(rate: float, seconds: float, seed: int) -> list[float]:
    """Seconds from the start to each transaction, as they come from many independent users.

    The instants of a Poisson process, given their number, are independent: sorted, they have its gaps.
    """
    source = random.Random(seed)
    return sorted(source.uniform(0, seconds) for _ in range(round(rate * seconds)))


def body(number: int) -> dict[str, Any]:
    filler = PAYLOAD_BYTES - len(json.dumps({"number": number, "text": ""}))
    return {"number": number, "text": "x" * filler}


def _add(outbox: Outbox, tx: Any, number: int) -> None:
    outbox.add(tx, "order.created", body(number), aggregate_type="order", aggregate_id=f"order-{number % _KEYS}")


def _through(outbox: Outbox, handle: Any) -> Write:
    async def write(number: int) -> float:
        async with outbox.transaction(handle) as tx:
            _add(outbox, tx, number)
        return time.monotonic()

    return write


def _in_threads(outbox: Outbox, url: str) -> list[Write]:
    """On MongoDB. The asynchronous client takes twice as much CPU, and would not reach the highest rate."""
    from pymongo import MongoClient

    client = MongoClient[dict[str, Any]](url)
    threads = ThreadPoolExecutor(CONNECTIONS)

    def commit(session: "ClientSession", number: int) -> float:
        with session.start_transaction():
            _add(outbox, session, number)
        return time.monotonic()

    def one(session: "ClientSession") -> Write:
        return lambda number: asyncio.get_running_loop().run_in_executor(threads, commit, session, number)

    return [one(client.start_session()) for _ in range(CONNECTIONS)]


async def connect(url: str) -> list[Write]:
    """One function for each connection."""
    outbox, parts = Outbox(), urlsplit(url)
    if parts.scheme == "sqlite":
        # SQLite has one writer at a time, so more connections would only wait for each other.
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)

        async def write(number: int) -> float:
            with connection:
                _add(outbox, connection, number)
            return time.monotonic()

        return [write]
    if parts.scheme == "mongodb":
        return _in_threads(outbox, url)
    if parts.scheme == "mysql":
        import asyncmy

        address = {"host": parts.hostname, "port": parts.port, "user": parts.username, "db": parts.path[1:]}
        return [_through(outbox, await asyncmy.connect(**address, autocommit=True)) for _ in range(CONNECTIONS)]
    import asyncpg

    return [_through(outbox, await asyncpg.connect(url)) for _ in range(CONNECTIONS)]


async def write_all(writes: Sequence[Write], first: int, at: Sequence[float]) -> dict[str, Any]:
    """Write one event at each instant, or as soon after it as a connection is free.

    Returns the start and the instants at which the commits returned, on the monotonic clock.
    """
    waiting = iter(enumerate(at, first))
    committed: dict[int, float] = {}

    async def run(write: Write) -> None:
        for number, seconds in waiting:
            await asyncio.sleep(max(0.0, begun + seconds - time.monotonic()))
            committed[number] = await write(number)

    begun = time.monotonic() + 0.05
    await asyncio.gather(*map(run, writes))
    return {"begun": begun, "committed": committed}


async def serve(settings: dict[str, Any]) -> None:
    """Write as often as the harness asks."""
    writes = await connect(settings["url"])
    answer({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        at = instants(order["rate"], order["seconds"], order["seed"])
        answer(await write_all(writes, order["first"], at))


def main() -> None:
    asyncio.run(serve(settings_from_parent()))


if __name__ == "__main__":
    main()
