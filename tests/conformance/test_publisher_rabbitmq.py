from collections.abc import AsyncIterator
from uuid import uuid4

import aiormq
import pytest_asyncio

from pillarbox.conformance.publisher import Delivery, PublisherContract
from pillarbox.event import Event
from pillarbox.publisher import Publisher
from pillarbox.publishers.rabbitmq import RabbitMQPublisher
from servers import RabbitMQ

MAX_BYTES = 500_000


class TestRabbitMQ(PublisherContract):
    can_reject = True
    can_go_down = True

    @pytest_asyncio.fixture
    async def publisher(self, rabbitmq: RabbitMQ) -> AsyncIterator[RabbitMQPublisher]:
        self.server, self.queue, self.seen = rabbitmq, f"contract-{uuid4().hex[:8]}", list[Delivery]()
        async with aiormq.connect(rabbitmq.url) as connection:
            channel = await connection.channel()
            await channel.queue_declare(self.queue, durable=True, arguments={"x-queue-type": "quorum"})
        publisher = RabbitMQPublisher(rabbitmq.url, queue=self.queue, max_bytes=MAX_BYTES)
        await publisher.open()
        yield publisher
        rabbitmq.resume()
        await publisher.close()
        async with aiormq.connect(rabbitmq.url) as connection:
            await (await connection.channel()).queue_delete(self.queue)

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        async with aiormq.connect(self.server.url) as connection:
            channel = await connection.channel()
            while isinstance(
                (got := await channel.basic_get(self.queue, no_ack=True)).delivery, aiormq.spec.Basic.GetOk
            ):
                headers = got.header.properties.headers or {}
                key = str(headers["event_key"]) if "event_key" in headers else None
                self.seen.append(Delivery(str(headers["event_id"]), key, got.body))
        return self.seen

    def rejecting_event(self, key: str | None) -> Event:
        return self.event(key=key, payload=b"x" * (MAX_BYTES + 1))

    async def go_down(self) -> None:
        self.server.pause()

    async def come_back(self) -> None:
        self.server.resume()
