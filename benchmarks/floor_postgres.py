"""A bare drain with asyncpg and confluent-kafka: the relay's work without the library, as fast as we can write it.

Table, shards, slots, batches and fences are those of the store. It has no growing batches, retries, held keys, byte
limits or renewals.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import asyncpg

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.wire import BareProducer

_OWNER, _TOKEN, _STREAM = "floor", 1, "default"
_LEASES = """INSERT INTO {p}_lease (stream, shard, owner, token, lease_until)
    SELECT $1, shard, $2, $3, now() + interval '1 hour' FROM generate_series(0, $4::int - 1) AS shard
    ON CONFLICT (stream, shard) DO UPDATE SET owner = excluded.owner, token = excluded.token"""
_READ = """SELECT id, key, created_at, payload FROM {p}_event
    WHERE stream = $1 AND shard = $2 AND status = 'pending'
    AND EXISTS (SELECT 1 FROM {p}_lease WHERE stream = $1 AND shard = $2 AND token = $3 AND owner = $4)
    ORDER BY seq LIMIT $5"""
_GUARD = """WITH guard AS MATERIALIZED (SELECT 1 FROM {p}_lease WHERE stream = $1 AND shard = $2
    AND token = $3 AND owner = $4 FOR SHARE) """
_MARK = "UPDATE {p}_event SET status = 'published', published_at = now(), attempts = attempts + 1 "
_WHERE = "WHERE id = ANY($5) AND stream = $1 AND status = 'pending' AND EXISTS (SELECT 1 FROM guard)"
_DELETE = "DELETE FROM {p}_event "


D = TypeVar("D")


class Floor(ABC, Generic[D]):
    """Slots that take shards from one queue, as in the relay. Each has a connection and a destination."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.clock = Clock(settings["events"])
        self.shards = deque(range(settings["shards"]))
        prefix = settings["prefix"]
        self.read = _READ.format(p=prefix)
        self.settle = (_GUARD + (_MARK if settings["keep"] else _DELETE) + _WHERE).format(p=prefix)

    @abstractmethod
    def destination(self) -> D:
        """The destination of one slot."""

    @abstractmethod
    async def send(self, destination: D, rows: list[Any]) -> None:
        """Send these rows; returns when all are confirmed."""

    async def publish(self, destination: D, shard: int, rows: list[Any]) -> Sequence[Any]:
        """Send the rows of a shard; returns what the settle notes beside them."""
        await self.send(destination, rows)
        return ()

    async def run(self) -> None:
        settings = self.settings
        slots = [(await asyncpg.connect(settings["url"]), self.destination()) for _ in range(settings["slots"])]
        await slots[0][0].execute(_LEASES.format(p=settings["prefix"]), _STREAM, _OWNER, _TOKEN, settings["shards"])
        await asyncio.gather(*(self._slot(connection, destination) for connection, destination in slots))
        for connection, _ in slots:
            await connection.close()

    async def _slot(self, connection: Any, destination: D) -> None:
        batch = self.settings["batch"]
        while self.shards and not self.clock.done.is_set():
            shard = self.shards.popleft()
            self.clock.begin()
            rows = await connection.fetch(self.read, _STREAM, shard, _TOKEN, _OWNER, batch)
            if not rows:
                continue
            ids = [row[0] for row in rows]
            noted = await self.publish(destination, shard, rows)
            done = await connection.execute(self.settle, _STREAM, shard, _TOKEN, _OWNER, ids, *noted)
            if int(done.rpartition(" ")[2]) != len(ids):
                raise RuntimeError(f"settled {done}, not {len(ids)} events")
            self.clock.settle(len(ids))
            if len(rows) == batch:
                self.shards.append(shard)


class KafkaFloor(Floor[BareProducer]):
    """A floor with a producer and a thread for each slot."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.threads = ThreadPoolExecutor(settings["slots"])

    def destination(self) -> BareProducer:
        return BareProducer(self.settings["servers"], self.settings["topic"])

    async def send(self, destination: BareProducer, rows: list[Any]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.threads, destination.send, rows)


def main() -> None:
    floor = KafkaFloor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
