"""RabbitMQ for tests: an operator's connection."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from uuid import uuid4

import aiormq


class Found(NamedTuple):
    """One message in a queue."""

    event_id: str
    body: bytes
    properties: Any
    routing_key: str


class Desk:
    """Queues, exchanges and messages of a server, seen without Pillarbox."""

    def __init__(self, channel: aiormq.abc.AbstractChannel) -> None:
        self.channel = channel

    async def queue(self, kind: str = "quorum", **arguments: Any) -> str:
        """A new durable queue. A name of an argument has - in place of _."""
        name = f"q-{uuid4().hex[:10]}"
        given = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
        await self.channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind, **given})
        return name

    async def exchange(self, kind: str = "topic") -> str:
        name = f"e-{uuid4().hex[:10]}"
        await self.channel.exchange_declare(name, exchange_type=kind, durable=True)
        return name

    async def bind(self, queue: str, exchange: str, routing_key: str = "#") -> None:
        await self.channel.queue_bind(queue, exchange, routing_key)

    async def count(self, queue: str) -> int:
        """The messages that wait in a queue."""
        return (await self.channel.queue_declare(queue, passive=True)).message_count or 0

    async def read(self, queue: str) -> list[Found]:
        """Take all messages out of a queue."""
        found = []
        while (got := await self.channel.basic_get(queue, no_ack=True)).delivery.name == "Basic.GetOk":
            properties: Any = got.header.properties
            found.append(Found(properties.message_id, got.body, properties, getattr(got.delivery, "routing_key", "")))
        return found


@asynccontextmanager
async def desk(url: str) -> AsyncIterator[Desk]:
    async with aiormq.connect(url) as connection:
        yield Desk(await connection.channel())
