import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pillarbox.conformance.source import SourceContract
from pillarbox.source import Source
from pillarbox.sources.pulsar import PulsarSource
from servers import Pulsar
from tests.pulsar_cluster import Cluster


class TestPulsar(SourceContract):
    can_go_down = True
    partitions = 0

    @pytest.fixture(autouse=True)
    def topic(self, pulsar: Pulsar) -> Iterator[None]:
        self.server, self.cluster = pulsar, Cluster(pulsar)
        self.name = self.cluster.topic(self.partitions)
        self.client = self.cluster.client()
        self.producer: Any = self.client.create_producer(self.name)
        yield
        pulsar.resume()
        self.client.close()

    def make(self) -> Source:
        return PulsarSource.from_url(f"{self.server.url}?topic={self.name}&connect_timeout=3s")

    async def send(self, body: bytes, *, key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        await asyncio.to_thread(self.producer.send, body, dict(headers or {}), key)

    async def go_down(self) -> None:
        self.server.pause()

    async def come_back(self) -> None:
        self.server.resume()


class TestPartitions(TestPulsar):
    partitions = 3
