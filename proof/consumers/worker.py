"""One consumer of a run, in a process of its own: the real one."""

import asyncio
import logging
import os
import random
import sys
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from pillarbox import Event, Handlers, Inbox, Reject
from pillarbox.consumer import Consumer, services
from pillarbox.relay import Fixed
from pillarbox.source import Source
from pillarbox.sources.kafka import KafkaSource
from proof.consumers.databases import CONSUMER, handle_of, write_effect
from proof.consumers.feed import TYPE
from proof.consumers.planted import plant

SESSION_SECONDS: Final = 2.0
# Of a replay. A run cannot wait for the five minutes of a real consumer.
LEASE_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 0.7
_COPIED: Final = 10  # one call of so many comes as two at once
_SLOW: Final = 0.02  # of calls


@dataclass(slots=True)
class Orders:
    """The settings of one consumer."""

    name: str
    store: str  # the name of its kind
    url: str
    servers: str
    topic: str
    seed: int
    protocol: str = "classic"
    planted: str | None = None
    broker: str = "kafka"


def handlers_of(orders: Orders) -> Handlers:
    chance = random.Random(f"{orders.seed} {orders.name}")
    calls = count()
    handlers = Handlers(concurrency=16)

    @Inbox(CONSUMER).once(handle_of(orders.store, orders.url))
    async def apply(event: Event, tx: Any) -> None:
        # A slow handler holds the row of the inbox and nothing else: any other row would make a second owner wait,
        # and hide an inbox that does not.
        await asyncio.sleep(chance.uniform(0.1, 0.6) if chance.random() < _SLOW else chance.uniform(0.0, 0.003))
        await write_effect(orders.store, tx, event)
        # After the effect, which a rollback has to take back.
        fate = event.headers["fate"]
        if fate == "reject":
            raise Reject("always rejected")
        if fate == "flaky" and event.attempts == 0:
            raise RuntimeError("fails once")

    @handlers.on(TYPE)
    async def handle(event: Event) -> None:
        copies = 2 if next(calls) % _COPIED == 0 else 1
        ended = await asyncio.gather(*(apply(event) for _ in range(copies)), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    return handlers


def source_of(orders: Orders) -> Source:
    if orders.broker == "rabbitmq":
        from pillarbox.sources.rabbitmq import RabbitMQSource

        return RabbitMQSource(f"amqp://{orders.servers}", queue=orders.topic, prefetch=200, connect_timeout="2s")
    if orders.broker == "pulsar":
        from pillarbox.sources.pulsar import PulsarSource

        return PulsarSource(servers=orders.servers, topic=orders.topic, connect_timeout="2s")
    properties: dict[str, Any] = {"group.protocol": orders.protocol}
    if orders.protocol == "classic":
        properties |= {"session.timeout.ms": int(SESSION_SECONDS * 1000), "heartbeat.interval.ms": 300}
    return KafkaSource(servers=orders.servers, topic=orders.topic, properties=properties)


def consumer_of(orders: Orders) -> Consumer:
    return Consumer(
        CONSUMER,
        source_of(orders),
        to=handlers_of(orders),
        store=orders.url,
        retry=Fixed(_RETRY_SECONDS),
        replay_every="500ms",
        grace="10s",
        worker=orders.name,
    )


def run(orders: Orders, log: str) -> None:
    """Run the consumer until it is asked to stop. Its output goes into the file ``log``."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    consumer = consumer_of(orders)
    services._LEASE_SECONDS, services._WORK_SECONDS = LEASE_SECONDS, LEASE_SECONDS / 2  # type: ignore[misc]
    plant(orders.planted, consumer)
    asyncio.run(consumer.run())
