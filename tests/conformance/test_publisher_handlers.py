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

    @pytest_asyncio.fixture(params=["async", "plain", "async batch", "plain batch"])
    async def publisher(self, request: pytest.FixtureRequest) -> AsyncIterator[Handlers]:
        self.arrived: list[Delivery] = []
        handlers = Handlers(concurrency=4)

        def plain(event: Event) -> None:
            if event.type == "bad":
                raise Reject("the test wants it so")
            self.arrived.append(Delivery(str(event.id), event.key, event.payload))

        async def on_loop(event: Event) -> None:
            plain(event)

        def plain_batch(events: list[Event]) -> None:
            if len(events) > 1 and any(event.type == "bad" for event in events):
                raise RuntimeError("a transaction that is rolled back")
            for event in events:
                plain(event)

        async def batch_on_loop(events: list[Event]) -> None:
            plain_batch(events)

        match request.param:
            case "async":
                handlers.on("*")(on_loop)
            case "plain":
                handlers.on("*")(plain)
            case "async batch":
                handlers.on_batch("*", size=10)(batch_on_loop)
            case _:
                handlers.on_batch("*", size=10)(plain_batch)
        await handlers.open()
        yield handlers
        await handlers.close()

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        return self.arrived

    def rejecting_event(self, key: str | None) -> Event:
        return self.event(key=key, type="bad")
