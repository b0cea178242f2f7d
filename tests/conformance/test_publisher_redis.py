from collections.abc import AsyncIterator

import pytest_asyncio

from pillarbox.conformance.publisher import Delivery, PublisherContract
from pillarbox.event import Event
from pillarbox.publisher import Publisher
from pillarbox.publishers.redis import RedisPublisher
from servers import Valkey
from tests.integration.redis_desk import desk

MAX_BYTES = 500_000


class TestRedis(PublisherContract):
    can_reject = True
    can_go_down = True

    @pytest_asyncio.fixture
    async def publisher(self, valkey: Valkey) -> AsyncIterator[RedisPublisher]:
        self.server = valkey
        async with desk(valkey.url) as shop:
            self.stream = shop.stream()
        publisher = RedisPublisher(valkey.url, stream=self.stream, max_bytes=MAX_BYTES)
        await publisher.open()
        yield publisher
        valkey.resume()
        await publisher.close()
        async with desk(valkey.url) as shop:
            await shop.client.delete(self.stream)

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        async with desk(self.server.url) as shop:
            found = await shop.read(self.stream)
        keys = [each.fields.get("event_key") for each in found]
        return [
            Delivery(each.event_id, None if key is None else key.decode(), each.body)
            for each, key in zip(found, keys, strict=True)
        ]

    def rejecting_event(self, key: str | None) -> Event:
        return self.event(key=key, payload=b"x" * (MAX_BYTES + 1))

    async def go_down(self) -> None:
        self.server.pause()

    async def come_back(self) -> None:
        self.server.resume()
