"""From PostgreSQL to Kafka, end to end."""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka import admin as confluent_admin
from prometheus_client import CollectorRegistry

from pillarbox import operations
from pillarbox.batch import Batch
from pillarbox.event import Status
from pillarbox.observe.metrics import CIRCUIT_OPEN
from pillarbox.observe.prometheus import Prometheus
from pillarbox.operations import Why
from pillarbox.publisher import Outcome
from pillarbox.publishers.kafka import KafkaPublisher, sender
from pillarbox.stores.sql import SqlStore
from servers import Kafka
from servers.fixtures import OwnServer
from tests.integration.relays import (
    STREAM,
    SqlOutbox,
    attempts,
    eventually,
    in_order,
    mixed,
    numbered,
    relay,
    settled,
    stream,
    until,
)

pytestmark = pytest.mark.asyncio

kafka_admin: Any = confluent_admin  # its types leave out what it exports
KEYS = [f"key-{n}" for n in range(20)]


class Record(NamedTuple):
    key: str
    n: int
    event_id: str


class Topic:
    """A look at the broker that does not go through the publisher."""

    def __init__(self, server: Kafka, partitions: int = 4) -> None:
        self.name = f"relay-{uuid.uuid4().hex[:12]}"
        self._config: dict[str, Any] = {"bootstrap.servers": server.bootstrap_servers, "log_level": 0}
        client = kafka_admin.AdminClient(self._config)
        client.create_topics([kafka_admin.NewTopic(self.name, partitions, 1)])[self.name].result()

    def end(self) -> int:
        """How many records there are."""
        consumer = Consumer({**self._config, "group.id": "test"})
        try:
            partitions = consumer.list_topics(self.name, timeout=10).topics[self.name].partitions
            ends = [
                consumer.get_watermark_offsets(TopicPartition(self.name, each), timeout=10)[1] for each in partitions
            ]
            return sum(ends)
        finally:
            consumer.close()

    async def reached(self, count: int) -> None:
        async def ask() -> int:
            return await asyncio.to_thread(self.end)

        await eventually(ask, lambda found: found >= count)

    def read(self) -> list[Record]:
        """All records, partition by partition."""
        consumer = Consumer({**self._config, "group.id": "test", "enable.auto.commit": False})
        records = []
        try:
            for partition in consumer.list_topics(self.name, timeout=10).topics[self.name].partitions:
                start, end = consumer.get_watermark_offsets(TopicPartition(self.name, partition), timeout=10)
                consumer.assign([TopicPartition(self.name, partition, start)])
                while start < end:
                    message: Any = consumer.poll(10)
                    assert message is not None
                    assert message.error() is None
                    start = message.offset() + 1
                    headers = dict(message.headers() or [])
                    number = json.loads(message.value())["n"]
                    records.append(Record(message.key().decode(), number, headers["event_id"].decode()))
        finally:
            consumer.close()
        return records


def numbers(records: list[Record]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record.n)
    return found


def copies(records: list[Record]) -> int:
    return sum(count - 1 for count in Counter(record.event_id for record in records).values())


async def test_every_event_arrives_once_and_in_order(pg: SqlOutbox, store: SqlStore, kafka: Kafka) -> None:
    topic = Topic(kafka)
    await store.add(mixed(KEYS, 50))
    async with relay(pg(), stream(KafkaPublisher(servers=kafka.bootstrap_servers, topic=topic.name), batch=100)):
        await store.add(mixed(KEYS, 50, first=51))
        await settled(store, {Status.PUBLISHED: 2000})
    assert numbers(topic.read()) == in_order(KEYS, 100)


class SlowKafka(KafkaPublisher):
    """Takes so long that a test can act in the midst of the work."""

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        await asyncio.sleep(0.1)
        return await super().publish(batch)


async def test_a_stop_and_a_start_make_no_copy(pg: SqlOutbox, store: SqlStore, kafka: Kafka) -> None:
    topic = Topic(kafka)
    await store.add(mixed(KEYS, 400))
    for goal in (1, 400):
        slow = SlowKafka(servers=kafka.bootstrap_servers, topic=topic.name)
        async with relay(pg(), stream(slow, batch=20, slots=2)):
            await topic.reached(goal)
    assert (await store.count("orders")).get(Status.PENDING, 0) > 0, "stopped in the midst of its work"
    async with relay(pg(), stream(KafkaPublisher(servers=kafka.bootstrap_servers, topic=topic.name))):
        await settled(store, {Status.PUBLISHED: 8000})
    assert numbers(topic.read()) == in_order(KEYS, 400)


