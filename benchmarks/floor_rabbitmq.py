"""A bare drain with asyncpg and aiormq. As safe as ours: one unconfirmed event of a key, persistent and mandatory."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiormq
from aiormq import Channel, spec

from benchmarks.child import answer, settings_from_parent
from benchmarks.floor_postgres import Floor

WINDOW = 500
_CONSTANT_HEADERS = {"event_type": "order.created", "tenant": "default", "aggregate_type": "order"}


class RabbitMQFloor(Floor[Channel]):
    """A floor with a connection for each slot."""

    async def run(self) -> None:
        self.connections = [await aiormq.connect(self.settings["servers"]) for _ in range(self.settings["slots"])]
        channels = [await connection.channel() for connection in self.connections]
        self.channels = iter([channel for channel in channels if isinstance(channel, Channel)])
        await super().run()
        for connection in self.connections:
            await connection.close()

    def destination(self) -> Channel:
        return next(self.channels)

    async def send(self, destination: Channel, rows: list[Any]) -> None:
        keys: dict[str, list[Any]] = {}
        for row in rows:
            keys.setdefault(row[1], []).append(row)
        waiting = iter(keys.values())
        await asyncio.gather(*(self._send_keys(destination, waiting) for _ in range(min(WINDOW, len(keys)))))

    async def _send_keys(self, channel: Channel, waiting: Iterator[list[Any]]) -> None:
        queue = self.settings["topic"]
        for run in waiting:
            for event_id, key, occurred_at, payload in run:
                identity = str(event_id)
                properties = spec.Basic.Properties(
                    content_type="application/json",
                    delivery_mode=2,
                    message_id=identity,
                    message_type="order.created",
                    timestamp=occurred_at,
                    headers={
                        "event_id": identity,
                        **_CONSTANT_HEADERS,
                        "content_type": "application/json",
                        "occurred_at": occurred_at.isoformat(),
                        "aggregate_id": key,
                        "event_key": key,
                    },
                )
                await channel.basic_publish(
                    payload, routing_key=queue, properties=properties, mandatory=True, wait=False
                )


def main() -> None:
    floor = RabbitMQFloor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
