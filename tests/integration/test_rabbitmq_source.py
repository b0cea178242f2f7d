import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from aiormq import spec

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.conformance.source import Reader
from pillarbox.consumer.decoder import decode
from pillarbox.errors import ConfigError, Outage
from pillarbox.publisher import PUBLISHED
from pillarbox.publishers.rabbitmq import RabbitMQPublisher
from pillarbox.sources.rabbitmq import RabbitMQSource
from pillarbox.urls import source_from_url
from proof.proxy import Proxy
from servers import RabbitMQ
from servers.fixtures import OwnServer
from tests.integration.rabbit import Desk, desk

pytestmark = pytest.mark.asyncio

LIMIT = 60.0


@pytest_asyncio.fixture
async def shop(rabbitmq: RabbitMQ) -> AsyncIterator[Desk]:
    async with desk(rabbitmq.url) as found:
        yield found


async def opened(source: RabbitMQSource) -> Reader:
    reader = Reader(source, LIMIT)
    await source.open("cards", reader)
    return reader


async def send(shop: Desk, queue: str, *bodies: bytes, **properties: Any) -> None:
    for body in bodies:
        given = spec.Basic.Properties(delivery_mode=2, **properties)
        await shop.channel.basic_publish(body, routing_key=queue, properties=given, mandatory=True)


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("amqp://localhost", "no RabbitMQ queue is given"),
        ("amqp://localhost?queue=a&prefetch=none", "prefetch='none'"),
        ("amqp://localhost?queue=a&prefetch=0", "from 1 to 65535"),
        ("amqp://localhost?queue=a&ack_limit=10ms", "ack_limit"),
        ("amqp://localhost?queue=a&exchange=b", "unknown option 'exchange'"),
        ("amqp://localhost?queue=a{b}", "is not a name"),
    ],
)
async def test_a_wrong_setting_names_its_remedy(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        source_from_url(url)


@pytest.mark.parametrize("envelope", ["raw", "legacy", "cloudevents", "cloudevents_structured"])
async def test_an_event_comes_back_as_it_was_published(rabbitmq: RabbitMQ, shop: Desk, envelope: str) -> None:
    queue = await shop.queue(single_active_consumer=True)
    publisher = RabbitMQPublisher(rabbitmq.url, queue=queue, envelope=envelope)
    await publisher.open()
    sent = make_event(key="order-7", type="order.created", aggregate_id="7", aggregate_version=3, tenant="acme")
    assert list(await publisher.publish(Batch.of([sent]))) == [PUBLISHED]
    await publisher.close()
    reader = await opened(RabbitMQSource(rabbitmq.url, queue=queue))
    (message,) = await reader.read(1)
    found = decode(message)
    await reader.source.close()
    assert (found.id, found.payload, found.key) == (sent.id, sent.payload, "order-7")
    if envelope != "legacy":
        assert (found.type, found.tenant, found.aggregate_id, found.aggregate_version) == (
            "order.created",
            "acme",
            "7",
            3,
        )


async def test_fields_and_headers_of_other_producers(rabbitmq: RabbitMQ, shop: Desk) -> None:
    queue = await shop.queue(single_active_consumer=True)
    headers = {"text": "ø", "bytes": bytearray(b"\xff"), "number": 7, "table": {"a": "b"}}
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    await send(shop, queue, b"x", headers=headers, content_type="text/plain", message_id="m-1", timestamp=at)
    reader = await opened(RabbitMQSource(rabbitmq.url, queue=queue))
    (message,) = await reader.read(1)
    await reader.source.close()
    assert dict(message.headers) == {"text": "ø".encode(), "bytes": b"\xff", "number": b"7"}
    assert (message.topic, message.content_type, message.message_id) == (queue, "text/plain", "m-1")
    assert message.written_at == at


class TestQueues:
    async def test_a_missing_queue_is_an_outage(self, rabbitmq: RabbitMQ) -> None:
        with pytest.raises(Outage, match=r"no queue 'nobody-made-it'.*create the queue with x-single-active-consumer"):
            await opened(RabbitMQSource(rabbitmq.url, queue="nobody-made-it"))

    async def test_a_queue_for_several_readers_is_refused(self, rabbitmq: RabbitMQ, shop: Desk) -> None:
        for kind in ("quorum", "classic"):
            queue = await shop.queue(kind, max_length=100, dead_letter_exchange="")
            with pytest.raises(ConfigError, match="does not keep the order of keys; make queue"):
                await opened(RabbitMQSource(rabbitmq.url, queue=queue))

    async def test_a_stream_is_refused(self, rabbitmq: RabbitMQ, shop: Desk) -> None:
        queue = await shop.queue("stream")
        with pytest.raises(ConfigError, match="is a stream"):
            await opened(RabbitMQSource(rabbitmq.url, queue=queue))

    async def test_a_queue_that_cannot_be_checked_is_read_with_a_warning(
        self, rabbitmq: RabbitMQ, shop: Desk, caplog: pytest.LogCaptureFixture
    ) -> None:
        queue = f"q-{uuid4().hex[:10]}"
        single: dict[str, Any] = {"x-single-active-consumer": True}
        await shop.channel.queue_declare(queue, durable=False, arguments=single)
        await send(shop, queue, b"1")
        reader = await opened(RabbitMQSource(rabbitmq.url, queue=queue))
        await reader.read(1)
        await reader.source.close()
        assert "queue_unchecked" in [each.__dict__.get("action") for each in caplog.records]

    async def test_the_next_process_waits_for_the_end_of_the_first(self, rabbitmq: RabbitMQ, shop: Desk) -> None:
        queue = await shop.queue(single_active_consumer=True)
        await send(shop, queue, *numbers(5))
        first = await opened(RabbitMQSource(rabbitmq.url, queue=queue))
        messages = await first.read(5)
        second = await opened(RabbitMQSource(rabbitmq.url, queue=queue))
        assert not await second.receive(seconds=0.3)
        assert not second.lanes, "a process that waits has no lane"
        first.settle(messages[:2])
        await first.source.close()
        assert [message.body for message in await second.read(3)] == numbers(5)[2:]
        await second.source.close()

    async def test_a_deleted_queue_is_read_again_when_it_is_made(self, rabbitmq: RabbitMQ, shop: Desk) -> None:
        queue = await shop.queue(single_active_consumer=True)
        await send(shop, queue, b"1")
        reader = await opened(RabbitMQSource(rabbitmq.url, queue=queue))
        await reader.read(1)
        await shop.channel.queue_delete(queue)
        await reader.read_until(lambda: bool(reader.gone), "the end of the lane")
        with pytest.raises(Outage, match="no queue"):
            await reader.source.receive(10, 0.1)
        await shop.channel.queue_declare(
            queue, durable=True, arguments={"x-queue-type": "quorum", "x-single-active-consumer": True}
        )
        await send(shop, queue, b"2")
        assert [message.body for message in await reader.read(1)] == [b"2"]
        await reader.source.close()

    async def test_no_more_than_the_prefetch_comes_before_the_first_is_settled(
        self, rabbitmq: RabbitMQ, shop: Desk
    ) -> None:
        queue = await shop.queue(single_active_consumer=True)
        await send(shop, queue, *numbers(10))
        reader = await opened(RabbitMQSource(rabbitmq.url, queue=queue, prefetch=4))
        messages = await reader.read(4)
        assert not await reader.receive(seconds=0.3)
        reader.settle(messages[:1])
        await reader.read(1)
        assert reader.bodies == numbers(5)
        await reader.source.close()


class TestTime:
    async def test_what_is_not_settled_in_time_is_given_back_and_comes_again(
        self, rabbitmq: RabbitMQ, shop: Desk
    ) -> None:
        queue = await shop.queue(single_active_consumer=True)
        await send(shop, queue, *numbers(4))
        reader = await opened(RabbitMQSource(rabbitmq.url, queue=queue, ack_limit="1s"))
        messages = await reader.read(4)
        reader.settle(messages[:1])

        async def finish(lanes: object) -> None:
            reader.settle(messages[:2])

        reader.on_revoke = finish
        await reader.read(2)
        assert reader.bodies == [*numbers(4), b"2", b"3"]
        assert reader.gone == [messages[0].lane]
        await reader.source.close()


class TestOutages:
    @pytest.mark.long
    async def test_killed_and_started_again(self, own_server: OwnServer) -> None:
        server = own_server(RabbitMQ)
        async with desk(server.url) as shop:
            queue = await shop.queue("classic", single_active_consumer=True)
            await send(shop, queue, *numbers(50))
        reader = await opened(RabbitMQSource(server.url, queue=queue))
        reader.settle((await reader.read(20, limit=20))[:10])
        server.kill()
        await reader.read_until(lambda: bool(reader.gone), "the end of the lane")
        before = len(reader.messages)
        with pytest.raises(Outage, match="cannot be reached"):
            await reader.source.receive(10, 0.1)
        await asyncio.to_thread(server.start)
        await reader.read_until(lambda: b"49" in reader.bodies[before:], "the last message")
        again = reader.bodies[before:]
        # Acknowledgements have no answer: a kill may lose the last ones.
        assert again == numbers(50)[int(again[0]) :]
        assert int(again[0]) <= 10
        await reader.source.close()

    async def test_cut_in_the_middle_of_deliveries(self, rabbitmq: RabbitMQ, shop: Desk) -> None:
        queue = await shop.queue(single_active_consumer=True)
        await send(shop, queue, *numbers(200))
        async with Proxy("127.0.0.1", rabbitmq.port) as proxy:
            reader = await opened(RabbitMQSource(f"amqp://127.0.0.1:{proxy.port}", queue=queue, prefetch=50))
            done: list[bytes] = []
            for _ in range(3):
                reader.settle(found := await reader.read(20, limit=20))
                done += [message.body for message in found]
                await proxy.reset()
                await reader.read_until(lambda: not reader.lanes, "the end of the lane")
            while b"199" not in done:
                reader.settle(found := await reader.read(1))
                done += [message.body for message in found]
            await reader.source.close()
        assert list(dict.fromkeys(done)) == numbers(200), "the first deliveries are in order, and none is missing"
