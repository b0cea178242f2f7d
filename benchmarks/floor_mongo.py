"""A bare drain with PyMongo and confluent-kafka: the relay's work without the library, as fast as we can write it.

Collections, shards, slots, batches, fences and concerns are those of the store: snapshot reads, majority writes.
"""

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient, WriteConcern
from pymongo.read_concern import ReadConcern

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.wire import BareProducer

_OWNER, _TOKEN, _STREAM = "floor", 1, "default"
_FIELDS = {"key": 1, "created_at": 1, "payload": 1}
PUBLISHED = {"$set": {"status": "published"}, "$currentDate": {"published_at": True}, "$inc": {"attempts": 1}}
SNAPSHOT, MAJORITY = ReadConcern("snapshot"), WriteConcern("majority")


class Floor:
    """Slots that take shards from one queue, as in the relay."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.clock = Clock(settings["events"])
        self.shards = deque(range(settings["shards"]))
        self.threads = ThreadPoolExecutor(settings["slots"])

    async def run(self) -> None:
        producers = self.producers()
        # Ids stay bytes: faster than the driver's conversion.
        async with AsyncMongoClient[dict[str, Any]](self.settings["url"], tz_aware=True) as client:
            self.client = client
            prefix = self.settings["prefix"]
            database = client.get_default_database(write_concern=MAJORITY, read_concern=ReadConcern("majority"))
            self.events, self.leases = database[f"{prefix}_event"], database[f"{prefix}_lease"]
            for shard in self.shards:
                held = {"$set": {"owner": _OWNER, "token": _TOKEN}}
                await self.leases.update_one({"stream": _STREAM, "shard": shard}, held, upsert=True)
            await asyncio.gather(*(self._slot(producer) for producer in producers))

    async def _slot(self, producer: Any) -> None:
        batch = self.settings["batch"]
        steady = self.events.with_options(read_concern=SNAPSHOT)
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
            names = [row["_id"]["id"].hex() for row in rows]
            sent = [
                (f"{i[:8]}-{i[8:12]}-{i[12:16]}-{i[16:20]}-{i[20:]}", row["key"], row["created_at"], row["payload"])
                for i, row in zip(names, rows, strict=True)
            ]
            await self.publish(producer, fence, sent, [row["_id"]["id"] for row in rows])
            self.clock.settle(len(rows))
            if len(rows) == batch:
                self.shards.append(shard)

    async def publish(self, producer: Any, fence: dict[str, Any], sent: list[Any], ids: list[bytes]) -> None:
        """Send the rows of a shard and settle them."""
        await asyncio.get_running_loop().run_in_executor(self.threads, producer.send, sent)
        await self._settle(fence, ids)

    def producers(self) -> list[Any]:
        """One for each slot."""
        slots = range(self.settings["slots"])
        return [BareProducer(self.settings["servers"], self.settings["topic"]) for _ in slots]

    async def _settle(self, fence: dict[str, Any], ids: list[bytes]) -> None:
        # Without a transaction, as in the store: a mark of what is published is true whoever writes it.
        if await self.leases.find_one(fence, {"_id": 1}) is None:
            raise RuntimeError("the lease is lost")
        await self.events.update_many({"_id": among(ids), "status": "pending"}, PUBLISHED)


def among(ids: list[bytes]) -> RawBSONDocument:
    """The condition ``$in`` in bytes, as in the store: the driver is slow with many small documents."""
    stream = b"\x02stream\0" + _size(len(_STREAM) + 1) + _STREAM.encode() + b"\0"
    before = b"\x05id\0" + _size(16) + b"\x04"
    size = _size(4 + len(before) + 16 + len(stream) + 1)
    each = [b"\x03%d\0" % place + size + before + i + stream + b"\0" for place, i in enumerate(ids)]
    array = b"".join(each)
    body = b"\x04$in\0" + _size(4 + len(array) + 1) + array + b"\0"
    return RawBSONDocument(_size(4 + len(body) + 1) + body + b"\0")


def _size(number: int) -> bytes:
    return number.to_bytes(4, "little")


def main() -> None:
    floor = Floor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
