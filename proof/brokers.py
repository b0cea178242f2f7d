"""The brokers of a run: their server, the place for the events of the run, and the log from which they are read."""

import asyncio
import json
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import aiormq
import nats
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from nats.js.api import StreamConfig
from redis import Redis

from proof.deliveries import from_kafka, from_nats, from_pulsar, from_rabbitmq, from_receiver, from_redis
from proof.history import Delivery
from servers import Kafka, KafkaCluster, Nats, Pulsar, RabbitMQ, Receiver, Server, Valkey
from servers.kafka import VERSION as KAFKA_VERSION
from servers.kafka import ProxyPorts
from servers.pulsar import VERSION as PULSAR_VERSION

LARGEST_BYTES: Final = 200_000  # of a message that the broker takes
PROXIES: Final = 4
_NAME: Final = "proof"
_PARTITIONS: Final = 4
_FOR_TRANSACTIONS: Final = {
    # A transaction whose time is over is aborted soon, and not at the next of the broker's rounds of ten seconds.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    # A node that stood still is not taken for dead: there is no other, and without a leader Kafka forgets the ends of
    # transactions.
    "broker.session.timeout.ms": "60000",
}


class Broker(ABC):
    """One broker. Its relays reach it by proxies."""

    name: ClassVar[str]
    is_set: ClassVar[bool] = False  # of several nodes, each with its proxy
    server: Server

    @abstractmethod
    def version(self) -> str:
        """Its name and version, for the card."""

    @abstractmethod
    def proxies(self) -> Sequence[ProxyPorts]:
        """Where each proxy listens (0: anywhere) and leads to."""

    @abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Make the place for the events. Returns what a relay's orders say about it."""

    @abstractmethod
    def deliveries(self) -> list[Delivery]:
        """All that was delivered, in the broker's order."""


def _prepare_kafka(servers: str, copies: int) -> dict[str, Any]:
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 2})
    config = {"max.message.bytes": str(LARGEST_BYTES)}
    topic = NewTopic(_NAME, num_partitions=_PARTITIONS, replication_factor=copies, config=config)
    admin.create_topics([topic])[_NAME].result(30)
    return {"kind": "kafka", "servers": servers, "topic": _NAME}


class KafkaBroker(Broker):
    name = "kafka"

    def __init__(self, *, exactly_once: bool = False) -> None:
        self.server: Kafka = Kafka(proxies=PROXIES, settings=_FOR_TRANSACTIONS if exactly_once else {})

    def version(self) -> str:
        return f"Kafka {KAFKA_VERSION}"

    def proxies(self) -> Sequence[ProxyPorts]:
        return self.server.proxies

    def prepare(self) -> dict[str, Any]:
        return _prepare_kafka(self.server.bootstrap_servers, copies=1)

    def deliveries(self) -> list[Delivery]:
        return from_kafka(self.server.bootstrap_servers, _NAME, _PARTITIONS)


class KafkaSetBroker(Broker):
    """Three nodes, of which one at a time is broken. A relay reaches each node by its proxy."""

    name = "kafka-set"
    is_set = True

    def __init__(self) -> None:
        rounds = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}
        self.server: KafkaCluster = KafkaCluster(settings=rounds, proxies=1)

    def version(self) -> str:
        return f"Kafka {KAFKA_VERSION}, 3 nodes"

    def proxies(self) -> Sequence[ProxyPorts]:
        return [node.proxies[0] for node in self.server.nodes]

    def prepare(self) -> dict[str, Any]:
        return _prepare_kafka(self.server.bootstrap_servers, copies=3)

    def deliveries(self) -> list[Delivery]:
        return from_kafka(self.server.bootstrap_servers, _NAME, _PARTITIONS)


class RabbitMQBroker(Broker):
    """A quorum queue, because a message that it confirmed is on disk."""

    name = "rabbitmq"

    def __init__(self) -> None:
        self.server: RabbitMQ = RabbitMQ()
        self._version = ""

    def version(self) -> str:
        return f"RabbitMQ {self._version}"

    def proxies(self) -> Sequence[ProxyPorts]:
        return [ProxyPorts(0, self.server.port)] * PROXIES

    def prepare(self) -> dict[str, Any]:
        asyncio.run(self._prepare())
        return {
            "kind": self.name,
            "servers": f"127.0.0.1:{self.server.port}",
            "queue": _NAME,
            "max_bytes": LARGEST_BYTES,
        }

    async def _prepare(self) -> None:
        async with aiormq.connect(self.server.url) as connection:
            self._version = str(connection.server_properties["version"])
            channel = await connection.channel()
            await channel.queue_declare(_NAME, durable=True, arguments={"x-queue-type": "quorum"})

    def deliveries(self) -> list[Delivery]:
        return asyncio.run(from_rabbitmq(self.server.url, _NAME))


