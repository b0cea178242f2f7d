import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest_asyncio

from pillarbox.conformance.publisher import Delivery, PublisherContract
from pillarbox.event import Event
from pillarbox.publisher import Publisher
from pillarbox.publishers.pulsar import PulsarPublisher
from servers import Pulsar
from tests.pulsar_cluster import Cluster


class TestPulsar(PublisherContract):
    can_reject = True
    can_go_down = True

    @pytest_asyncio.fixture
    async def publisher(self, pulsar: Pulsar) -> AsyncIterator[PulsarPublisher]:
        self.server, self.cluster = pulsar, Cluster(pulsar)
        self.topic = self.cluster.topic(partitions=3)
        publisher = PulsarPublisher.from_url(f"{pulsar.url}?topic={self.topic}&connect_timeout=2s")
        await publisher.open()
        yield publisher
        pulsar.resume()
        await publisher.close()

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        records = await asyncio.to_thread(self.cluster.read, self.topic)
        return [Delivery(record.headers["event_id"], record.key, record.value) for record in records]

    def rejecting_event(self, key: str | None) -> Event:
        return self.event(key=key, topic="no://topic")

    async def go_down(self) -> None:
        self.server.pause()

    async def come_back(self) -> None:
        self.server.resume()


class TestPlainBatches(TestPulsar):
    """With the other kind of batches, and the other hash."""

    @pytest_asyncio.fixture
    async def publisher(self, pulsar: Pulsar) -> AsyncIterator[PulsarPublisher]:
        self.server, self.cluster = pulsar, Cluster(pulsar)
        self.topic = f"contract-{uuid4().hex[:8]}"
        publisher = PulsarPublisher(
            servers=pulsar.url.removeprefix("pulsar://"), topic=self.topic, batching="plain", hash="murmur3", stuck="2s"
        )
        await publisher.open()
        yield publisher
        pulsar.resume()
        await publisher.close()
