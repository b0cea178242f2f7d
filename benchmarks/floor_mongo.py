"""A bare drain with PyMongo and confluent-kafka: ours without the library, and as fast as we can write it.

The collections, the shards, the slots, the batches and the fences are ours, and so are the concerns: what is read is at
one instant, what is settled is there to stay.
"""

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pymongo import AsyncMongoClient, WriteConcern
from pymongo.read_concern import ReadConcern

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.wire import BareProducer

_OWNER, _TOKEN, _STREAM = "floor", 1, "default"
_FIELDS = {"key": 1, "created_at": 1, "payload": 1}
_PUBLISHED = {"$set": {"status": "published"}, "$currentDate": {"published_at": True}, "$inc": {"attempts": 1}}
_SNAPSHOT, _MAJORITY = ReadConcern("snapshot"), WriteConcern("majority")


class Floor:
    """Slots that take shards from one queue, as the relay's do."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.clock = Clock(settings["events"])
        self.shards = deque(range(settings["shards"]))
        self.threads = ThreadPoolExecutor(settings["slots"])

    async def run(self) -> None:
        producers = [
            BareProducer(self.settings["servers"], self.settings["topic"]) for _ in range(self.settings["slots"])
        ]
        # Ids stay bytes, which is faster than the driver's own conversion.
        async with AsyncMongoClient[dict[str, Any]](self.settings["url"], tz_aware=True) as client:
            prefix = self.settings["prefix"]
            database = client.get_default_database(write_concern=_MAJORITY, read_concern=ReadConcern("majority"))
            self.client, self.events, self.leases = client, database[f"{prefix}_event"], database[f"{prefix}_lease"]
            for shard in self.shards:
                held = {"$set": {"owner": _OWNER, "token": _TOKEN}}
                await self.leases.update_one({"stream": _STREAM, "shard": shard}, held, upsert=True)
            await asyncio.gather(*(self._slot(producer) for producer in producers))

    async def _slot(self, producer: BareProducer) -> None:
        batch, loop = self.settings["batch"], asyncio.get_running_loop()
        steady = self.events.with_options(read_concern=_SNAPSHOT)
        while self.shards and not self.clock.done.is_set():
            shard = self.shards.popleft()
            self.clock.begin()
            fence = {"stream": _STREAM, "shard": shard, "token": _TOKEN, "owner": _OWNER}
            waiting = {"stream": _STREAM, "shard": shard, "status": "pending"}
            cursor = steady.find(waiting, _FIELDS, sort=[("seq", 1)], limit=batch, batch_size=batch, hint="ready")
            rows = await cursor.to_list()
            if not rows:
                continue
            if await self.leases.find_one(fence, {"_id": 1}) is None:
                raise RuntimeError("the lease is lost")
            names = [row["_id"].hex() for row in rows]
            sent = [
                (f"{i[:8]}-{i[8:12]}-{i[12:16]}-{i[16:20]}-{i[20:]}", row["key"], row["created_at"], row["payload"])
                for i, row in zip(names, rows, strict=True)
            ]
            await loop.run_in_executor(self.threads, producer.send, sent)
            await self._settle(fence, [row["_id"] for row in rows])
            self.clock.settle(len(rows))
            if len(rows) == batch:
                self.shards.append(shard)

    async def _settle(self, fence: dict[str, Any], ids: list[Any]) -> None:
        async with self.client.start_session() as session:
            await session.start_transaction(_SNAPSHOT, _MAJORITY)
            held = await self.leases.update_one(fence, {"$inc": {"turns": 1}}, session=session)
            if not held.matched_count:
                raise RuntimeError("the lease is lost")
            await self.events.update_many({"_id": {"$in": ids}, "status": "pending"}, _PUBLISHED, session=session)
            await session.commit_transaction()


def main() -> None:
    floor = Floor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
