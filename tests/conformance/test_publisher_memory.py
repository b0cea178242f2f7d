from collections.abc import AsyncIterator

import pytest_asyncio

from pillarbox.conformance.publisher import Delivery, PublisherContract
from pillarbox.event import Event
from pillarbox.publisher import Publisher, rejected
from pillarbox.publishers.memory import MemoryPublisher


class TestMemory(PublisherContract):
    can_reject = True
    can_go_down = True

    @pytest_asyncio.fixture
    async def publisher(self) -> AsyncIterator[MemoryPublisher]:
        self.memory = MemoryPublisher()
        await self.memory.open()
        yield self.memory
        await self.memory.close()

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        return [Delivery(str(e.id), e.key, e.payload) for e in self.memory.deliveries]

    def rejecting_event(self, key: str | None) -> Event:
        self.memory.fail_next(rejected("the test wants it so"), type="bad")
        return self.event(key=key, type="bad")

    async def go_down(self) -> None:
        self.memory.down()

    async def come_back(self) -> None:
        self.memory.up()


class TestMemoryThatWaits(TestMemory):
    """The same with a publisher that waits for the end of an outage and does not report it."""

    waiting_seconds = 0.01

    async def go_down(self) -> None:
        self.memory.hold()

    async def come_back(self) -> None:
        self.memory.release()
