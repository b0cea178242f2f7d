"""One relay of a run, in a process of its own: the real one, with an observer that writes a trace.

Its orders come as JSON. Lines on standard input tell it at which point to kill itself.
"""

import asyncio
import faulthandler
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pillarbox import Handlers
from pillarbox.batch import Batch
from pillarbox.publisher import Needs, Outcome, Publisher, PublisherFeatures, outage
from pillarbox.relay import Fixed, OnDead, Relay, Stream
from pillarbox.tasks import ended
from pillarbox.urls import store_from_url
from proof.consumer import consumer
from proof.content import QUEUE, STREAM
from proof.databases import kind_of
from proof.history import Log, Trace
from proof.planted import plant
from proof.scraper import Scraper
from proof.tracer import Points, Steps, Tracer


@dataclass(slots=True)
class Orders:
    """The settings of one relay."""

    name: str
    folder: str
    database: str  # the name of its kind
    store: str  # its URL
    broker: dict[str, Any]
    lease_seconds: float = 4.0
    max_attempts: int = 3
    on_dead: str = "skip"
    slots: int = 4
    batch: int = 500
    prune_seconds: float = 5.0
    keep_seconds: float = 20.0
    planted: str | None = None
    delivery: Literal["at-least-once", "exactly-once"] = "at-least-once"
    transaction_seconds: float = 4.0  # a transaction of a relay that died ends after this time

    @property
    def exactly_once(self) -> bool:
        return self.delivery == "exactly-once"


class Door(Publisher):
    """Handlers that cannot be reached while a file exists."""

    def __init__(self, handlers: Handlers, shut: Path) -> None:
        self._handlers = handlers
        self._shut = shut

    @property
    def features(self) -> PublisherFeatures:
        # These handlers are all quick, so that shards can share turns.
        return replace(self._handlers.features, joint=True)

    @property
    def description(self) -> str:
        return self._handlers.description

    def prepared(self, needs: Needs) -> "Door":
        # The same object, which a planted bug may have changed; it serves one stream only.
        self._handlers = self._handlers.prepared(needs)
        return self

    async def open(self) -> None:
        await self._handlers.open()

    async def close(self) -> None:
        await self._handlers.close()

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        if self._shut.exists():
            return [outage("the door is shut")] * len(batch)
        return await self._handlers.publish(batch)


def _publishers(orders: Orders) -> tuple[Any, Any]:
    """One for each stream."""
    if orders.broker["kind"] == "handlers":
        database = kind_of(orders.database)(Path(orders.folder), orders.store)
        handlers = consumer(database, Path(orders.broker["ledger"]), orders.broker["seed"])
        shut = Path(orders.broker["shut"])
        return Door(handlers, shut), Door(handlers, shut)
    publishers = {
        "kafka": _kafka,
        "rabbitmq": _rabbitmq,
        "pulsar": _pulsar,
        "nats": _nats,
        "redis": _redis,
        "http": _http,
    }
    publisher = publishers[orders.broker["kind"]]
    return publisher(orders), publisher(orders)


def _kafka(orders: Orders) -> Any:
    from pillarbox.publishers.kafka import KafkaPublisher  # a relay without Kafka starts sooner

    return KafkaPublisher(
        servers=orders.broker["servers"],
        topic=orders.broker["topic"],
        strict_keys=orders.on_dead != "skip",
        delivery=orders.delivery,
        properties={"transaction.timeout.ms": round(orders.transaction_seconds * 1000)} if orders.exactly_once else {},
    )


def _pulsar(orders: Orders) -> Any:
    from pillarbox.publishers.pulsar import PulsarPublisher

    return PulsarPublisher(
        servers=orders.broker["servers"],
        topic=orders.broker["topic"],
        max_message_bytes=orders.broker["max_bytes"],
    )


def _nats(orders: Orders) -> Any:
    from pillarbox.publishers.nats import NatsPublisher

    broker = orders.broker
    return NatsPublisher(f"nats://{broker['servers']}", subject=broker["subject"], stuck="5s", connect_timeout="2s")


def _redis(orders: Orders) -> Any:
    from pillarbox.publishers.redis import RedisPublisher

    broker = orders.broker
    return RedisPublisher(
        f"redis://{broker['servers']}",
        stream=broker["stream"],
        max_bytes=broker["max_bytes"],
        stuck="5s",
        connect_timeout="2s",
    )


def _rabbitmq(orders: Orders) -> Any:
    from pillarbox.publishers.rabbitmq import RabbitMQPublisher

    return RabbitMQPublisher(
        f"amqp://{orders.broker['servers']}",
        queue=orders.broker["queue"],
        max_bytes=orders.broker["max_bytes"],
        stuck="5s",
        connect_timeout="2s",
    )


def _http(orders: Orders) -> Any:
    from pillarbox.publishers.http import HttpPublisher

    return HttpPublisher(
        f"http://{orders.broker['servers']}/", secret=f"whsec_{'YWJj' * 8}", timeout="5s", connect_timeout="2s"
    )


def main() -> None:
    orders = Orders(**json.loads(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    log = Log(Path(orders.folder) / f"trace-{orders.name}.jsonl")
    store = store_from_url(orders.store)
    to, queue_to = _publishers(orders)
    plant(orders.planted, store, to)
    limits: dict[str, Any] = {
        "retry": Fixed(0.3),
        "max_attempts": orders.max_attempts,
        "lease": orders.lease_seconds,
        "poll_limit": 0.5,
    }
    streams = [Stream(STREAM, to, slots=orders.slots, batch=orders.batch, on_dead=OnDead(orders.on_dead), **limits)]
    if not orders.exactly_once:  # a queue has copies
        streams.append(Stream(QUEUE, queue_to, mode="queue", **limits))
    points = Points()
    protocol = logging.getLogger("pillarbox.publishers.kafka")
    protocol.setLevel(logging.DEBUG)
    protocol.addHandler(Steps(points))
    scraper = Scraper(Path(orders.folder), orders.name)
    relay = Relay(
        store,
        streams,
        observers=[Tracer(log, orders.name, points), scraper.observer],
        prune_every=orders.prune_seconds,
        keep_published=orders.keep_seconds,
        grace=10.0,
    )
    relay.name = orders.name  # the same name in traces and leases; the harness makes it unique
    log.write(Trace(time.monotonic(), orders.name, "start"))
    asyncio.run(_run(relay, scraper))
    scraper.scrape()
    log.write(Trace(time.monotonic(), orders.name, "stop"))


async def _run(relay: Relay, scraper: Scraper) -> None:
    """Run the relay. SIGUSR1 and SIGUSR2 print its threads and tasks, to see why it does not end."""
    loop = asyncio.get_running_loop()
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def tasks(*_: Any) -> None:
        for task in asyncio.all_tasks(loop):
            task.print_stack(file=sys.stderr)

    signal.signal(signal.SIGUSR2, tasks)
    scraping = asyncio.create_task(scraper.run())
    await relay.run()
    await ended(scraping)


def as_argument(orders: Orders) -> str:
    return json.dumps(asdict(orders))


if __name__ == "__main__":
    main()
