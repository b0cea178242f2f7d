from collections.abc import AsyncIterator

import pytest_asyncio

from pillarbox.conformance.publisher import Delivery, PublisherContract
from pillarbox.event import Event
from pillarbox.publisher import Publisher
from pillarbox.publishers.nats import NatsPublisher
from servers import Nats
from tests.integration.jetstream import desk

MAX_BYTES = 500_000


class TestNats(PublisherContract):
    can_reject = True
    can_go_down = True

    @pytest_asyncio.fixture
    async def publisher(self, nats: Nats) -> AsyncIterator[NatsPublisher]:
        self.server = nats
        async with desk(nats.url) as shop:
            self.stream = await shop.stream(max_msg_size=MAX_BYTES)
        publisher = NatsPublisher(nats.url, subject=self.stream)
        await publisher.open()
        yield publisher
        nats.resume()
        await publisher.close()
        async with desk(nats.url) as shop:
            await shop.manager.delete_stream(self.stream)

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        async with desk(self.server.url) as shop:
            return [
                Delivery(each.headers["event_id"], each.headers.get("event_key"), each.body)
                for each in await shop.read(self.stream)
            ]

    def rejecting_event(self, key: str | None) -> Event:
        return self.event(key=key, payload=b"x" * (MAX_BYTES + 1))

    async def go_down(self) -> None:
        self.server.pause()

    async def come_back(self) -> None:
        self.server.resume()
