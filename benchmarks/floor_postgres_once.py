"""A bare drain from PostgreSQL to Kafka in transactions: the relay's work exactly once, without the library."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from benchmarks.child import answer, settings_from_parent
from benchmarks.floor_postgres import Floor
from benchmarks.wire_once import BareTransactions

_SETTLE = """WITH guard AS (UPDATE {p}_lease SET settled_batch = $6 WHERE stream = $1 AND shard = $2
    AND token = $3 AND owner = $4 RETURNING 1)
    UPDATE {p}_event SET status = 'published', published_at = now(), attempts = attempts + 1
    WHERE id = ANY($5) AND stream = $1 AND status = 'pending' AND EXISTS (SELECT 1 FROM guard)"""


class OnceFloor(Floor[BareTransactions]):
    """A floor with a producer for each shard and a thread for each slot."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.settle = _SETTLE.format(p=settings["prefix"])
        self.threads = ThreadPoolExecutor(settings["slots"])
        self.producers = BareTransactions(settings["servers"], settings["topic"], settings["shards"])

    def destination(self) -> BareTransactions:
        return self.producers

    async def publish(self, destination: BareTransactions, shard: int, rows: list[Any]) -> Sequence[Any]:
        batch = uuid4()
        ids = [row[0].bytes for row in rows]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.threads, destination.send, shard, rows, batch.bytes, ids)
        return (batch,)

    async def send(self, destination: BareTransactions, rows: list[Any]) -> None:
        raise NotImplementedError("a transaction belongs to a shard: use publish")


def main() -> None:
    floor = OnceFloor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
