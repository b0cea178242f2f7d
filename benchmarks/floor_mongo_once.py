"""A bare drain from MongoDB to Kafka in transactions: the relay's work exactly once, without the library."""

import asyncio
from typing import Any
from uuid import uuid4

from benchmarks.child import answer, settings_from_parent
from benchmarks.floor_mongo import MAJORITY, PUBLISHED, SNAPSHOT, Floor, among
from benchmarks.wire_once import BareTransactions


class OnceFloor(Floor):
    """A floor with a producer for each shard; events and batch are settled in one transaction."""

    def producers(self) -> list[Any]:
        settings = self.settings
        shared = BareTransactions(settings["servers"], settings["topic"], settings["shards"])
        return [shared] * settings["slots"]

    async def publish(self, producer: Any, fence: dict[str, Any], sent: list[Any], ids: list[bytes]) -> None:
        batch = uuid4()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.threads, producer.send, fence["shard"], sent, batch.bytes, ids)

        async def settle(session: Any) -> None:
            noted = {"$set": {"settled_batch": batch.bytes}}
            if not (await self.leases.update_one(fence, noted, session=session)).matched_count:
                raise RuntimeError("the lease is lost")
            await self.events.update_many({"_id": among(ids), "status": "pending"}, PUBLISHED, session=session)

        async with self.client.start_session() as session:
            await session.with_transaction(settle, SNAPSHOT, MAJORITY)


def main() -> None:
    floor = OnceFloor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
