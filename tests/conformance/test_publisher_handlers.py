from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pillarbox.conformance.publisher import Delivery, PublisherContract
from pillarbox.errors import Reject
from pillarbox.event import Event
from pillarbox.publisher import Publisher
from pillarbox.publishers.handlers import Handlers


class TestHandlers(PublisherContract):
    can_reject = True

    @pytest_asyncio.fixture(params=["async", "plain"])
    async def publisher(self, request: pytest.FixtureRequest) -> AsyncIterator[Handlers]:
        self.arrived: list[Delivery] = []
        handlers = Handlers(concurrency=4)

        def plain(event: Event) -> None:
            if event.type == "bad":
                raise Reject("the test wants it so")
            self.arrived.append(Delivery(str(event.id), event.key, event.payload))

        async def on_loop(event: Event) -> None:
            plain(event)

        handlers.on("*")(plain if request.param == "plain" else on_loop)
        await handlers.open()
        yield handlers
        await handlers.close()

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        return self.arrived

    def rejecting_event(self, key: str | None) -> Event:
        return self.event(key=key, type="bad")
