"""The brokers of consumers: their server, the place for the messages, and the log from which they are read."""

import asyncio
import json
import logging
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, Protocol

import aiormq
import pulsar
from aiormq.exceptions import AMQPError, ChannelInvalidStateError
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from pillarbox.pulsar.client import new_client
from pillarbox.pulsar.settings import Login
from proof.brokers import PulsarBroker, RabbitMQBroker
from proof.consumers import feed
from proof.consumers.crew import Restless
from proof.consumers.databases import CONSUMER
from proof.consumers.history import Message
from proof.consumers.worker import Orders
from servers import Kafka, Server
from servers.kafka import VERSION as KAFKA_VERSION
from servers.kafka import ProxyPorts

NAME: Final = "proof"
AWAY: Final = (KafkaException, OSError, TimeoutError, AMQPError, ChannelInvalidStateError, pulsar.PulsarException)
"""What a question raises while the broker is away."""
_AGAIN_SECONDS: Final = 0.2
_SILENT_SECONDS: Final = 5.0
_LOG_SECONDS: Final = 120.0
_TOLD_SECONDS: Final = 6.0  # a quorum queue notes every five seconds how many messages it has


class Group(Protocol):
    """Asks the broker how far the consumers are."""

    def unfinished(self) -> dict[str, int]:
        """By partition: the messages that are not settled, where there are any."""
        ...

    def close(self) -> None: ...


class Broker(ABC):
    """One broker. partitions: how many lanes it has for all consumers together."""

    name: ClassVar[str]
    partitions: ClassVar[int]
    topic: ClassVar[str] = NAME  # or the queue
    server: Server

    @property
    @abstractmethod
    def servers(self) -> str:
        """Its address, without a proxy."""

    def proxies(self) -> Sequence[ProxyPorts]:
        """Where each proxy for consumers listens (0: anywhere) and leads to."""
        return ()

    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def prepare(self) -> None:
        """Make the place for the messages."""

    @abstractmethod
    def writer(self) -> feed.Writer: ...

    @abstractmethod
    def read(self) -> list[Message]:
        """The log, from its beginning to its end."""

    @abstractmethod
    def group(self) -> Group: ...

    def restless(self, orders: Orders) -> Restless | None:
        """A member that joins and leaves all the time; None: it would move nothing."""
        return None


class KafkaTopic(Broker):
    name = "kafka"
    partitions = 12

    def __init__(self) -> None:
        self.server: Kafka = Kafka()

    @property
    def servers(self) -> str:
        return self.server.bootstrap_servers

    def version(self) -> str:
        return f"Kafka {KAFKA_VERSION}"

    def prepare(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 2})
        topic = NewTopic(NAME, num_partitions=self.partitions, replication_factor=1)
        admin.create_topics([topic])[NAME].result(30)

    def writer(self) -> feed.Writer:
        return feed.KafkaWriter(self.servers, NAME)

    def read(self) -> list[Message]:
        return feed.read(self.servers, NAME, self.partitions)

    def group(self) -> Group:
        return feed.Group(self.servers, NAME, self.partitions, CONSUMER)

    def restless(self, orders: Orders) -> Restless | None:
        return Restless(orders)


class RabbitMQQueue(Broker):
    """A quorum queue with a single active consumer. An exchange copies each message into a second queue, which is the
    log: reading the first one empties it."""

    name = "rabbitmq"
    partitions = 1
    topic = f"{NAME}.consumed"

    def __init__(self) -> None:
        logging.getLogger("aiormq").setLevel(logging.ERROR)  # it tells of each connection that a fault has cut
        self._broker = RabbitMQBroker()
        self.server = self._broker.server

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self._broker.server.port}"

    def proxies(self) -> Sequence[ProxyPorts]:
        return self._broker.proxies()

    def version(self) -> str:
        return self._broker.version()

    def prepare(self) -> None:
        self._broker.prepare()  # the log
        asyncio.run(self._prepare())

    async def _prepare(self) -> None:
        async with aiormq.connect(self._broker.server.url) as connection:
            channel = await connection.channel()
            await channel.exchange_declare(NAME, exchange_type="fanout", durable=True)
            single: dict[str, Any] = {"x-queue-type": "quorum", "x-single-active-consumer": True}
            await channel.queue_declare(self.topic, durable=True, arguments=single)
            for queue in (NAME, self.topic):
                await channel.queue_bind(queue, NAME)

    def writer(self) -> feed.Writer:
        return _RabbitMQWriter(self._broker.server.url)

    def read(self) -> list[Message]:
        return asyncio.run(_read_queue(self._broker.server.url))

    def group(self) -> Group:
        return _QueueGroup(self._broker.server, self.topic)


