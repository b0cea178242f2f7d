import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest_asyncio
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka import admin as confluent_admin

from pillarbox.conformance.publisher import Delivery, PublisherContract
from pillarbox.event import Event
from pillarbox.publisher import Publisher
from pillarbox.publishers.kafka import KafkaPublisher
from servers import Kafka

PARTITIONS = 3
kafka_admin: Any = confluent_admin  # its types leave out what it exports


class TestKafka(PublisherContract):
    can_reject = True
    can_go_down = True

    @pytest_asyncio.fixture
    async def publisher(self, kafka: Kafka) -> AsyncIterator[KafkaPublisher]:
        self.server, self.topic = kafka, f"contract-{uuid4().hex[:8]}"
        admin = kafka_admin.AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.create_topics([kafka_admin.NewTopic(self.topic, PARTITIONS, 1)])[self.topic].result()
        publisher = KafkaPublisher(servers=kafka.bootstrap_servers, topic=self.topic)
        await publisher.open()
        yield publisher
        kafka.resume()
        await publisher.close()

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Delivery]:
        consumer = Consumer({"bootstrap.servers": self.server.bootstrap_servers, "group.id": "contract"})
        found = []
        for partition in range(PARTITIONS):
            at, end = consumer.get_watermark_offsets(TopicPartition(self.topic, partition), timeout=20)
            consumer.assign([TopicPartition(self.topic, partition, at)])
            while at < end:
                message: Any = consumer.poll(10)
                at = message.offset() + 1
                key = message.key()
                identity = dict(message.headers())["event_id"].decode()
                found.append(Delivery(identity, key and key.decode(), message.value()))
        consumer.close()
        return found

    def rejecting_event(self, key: str | None) -> Event:
        return self.event(key=key, topic="no topic!")

    async def go_down(self) -> None:
        self.server.pause()

    async def come_back(self) -> None:
        self.server.resume()
