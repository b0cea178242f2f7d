"""A consumer reads what others write, and others read what we write, through a real broker."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
import pytest_asyncio
from cloudevents.core.bindings.kafka import to_binary, to_structured
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from examples.other_clients.with_aiokafka import count_orders
from examples.other_clients.with_faststream import mailer
from pillarbox import Consumer, Event, Handlers, Outbox, stable_id
from pillarbox.batch import Batch
from pillarbox.publishers.kafka import KafkaPublisher
from pillarbox.urls import store_from_url
from servers import Kafka, Postgres
from tests.integration.test_kafka_source import Cluster

pytestmark = pytest.mark.asyncio

LIMIT_SECONDS = 60.0
AT = datetime(2026, 3, 1, 12, 30, 15, tzinfo=UTC)


class Read:
    """The events that a consumer has handled."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._came = asyncio.Condition()
        self.handlers = Handlers()
        self.handlers.on("*")(self.handle)

    async def handle(self, event: Event) -> None:
        async with self._came:
            self.events.append(event)
            self._came.notify_all()

    async def wait(self, count: int) -> list[Event]:
        async with asyncio.timeout(LIMIT_SECONDS), self._came:
            await self._came.wait_for(lambda: len(self.events) >= count)
        return self.events


@pytest.fixture
def cluster(kafka: Kafka) -> Cluster:
    return Cluster(kafka)


async def read(cluster: Cluster, topic: str, count: int) -> list[Event]:
    found = Read()
    source = f"kafka://{cluster.servers}?topic={topic}&group=g-{topic}"
    async with Consumer("cards", source, to=found.handlers, on_dead="block"):
        return await found.wait(count)


async def test_a_plain_producer(cluster: Cluster) -> None:
    topic, event_id = cluster.topic(), uuid4()
    headers = {"event_id": str(event_id), "event_type": "card.made", "region": "eu"}
    cluster.producer.produce(topic, b'{"n": 1}', b"7", headers=headers)
    cluster.producer.produce(topic, b'{"n": 2}', b"7", headers={"message_id": "card-2", "type": "card.changed"})
    assert cluster.producer.flush(30) == 0
    first, second = await read(cluster, topic, 2)
    assert (first.id, first.type, first.key, first.payload) == (event_id, "card.made", "7", b'{"n": 1}')
    assert first.headers == {"region": "eu"}
    assert (second.id, second.type) == (stable_id("message", topic, "card-2"), "card.changed")


async def test_the_headers_of_debeziums_outbox_router(cluster: Cluster) -> None:
    topic, event_id = cluster.topic(), uuid4()
    headers: Any = [("id", str(event_id)), ("eventType", "card.made"), ("tenant", None), ("aggregateType", "card")]
    cluster.producer.produce(topic, b'{"n": 1}', b"7", headers=headers)
    assert cluster.producer.flush(30) == 0
    (event,) = await read(cluster, topic, 1)
    assert (event.id, event.type, event.aggregate_type) == (event_id, "card.made", "card")
    assert (event.key, event.tenant, event.payload) == ("7", "default", b'{"n": 1}')


@pytest.mark.parametrize("write", [to_binary, to_structured], ids=["binary", "structured"])
async def test_the_sdk_of_cloudevents(cluster: Cluster, write: Callable[..., Any]) -> None:
    topic, event_id = cluster.topic(), uuid4()
    attributes: dict[str, Any] = {
        "id": str(event_id),
        "type": "card.made",
        "source": "/cards",
        "subject": "7",
        "specversion": "1.0",
        "time": AT,
        "partitionkey": "7",
        "datacontenttype": "application/json",
    }
    message = write(CloudEvent(attributes, {"n": 1}), JSONFormat())
    cluster.producer.produce(topic, message.value, message.key, headers=list(message.headers.items()))
    assert cluster.producer.flush(30) == 0
    (event,) = await read(cluster, topic, 1)
    assert (event.id, event.type, event.aggregate_id, event.key) == (event_id, "card.made", "7", "7")
    assert event.occurred_at == AT
    assert json.loads(event.payload) == {"n": 1}


@pytest_asyncio.fixture
async def url(postgres: Postgres) -> AsyncIterator[str]:
    """A new database with an inbox and a table for each application."""
    name = f"interop_{uuid4().hex[:10]}"
    admin = await asyncpg.connect(postgres.url)
    await admin.execute(f"CREATE DATABASE {name}")
    url = postgres.url.rpartition("/")[0] + f"/{name}"
    store = store_from_url(url)
    await store.migrate()
    await store.close()
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE TABLE mail (id integer); CREATE TABLE total (orders integer, cents integer)")
    await connection.execute("INSERT INTO total VALUES (0, 0)")
    await connection.close()
    yield url
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


async def publish_twice(cluster: Cluster, count: int) -> str:
    """A new topic with each event two times. The last one is alone, so that it comes after all copies."""
    topic = cluster.topic()
    outbox = Outbox()
    events = [outbox.event("order.created", {"id": n, "cents": 5}, key=1) for n in range(count)]
    publisher = KafkaPublisher(servers=cluster.servers, topic=topic)
    await publisher.open()
    for each in (events, events, [outbox.event("order.created", {"id": count, "cents": 5}, key=1)]):
        outcomes = await publisher.publish(Batch.of(each))
        assert all(outcome.error is None for outcome in outcomes)
    await publisher.close()
    return topic


async def until(ask: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while await ask() != wanted:  # noqa: ASYNC110  # another client tells nobody
            await asyncio.sleep(0.05)


async def test_faststream_applies_each_event_once(cluster: Cluster, url: str) -> None:
    topic = await publish_twice(cluster, 20)
    engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))

    async def last() -> Any:
        async with engine.connect() as connection:
            return (await connection.execute(text("SELECT max(id) FROM mail"))).scalar()

    broker = mailer(cluster.servers, topic, engine)
    await broker.start()
    await until(last, 20)
    await broker.stop()
    async with engine.connect() as connection:
        found = (await connection.execute(text("SELECT id FROM mail ORDER BY id"))).scalars().all()
    await engine.dispose()
    assert found == list(range(21))


async def test_aiokafka_applies_each_event_once(cluster: Cluster, url: str) -> None:
    topic = await publish_twice(cluster, 20)
    async with asyncpg.create_pool(url, min_size=1) as pool:
        running = asyncio.create_task(count_orders(cluster.servers, topic, pool))

        async def has_last() -> Any:
            query = "SELECT count(*) FROM outbox_inbox WHERE consumer = 'counter'"
            return await pool.fetchval(query)

        await until(has_last, 21)
        running.cancel()
        await asyncio.wait([running])
        assert tuple(await pool.fetchrow("SELECT * FROM total")) == (21, 105)