class _RabbitMQWriter:
    """Sends one message after the other until it is confirmed, and so in order."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._connection: Any = None
        self._channel: Any = None

    def send(self, key: str, headers: Mapping[str, str], body: bytes) -> None:
        self._loop.run_until_complete(self._send(key, headers, body))

    async def _send(self, key: str, headers: Mapping[str, str], body: bytes) -> None:
        properties = aiormq.spec.Basic.Properties(headers={**headers, "event_key": key}, delivery_mode=2)
        while True:
            try:
                if self._channel is None:
                    self._connection = await aiormq.connect(self._url)
                    self._channel = await self._connection.channel()
                await self._channel.basic_publish(body, exchange=NAME, properties=properties, mandatory=True)
                return
            except (*AWAY, RuntimeError, asyncio.CancelledError):
                self._channel = None
                if self._connection is not None:
                    with suppress(Exception, asyncio.CancelledError):
                        await self._connection.close(timeout=1)
                await asyncio.sleep(_AGAIN_SECONDS)

    def flush(self, seconds: float) -> int:
        """Every message is confirmed already."""
        if self._connection is not None:
            self._loop.run_until_complete(self._connection.close())
        self._loop.close()
        return 0


async def _read_queue(url: str) -> list[Message]:
    found: list[Message] = []
    is_complete = asyncio.Event()
    async with aiormq.connect(url) as connection:
        channel = await connection.channel()
        count = (await channel.queue_declare(NAME, passive=True)).message_count or 0

        async def take(message: Any) -> None:
            headers = message.header.properties.headers
            found.append(_message(headers, headers["event_key"], 0, len(found)))
            if len(found) == count:
                is_complete.set()

        if count:
            await channel.basic_consume(NAME, take, no_ack=True)
            await asyncio.wait_for(is_complete.wait(), _LOG_SECONDS)
    return found


class _QueueGroup:
    """Counts the messages that are in the queue or unsettled in the hands of a consumer."""

    def __init__(self, server: Any, queue: str) -> None:
        self._server, self._queue = server, queue
        self._empty_since: float | None = None

    def unfinished(self) -> dict[str, int]:
        # A queue tells its clients only how many messages wait for a consumer.
        left = asyncio.run(self._waiting()) or self._server.messages(self._queue)
        now = time.monotonic()
        self._empty_since = None if left else self._empty_since or now
        if self._empty_since is not None and now > self._empty_since + _TOLD_SECONDS:
            return {}
        return {self._queue: left or 1}

    async def _waiting(self) -> int:
        async with aiormq.connect(self._server.url) as connection:
            channel = await connection.channel()
            return (await channel.queue_declare(self._queue, passive=True)).message_count or 0

    def close(self) -> None:
        return


class PulsarTopic(Broker):
    """A partitioned topic with a Key_Shared subscription."""

    name = "pulsar"
    partitions = 4

    def __init__(self) -> None:
        self._broker = PulsarBroker()
        self.server = self._broker.server
        # So that it notices soon that a consumer was stopped.
        self.server.settings["keepAliveIntervalSeconds"] = "2"

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self._broker.server.port}"

    def proxies(self) -> Sequence[ProxyPorts]:
        return self._broker.proxies()

    def version(self) -> str:
        return self._broker.version()

    def prepare(self) -> None:
        self._broker.prepare()

    def writer(self) -> feed.Writer:
        return _PulsarWriter(self.servers)

    def read(self) -> list[Message]:
        client = new_client(Login(self.servers), 30.0)
        found: list[Message] = []
        for partition, name in enumerate(client.get_topic_partitions(NAME)):
            reader = client.create_reader(name, pulsar.MessageId.earliest)
            offset = 0
            while reader.has_message_available():
                message = reader.read_next(30_000)
                found.append(_message(message.properties(), message.partition_key(), partition, offset))
                offset += 1
        client.close()
        return found

    def group(self) -> Group:
        return _Subscription(self._broker.server.admin_url, self.partitions)

    def restless(self, orders: Orders) -> Restless | None:
        return _RestlessReader(orders)


class _PulsarWriter:
    """Sends a few messages at once. Those without an answer are sent again, in order, by a new client."""

    _GROUP: Final = 16

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._client: Any = None
        self._producer: Any = None
        self._left: list[tuple[str, Mapping[str, str], bytes]] = []
        self._answers: list[bool] = []
        self._changed = threading.Event()

    def send(self, key: str, headers: Mapping[str, str], body: bytes) -> None:
        self._left.append((key, headers, body))
        if self._client is not None and not self._post(self._left[-1]):
            self._drop()
        if len(self._left) >= self._GROUP:
            self._finish()

    def flush(self, seconds: float) -> int:
        self._finish()
        self._drop()
        return 0

    def _finish(self) -> None:
        """Wait until all are stored."""
        while True:
            if self._client is None and not self._connect():
                time.sleep(_AGAIN_SECONDS)
                continue
            until = time.monotonic() + _SILENT_SECONDS
            while len(self._answers) < len(self._left) and time.monotonic() < until:
                self._changed.wait(0.05)
                self._changed.clear()
            # Answers come in the order of the messages of a key, but not of all.
            if len(self._answers) == len(self._left) and all(self._answers):
                self._left.clear()
                self._answers.clear()
                return
            self._drop()

    def _connect(self) -> bool:
        self._answers = []
        self._client = new_client(Login(self._servers), 2.0)
        try:
            self._producer = self._client.create_producer(
                NAME, batching_enabled=True, batching_type=pulsar.BatchingType.KeyBased,
                batching_max_publish_delay_ms=100, send_timeout_millis=0, max_pending_messages=0,
                initial_sequence_id=1,
            )  # fmt: skip
        except pulsar.PulsarException:
            self._drop()
            return False
        if not all(map(self._post, self._left)):
            self._drop()
            return False
        return True

    def _post(self, message: tuple[str, Mapping[str, str], bytes]) -> bool:
        key, headers, body = message
        answers, changed = self._answers, self._changed

        def answered(result: Any, _identity: Any) -> None:
            answers.append(result.name == "Ok")
            changed.set()

        try:
            self._producer.send_async(body, answered, properties=dict(headers), partition_key=key)
        except pulsar.PulsarException:
            return False
        return True

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(pulsar.PulsarException):
                client.close()


class _Subscription:
    def __init__(self, admin_url: str, partitions: int) -> None:
        self._url, self._partitions = admin_url, partitions

    def unfinished(self) -> dict[str, int]:
        found = {}
        for number in range(self._partitions):
            path = f"persistent/public/default/{NAME}-partition-{number}/stats?getPreciseBacklog=true"
            with urllib.request.urlopen(f"{self._url}/admin/v2/{path}", timeout=10) as answer:
                left = json.load(answer)["subscriptions"].get(CONSUMER, {"msgBacklog": 1})["msgBacklog"]
            if left:
                found[str(number)] = int(left)
        return found

    def close(self) -> None:
        return


class _RestlessReader(Restless):
    """The same for a Key_Shared subscription: it gets messages and settles none."""

    def visit(self) -> None:
        client = new_client(Login(self._servers), 2.0)
        try:
            client.subscribe(self._topic, CONSUMER, consumer_type=pulsar.ConsumerType.KeyShared)
            self.joined += 1
            self.rest()
        except pulsar.PulsarException:  # the broker is away, as the run wants it
            self.rest()
        finally:
            with suppress(pulsar.PulsarException):
                client.close()


def _message(headers: Mapping[str, Any], key: str, partition: int, offset: int) -> Message:
    return Message(str(headers["event_id"]), key, int(headers["n"]), str(headers["fate"]), partition, offset)


BROKERS: Final[Mapping[str, type[Broker]]] = {each.name: each for each in (KafkaTopic, RabbitMQQueue, PulsarTopic)}
