"""A bare drain with asyncpg and nats-py. As safe as ours: one unconfirmed event of a key, confirmed by its stream."""

import asyncio
from collections.abc import Iterator
from typing import Any

import nats
from nats.js import JetStreamContext

from benchmarks.child import answer, settings_from_parent
from benchmarks.floor_postgres import Floor

WINDOW = 500
_CONSTANT_HEADERS = {
    "event_type": "order.created",
    "tenant": "default",
    "aggregate_type": "order",
    "content_type": "application/json",
}


class NatsFloor(Floor[JetStreamContext]):
    """A floor with a connection for each slot."""

    async def run(self) -> None:
        clients = [await nats.connect(self.settings["servers"]) for _ in range(self.settings["slots"])]
        self.contexts = iter([client.jetstream() for client in clients])
        await super().run()
        for client in clients:
            await client.close()

    def destination(self) -> JetStreamContext:
        return next(self.contexts)

    async def send(self, destination: JetStreamContext, rows: list[Any]) -> None:
        keys: dict[str, list[Any]] = {}
        for row in rows:
            keys.setdefault(row[1], []).append(row)
        waiting = iter(keys.values())
        await asyncio.gather(*(self._send_keys(destination, waiting) for _ in range(min(WINDOW, len(keys)))))

    async def _send_keys(self, context: JetStreamContext, waiting: Iterator[list[Any]]) -> None:
        subject = self.settings["topic"]
        for run in waiting:
            for event_id, key, occurred_at, payload in run:
                identity = str(event_id)
                headers = {
                    "Nats-Msg-Id": identity,
                    "event_id": identity,
                    **_CONSTANT_HEADERS,
                    "occurred_at": occurred_at.isoformat(),
                    "aggregate_id": key,
                    "event_key": key,
                }
                await (await context.publish_async(subject, payload, headers=headers))


def main() -> None:
    floor = NatsFloor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
