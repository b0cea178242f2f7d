from collections.abc import AsyncIterator

import pytest_asyncio

from pillarbox.conformance.publisher import Delivery, PublisherContract
from pillarbox.event import Event
from pillarbox.publisher import Publisher
from pillarbox.publishers.http import HttpPublisher
from servers import Receiver

RECEIVER_BYTES = 1 << 20
SECRET = f"whsec_{'YWJj' * 8}"


class TestHttp(PublisherContract):
    can_reject = True
    can_go_down = True

    """The receiver itself refuses what is too large for it."""

    @pytest_asyncio.fixture
    async def publisher(self, receiver: Receiver) -> AsyncIterator[HttpPublisher]:
        self.server = receiver
        publisher = HttpPublisher(
            receiver.url, secret=SECRET, max_bytes=2 * RECEIVER_BYTES, timeout="1s", connect_timeout="500ms"
        )
        await publisher.open()
        yield publisher
        receiver.resume()
        await publisher.close()

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        return [
            Delivery(each.headers["webhook-id"], each.headers.get("event-key"), each.body)
            for each in self.server.taken()
        ]

    def rejecting_event(self, key: str | None) -> Event:
        return self.event(key=key, payload=b"x" * (RECEIVER_BYTES + 1))

    async def go_down(self) -> None:
        self.server.pause()

    async def come_back(self) -> None:
        self.server.resume()
