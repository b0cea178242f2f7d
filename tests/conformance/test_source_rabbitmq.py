from collections.abc import AsyncIterator, Mapping
from uuid import uuid4

import pytest_asyncio
from aiormq import spec

from pillarbox.conformance.source import SourceContract
from pillarbox.source import Source
from pillarbox.sources.rabbitmq import RabbitMQSource
from servers import RabbitMQ
from tests.integration.rabbit import desk

CONSUMERS = ("cards", "mailer")


class TestRabbitMQ(SourceContract):
    can_go_down = True

    @pytest_asyncio.fixture(autouse=True)
    async def queues(self, rabbitmq: RabbitMQ) -> AsyncIterator[None]:
        """An exchange that gives each consumer every message."""
        self.server, self.name = rabbitmq, f"contract-{uuid4().hex[:8]}"
        async with desk(rabbitmq.url) as shop:
            self.channel = shop.channel
            await self.channel.exchange_declare(self.name, exchange_type="fanout")
            for consumer in CONSUMERS:
                queue = f"{self.name}.{consumer}"
                await self.channel.queue_declare(
                    queue, durable=True, arguments={"x-queue-type": "quorum", "x-single-active-consumer": True}
                )
                await self.channel.queue_bind(queue, self.name)
            yield
            rabbitmq.resume()
            for consumer in CONSUMERS:
                await self.channel.queue_delete(f"{self.name}.{consumer}")

    def make(self) -> Source:
        return RabbitMQSource(self.server.url, queue=f"{self.name}.{{consumer}}", connect_timeout="3s")

    async def send(self, body: bytes, *, key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        given = {**(headers or {}), **({} if key is None else {"event_key": key})}
        await self.channel.basic_publish(
            body, exchange=self.name, routing_key="", properties=spec.Basic.Properties(headers=dict(given))
        )

    async def go_down(self) -> None:
        self.server.pause()

    async def come_back(self) -> None:
        self.server.resume()
