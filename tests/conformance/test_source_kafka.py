import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar
from uuid import uuid4

import pytest_asyncio
from confluent_kafka import Producer
from confluent_kafka import admin as confluent_admin

from pillarbox.conformance.source import SourceContract
from pillarbox.sources.kafka import KafkaSource
from servers import Kafka

kafka_admin: Any = confluent_admin  # its types leave out what it exports


class KafkaContract(SourceContract):
    can_share = True
    can_go_down = True
    protocol: ClassVar[str]

    @pytest_asyncio.fixture(autouse=True)
    async def topic(self, kafka: Kafka) -> AsyncIterator[None]:
        self.server, self.name = kafka, f"contract-{uuid4().hex[:8]}"
        self.made = list[KafkaSource]()
        admin = kafka_admin.AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.create_topics([kafka_admin.NewTopic(self.name, 4, 1)])[self.name].result()
        self.producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0})
        yield
        kafka.resume()
        # Also after a test that failed: the client never returns when the garbage collector ends an open consumer.
        for source in self.made:
            await source.close()

    def make(self) -> KafkaSource:
        source = _Prefixed(
            servers=self.server.bootstrap_servers, topic=self.name, properties={"group.protocol": self.protocol}
        )
        self.made.append(source)
        return source

    async def send(self, body: bytes, *, key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.producer.produce(self.name, body, key, headers=dict(headers or {}))
        assert await asyncio.to_thread(self.producer.flush, 30) == 0

    async def go_down(self) -> None:
        self.server.pause()

    async def come_back(self) -> None:
        self.server.resume()


class _Prefixed(KafkaSource):
    """Its groups are those of one test."""

    async def open(self, consumer: str, lanes: Any) -> None:
        await super().open(f"{self._topics[0]}-{consumer}", lanes)


class TestClassic(KafkaContract):
    protocol = "classic"


class TestConsumerProtocol(KafkaContract):
    protocol = "consumer"
