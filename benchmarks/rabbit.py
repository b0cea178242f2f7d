"""The queues of a run on RabbitMQ."""

import asyncio
import uuid

import aiormq

from servers import RabbitMQ


class Queues:
    """Quorum queues, which are what the documentation recommends."""

    def __init__(self, server: RabbitMQ) -> None:
        self._server = server

    @property
    def servers(self) -> str:
        return self._server.url

    def topic(self, name: str) -> str:
        """A new queue."""
        unique = f"{name}-{uuid.uuid4().hex[:6]}"
        asyncio.run(self._make(unique))
        return unique

    def messages(self, name: str) -> int:
        """The number of messages in a queue. Nothing is taken out while it is measured."""
        return asyncio.run(self._count(name))

    def drop_topic(self, name: str) -> None:
        asyncio.run(self._delete(name))

    async def _make(self, name: str) -> None:
        async with aiormq.connect(self.servers) as connection:
            channel = await connection.channel()
            await channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})

    async def _count(self, name: str) -> int:
        async with aiormq.connect(self.servers) as connection:
            declared = await (await connection.channel()).queue_declare(name, passive=True)
            return declared.message_count or 0

    async def _delete(self, name: str) -> None:
        async with aiormq.connect(self.servers) as connection:
            await (await connection.channel()).queue_delete(name)