class NatsBroker(Broker):
    """A stream in files, each of whose messages is synced before it is confirmed."""

    name = "nats"

    def __init__(self) -> None:
        self.server: Nats = Nats()
        self._version = ""

    def version(self) -> str:
        return f"NATS {self._version}"

    def proxies(self) -> Sequence[ProxyPorts]:
        return [ProxyPorts(0, self.server.port)] * PROXIES

    def prepare(self) -> dict[str, Any]:
        asyncio.run(self._prepare())
        return {"kind": self.name, "servers": f"127.0.0.1:{self.server.port}", "subject": _NAME}

    async def _prepare(self) -> None:
        client = await nats.connect(self.server.url)
        server = client.connected_server_version
        self._version = f"{server.major}.{server.minor}.{server.patch}"
        await client.jetstream().add_stream(StreamConfig(name=_NAME, subjects=[_NAME], max_msg_size=LARGEST_BYTES))
        await client.close()

    def deliveries(self) -> list[Delivery]:
        return asyncio.run(from_nats(self.server.url, _NAME))


class RedisBroker(Broker):
    """Valkey, which syncs its append-only file before it confirms."""

    name = "redis"

    def __init__(self) -> None:
        self.server: Valkey = Valkey()
        self._version = ""

    def version(self) -> str:
        return f"Valkey {self._version}"

    def proxies(self) -> Sequence[ProxyPorts]:
        return [ProxyPorts(0, self.server.port)] * PROXIES

    def prepare(self) -> dict[str, Any]:
        with Redis.from_url(self.server.url) as client:
            about: Any = client.info("server")
            self._version = str(about["valkey_version"])
        servers = f"127.0.0.1:{self.server.port}"
        return {"kind": self.name, "servers": servers, "stream": _NAME, "max_bytes": LARGEST_BYTES}

    def deliveries(self) -> list[Delivery]:
        return from_redis(self.server.url, _NAME)


class PulsarBroker(Broker):
    """Brokers tell no publisher their limit of a message, so it is the publisher that refuses the larger ones."""

    name = "pulsar"

    def __init__(self) -> None:
        self.server: Pulsar = Pulsar(proxies=PROXIES)

    def version(self) -> str:
        return f"Pulsar {PULSAR_VERSION}"

    def proxies(self) -> Sequence[ProxyPorts]:
        return self.server.proxies

    def prepare(self) -> dict[str, Any]:
        # Pulsar deletes what no subscription waits for, at the latest when it is restarted.
        self._set(
            "POST", "namespaces/public/default/retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        )
        self._set("PUT", f"persistent/public/default/{_NAME}/partitions", _PARTITIONS)
        servers = f"127.0.0.1:{self.server.port}"
        return {"kind": self.name, "servers": servers, "topic": _NAME, "max_bytes": LARGEST_BYTES}

    def _set(self, method: str, path: str, value: object) -> None:
        address = f"{self.server.admin_url}/admin/v2/{path}"
        request = urllib.request.Request(address, method=method, data=json.dumps(value).encode())
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request, timeout=30).close()

    def deliveries(self) -> list[Delivery]:
        return from_pulsar(self.server.url, _NAME)


class HttpBroker(Broker):
    """A receiver of webhooks, which notes a request before it answers, and refuses what is too large for it."""

    name = "http"

    def __init__(self) -> None:
        self.server: Receiver = Receiver(most_bytes=LARGEST_BYTES)

    def version(self) -> str:
        return "an HTTP receiver"

    def proxies(self) -> Sequence[ProxyPorts]:
        return [ProxyPorts(0, self.server.port)] * PROXIES

    def prepare(self) -> dict[str, Any]:
        return {"kind": self.name, "servers": f"127.0.0.1:{self.server.port}"}

    def deliveries(self) -> list[Delivery]:
        return from_receiver(self.server)


BROKERS: Final = {
    each.name: each
    for each in (KafkaBroker, KafkaSetBroker, RabbitMQBroker, PulsarBroker, NatsBroker, RedisBroker, HttpBroker)
}
HANDLERS: Final = "handlers"
"""In place of a broker: the events go to handlers in the relay."""


def broker_of(name: str, *, exactly_once: bool = False) -> Broker | None:
    """The broker of this name; None: handlers."""
    if name == HANDLERS:
        return None
    if exactly_once and name == KafkaBroker.name:
        return KafkaBroker(exactly_once=True)
    made: Broker = BROKERS[name]()
    return made