async def test_a_url_is_enough(pg: SqlOutbox, store: SqlStore, kafka: Kafka) -> None:
    topic = Topic(kafka)
    await store.add(mixed(KEYS, 2))
    async with relay(pg(), stream(f"{kafka.url}?topic={topic.name}", on_dead="block")):
        await settled(store, {Status.PUBLISHED: 40})
    assert numbers(topic.read()) == in_order(KEYS, 2)


async def test_events_for_missing_topics_hold_only_their_keys(sqlite: SqlOutbox, store: SqlStore, kafka: Kafka) -> None:
    topic = Topic(kafka)
    lost = [f"lost-{number}" for number in range(60)]
    for key in lost:
        await store.add(numbered(key, 1, topic=f"nowhere-{key}") + numbered(key, 1, first=2))
    await store.add(mixed(KEYS, 5))
    to = KafkaPublisher(servers=kafka.bootstrap_servers, topic=topic.name)
    async with relay(sqlite(), stream(to, max_attempts=1)):
        await settled(store, {Status.PUBLISHED: 100, Status.FAILED: 60, Status.HELD: 60})
        await store.add(mixed(KEYS, 5, first=6))
        await settled(store, {Status.PUBLISHED: 200, Status.FAILED: 60, Status.HELD: 60})
    assert numbers(topic.read()) == in_order(KEYS, 10)
    assert set(await attempts(store)) == {0, 1}


async def test_a_broker_that_is_killed_costs_nothing_but_time(
    pg: SqlOutbox, store: SqlStore, own_server: OwnServer
) -> None:
    server = own_server(Kafka)
    topic = Topic(server)
    await store.add(mixed(KEYS, 400))
    async with relay(
        pg(),
        stream(SlowKafka(servers=server.bootstrap_servers, topic=topic.name), batch=100, slots=2, max_attempts=1),
    ):
        await topic.reached(100)
        await asyncio.to_thread(server.kill)
        pending = (await store.count("orders")).get(Status.PENDING, 0)
        assert pending > 0
        await store.add(mixed(KEYS, 5, first=401))
        await asyncio.to_thread(server.start)
        await settled(store, {Status.PUBLISHED: 8100}, seconds=60)
    records = topic.read()
    firsts = {key: list(dict.fromkeys(found)) for key, found in numbers(records).items()}
    assert firsts == in_order(KEYS, 405)
    assert copies(records) == 0, "an idempotent producer that lives through the outage sends nothing twice"


async def test_while_a_broker_is_away_everybody_is_told(
    sqlite: SqlOutbox, store: SqlStore, own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "QUIET_SECONDS", 0.3)
    server = own_server(Kafka)
    topic = Topic(server)
    observer = Prometheus(registry=CollectorRegistry())
    to = KafkaPublisher(servers=server.bootstrap_servers, topic=topic.name)

    async def said() -> Why:
        return await operations.why(store, late.id)

    def circuit() -> float | None:
        return observer.values()[CIRCUIT_OPEN].get((STREAM,))

    await store.add(mixed(KEYS, 1))
    async with relay(sqlite(), stream(to, lease=0.6), observers=[observer]) as running:
        await settled(store, {Status.PUBLISHED: len(KEYS)}, seconds=60)
        await asyncio.to_thread(server.kill)
        (late,) = events = mixed(KEYS[:1], 1, first=2)
        await store.add(events)
        told = await eventually(said, lambda answer: answer.cause == "circuit_open")
        assert "nothing is confirmed (" in told.sentence
        await until(lambda: circuit() == 1)
        assert running.circuits() == {STREAM: "open"}
        findings = {each.check for each in await operations.examine_store(store)}
        assert "stream_circuit" in findings
        (row,) = [each for each in await operations.status(store) if each.stream == STREAM]
        assert "waits for the destination" in " ".join(row.reasons)

        await asyncio.to_thread(server.start)
        await settled(store, {Status.PUBLISHED: len(KEYS) + 1}, seconds=60)
        await until(lambda: circuit() == 0)
        assert running.circuits() == {STREAM: "closed"}


async def test_a_broker_that_is_away_at_the_start_is_waited_for(
    pg: SqlOutbox, store: SqlStore, own_server: OwnServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = own_server(Kafka)
    topic = Topic(server)
    await asyncio.to_thread(server.kill)
    await store.add(mixed(KEYS, 5))
    to = KafkaPublisher(servers=server.bootstrap_servers, topic=topic.name, connect_timeout=0.5)
    async with relay(pg(), stream(to)):
        await until(lambda: "destination_down" in {getattr(record, "action", None) for record in caplog.records})
        await asyncio.to_thread(server.start)
        await settled(store, {Status.PUBLISHED: 100}, seconds=60)
    assert numbers(topic.read()) == in_order(KEYS, 5)
