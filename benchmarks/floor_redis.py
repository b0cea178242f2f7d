"""A bare drain with asyncpg and redis-py. As safe as ours: up to 1,000 entries in a transaction, one by one."""

import asyncio
from typing import Any

from redis.asyncio import Redis

from benchmarks.child import answer, settings_from_parent
from benchmarks.floor_postgres import Floor

CHUNK = 1000
_CONSTANT_FIELDS = {
    "event_type": "order.created",
    "tenant": "default",
    "aggregate_type": "order",
    "content_type": "application/json",
}


class RedisFloor(Floor[Any]):
    """A floor with a client for each slot."""

    async def run(self) -> None:
        self.clients: list[Any] = [Redis.from_url(self.settings["servers"]) for _ in range(self.settings["slots"])]
        self.free = iter(self.clients)
        await super().run()
        for client in self.clients:
            await client.aclose()

    def destination(self) -> Any:
        return next(self.free)

    async def send(self, destination: Any, rows: list[Any]) -> None:
        stream = self.settings["topic"]
        for start in range(0, len(rows), CHUNK):
            pipeline = destination.pipeline(transaction=True)
            for event_id, key, occurred_at, payload in rows[start : start + CHUNK]:
                fields = {
                    "event_id": str(event_id),
                    **_CONSTANT_FIELDS,
                    "occurred_at": occurred_at.isoformat(),
                    "aggregate_id": key,
                    "event_key": key,
                    "payload": payload,
                }
                pipeline.xadd(stream, fields)
            await pipeline.execute()


def main() -> None:
    floor = RedisFloor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
