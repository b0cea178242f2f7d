"""RabbitMQ for tests: an operator's connection, and what a relay does with a publisher."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple
from uuid import uuid4

import aiormq

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, Outcome, Result
from pillarbox.publishers.rabbitmq import RabbitMQPublisher


class Found(NamedTuple):
    """One message in a queue."""

    event_id: str
    body: bytes
    properties: Any
    routing_key: str


class Desk:
    """Queues, exchanges and messages of a server, seen without Pillarbox."""

    def __init__(self, channel: aiormq.abc.AbstractChannel) -> None:
        self.channel = channel

    async def queue(self, kind: str = "quorum", **arguments: Any) -> str:
        """A new durable queue. A name of an argument has - in place of _."""
        name = f"q-{uuid4().hex[:10]}"
        given = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
        await self.channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind, **given})
        return name

    async def exchange(self, kind: str = "topic") -> str:
        name = f"e-{uuid4().hex[:10]}"
        await self.channel.exchange_declare(name, exchange_type=kind, durable=True)
        return name

    async def bind(self, queue: str, exchange: str, routing_key: str = "#") -> None:
        await self.channel.queue_bind(queue, exchange, routing_key)

    async def count(self, queue: str) -> int:
        """The messages that wait in a queue."""
        return (await self.channel.queue_declare(queue, passive=True)).message_count or 0

    async def read(self, queue: str) -> list[Found]:
        """Take all messages out of a queue."""
        found = []
        while (got := await self.channel.basic_get(queue, no_ack=True)).delivery.name == "Basic.GetOk":
            properties: Any = got.header.properties
            found.append(Found(properties.message_id, got.body, properties, getattr(got.delivery, "routing_key", "")))
        return found


@asynccontextmanager
async def desk(url: str) -> AsyncIterator[Desk]:
    async with aiormq.connect(url) as connection:
        yield Desk(await connection.channel())


Open = Callable[..., Awaitable[RabbitMQPublisher]]


@asynccontextmanager
async def publishers(default_url: str) -> AsyncIterator[Open]:
    """Opens publishers, and closes them at the end."""
    async with AsyncExitStack() as stack:

        async def make(url: str = default_url, **settings: Any) -> RabbitMQPublisher:
            made = RabbitMQPublisher(url, **settings)
            stack.push_async_callback(made.close)
            await made.open()
            return made

        yield make


async def publish(publisher: RabbitMQPublisher, events: Sequence[Event]) -> list[Outcome]:
    return list(await publisher.publish(Batch.of(events)))


async def publish_rest(publisher: RabbitMQPublisher, events: Sequence[Event]) -> None:
    """Publish until nothing is left, as a relay would. No attempt may be charged."""
    async with asyncio.timeout(60):
        while events:
            outcomes = await publish(publisher, events)
            assert not [each for each in outcomes if each.result is Result.RETRY and each.charged]
            rest = [event for event, each in zip(events, outcomes, strict=True) if each is not PUBLISHED]
            if len(rest) == len(events):
                await asyncio.sleep(0.05)  # nothing tells a client that a real server is ready again
            events = rest


def numbered(keys: int, count: int) -> list[Event]:
    """Events whose payload is their place in their key."""
    return [make_event(key=f"k{key}", payload=b"%d" % n) for n in range(count) for key in range(keys)]


def assert_key_order(events: Sequence[Event], arrived: Sequence[str]) -> None:
    by_id = {str(event.id): event for event in events}
    first: dict[str | None, list[int]] = defaultdict(list)
    for each in dict.fromkeys(arrived):
        first[by_id[each].key].append(int(by_id[each].payload))
    assert set(by_id) == set(arrived), "events are missing"
    assert all(numbers == sorted(numbers) for numbers in first.values()), "a key's events arrived in another order"
