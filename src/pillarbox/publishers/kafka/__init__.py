"""Events to Kafka: idempotent, confirmed by all in-sync replicas, in order per key."""

import asyncio
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from pillarbox.batch import Batch
from pillarbox.durations import Duration, seconds_of
from pillarbox.envelopes import Envelope, HeaderBuilder, Message, envelope_named, kafka
from pillarbox.errors import ConfigError, MissingExtra, Outage
from pillarbox.event import Event
from pillarbox.finding import Finding
from pillarbox.kafka.settings import QUIET, check_topic, servers_of
from pillarbox.publisher import UNTRIED, Needs, Outcome, Place, Publisher, PublisherFeatures, outage
from pillarbox.publishers._link import Link
from pillarbox.publishers._senders import Senders
from pillarbox.publishers.kafka.settings import OPTIONS, Delivery, check_delivery, check_properties, parse_url
from pillarbox.tasks import PerLoop

try:
    from pillarbox.publishers.kafka.client import Client
    from pillarbox.publishers.kafka.coordinator import examine_transactions
    from pillarbox.publishers.kafka.examined import examine_topic
    from pillarbox.publishers.kafka.progress import ProgressTopics
    from pillarbox.publishers.kafka.sender import Sender
    from pillarbox.publishers.kafka.shards import ShardProducers
    from pillarbox.publishers.kafka.topics import Topics, UnreachableError
    from pillarbox.publishers.kafka.transactions import ShardProducer
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("confluent_kafka"):
        raise
    raise MissingExtra("KafkaPublisher", "kafka") from error

logger = logging.getLogger("pillarbox.publishers.kafka")

_PROMISES: Final = {
    "acks": "all",
    "enable.idempotence": True,
    # An event that timed out here could still be written later, as a copy and out of order.
    "message.timeout.ms": 0,
    "partitioner": "murmur2_random",
    # The end of a batch is known and flushes; lingering only keeps its records together.
    "linger.ms": 50,
    "topic.metadata.propagation.max.ms": 10_000,
}
# A record that is late ends its transaction, and the client wants its limits to agree.
_IN_TRANSACTIONS: Final = {
    **{name: value for name, value in _PROMISES.items() if name != "message.timeout.ms"},
    "transaction.timeout.ms": 15_000,
}
# The setting for events that all have a topic of their own.
_OWN_TOPICS: Final = "*"
# A cluster confirms so many as fast as a few, so a stop need not wait long for them.
_FIRST_BATCH: Final = 2000
# The client that asks about topics must not take part in the idempotent protocol.
_PRODUCER_ONLY: Final = (
    "compression.",
    "batch.",
    "linger.",
    "queue.",
    "partitioner",
    "sticky.",
    "max.in.flight",
    "transaction.",
)


class KafkaPublisher(Publisher):
    """Publishes to one Kafka cluster.

    servers: ``host:port``, several with commas.
    topic: for events without one of their own; ``*``: each has one, and one without waits.
    properties: of librdkafka, passed on; one that would break a promise raises ConfigError.
    envelope: an envelope, one of the names of ``pillarbox.envelopes.ENVELOPES``, or a function Event -> Message.
    headers: the header builder for a named envelope.
    source: the ``source`` attribute of CloudEvents.
    producers: how many, and so how many calls of ``publish`` at once.
    strict_keys: one record per key at a time, which is slower. A stream that blocks or parks keys always has it.
    Without it, too, nothing follows a refused event of its key, as long as the brokers check sequence numbers.
    stuck: how long a partition may be silent while others confirm; then its keys wait, uncharged.
    connect_timeout: how long ``open`` waits for a broker.
    delivery: ``exactly-once`` publishes in transactions, with the progress of each shard; consumers then read with
    ``isolation.level=read_committed``. It needs an ordered stream, and a store with transactions.
    """

    options = frozenset({*OPTIONS, "properties"})

    def __init__(
        self,
        *,
        servers: str | Sequence[str],
        topic: str = "",
        properties: Mapping[str, Any] | None = None,
        envelope: str | Envelope | Callable[[Event], Message] = "raw",
        headers: HeaderBuilder | None = None,
        source: str = "/pillarbox",
        producers: int = 4,
        strict_keys: bool = False,
        stuck: Duration = "30s",
        connect_timeout: Duration = "5s",
        delivery: Delivery = "at-least-once",
    ) -> None:
        self._servers = servers_of(servers)
        if not topic:
            raise ConfigError(
                "no Kafka topic is given; write for instance topic=orders for events that have no topic of their own, "
                "or topic=* if every event has one"
            )
        if topic != _OWN_TOPICS:
            check_topic(topic)
        if producers < 1:
            raise ConfigError(f"producers={producers} leaves nothing to publish with; use 1 or more")
        check_properties(properties or {})
        check_delivery(delivery)
        self._exactly_once = delivery == "exactly-once"
        if isinstance(envelope, str):
            envelope = envelope_named(envelope, headers=headers, source=source)
        elif headers is not None:
            raise ConfigError("headers= goes with a named envelope; give the header builder to your envelope")
        self._message_of = kafka(envelope) if isinstance(envelope, Envelope) else envelope
        given = dict(properties or {})
        self._topic = "" if topic == _OWN_TOPICS else topic
        self._producers = producers
        self._strict_keys = strict_keys
        self._stuck_seconds = seconds_of("stuck", stuck, "100ms")
        self._connect_seconds = seconds_of("connect_timeout", connect_timeout, "1ms", "1h")
        base = {"bootstrap.servers": self._servers}
        promises = _IN_TRANSACTIONS if self._exactly_once else _PROMISES
        self._producer_config = {**QUIET, **promises, **given, **base}
        self._admin_config = {
            **QUIET,
            **{name: value for name, value in given.items() if not name.startswith(_PRODUCER_ONLY)},
            **base,
        }
        self._link = Link(self.description, logger)
        self._start_closed()

    def _start_closed(self) -> None:
        self._senders: Senders | ShardProducers | None = None
        self._topics: Topics | None = None
        self._was_open = False
        self._changing = PerLoop(asyncio.Lock)

    @classmethod
    def from_url(cls, url: str, **overrides: Any) -> Self:
        """From ``kafka://host:9092,host2:9092?topic=orders&linger.ms=5``; overrides are arguments too."""
        arguments = parse_url(url)
        properties = {**arguments.pop("properties"), **(overrides.pop("properties", None) or {})}
        return cls(**{**arguments, "properties": properties, **overrides})

    def prepared(self, needs: Needs) -> Self:
        """With strict keys where the stream needs them. Another stream may share this object, so a copy gets them."""
        if self._strict_keys or not needs.strict_keys:
            return self
        strict = copy.copy(self)
        strict._strict_keys = True
        strict._link = Link(self.description, logger)
        strict._start_closed()
        return strict

    @property
    def features(self) -> PublisherFeatures:
        # Also without one record per key: brokers refuse records after a gap in the sequence numbers, and the
        # gapless guarantee ends the producer there.
        return PublisherFeatures(
            calls=self._producers,
            first_batch=_FIRST_BATCH,
            joint=not self._exactly_once,
            exactly_once=self._exactly_once,
        )

    @property
    def description(self) -> str:
        return f"kafka {self._servers}" + (" exactly once" if self._exactly_once else "")

    @property
    def default_address(self) -> str:
        return self._topic

    @property
    def silence(self) -> str | None:
        return self._link.silence

    async def open(self) -> None:
        """Connect. A missing default topic does not raise: publishing reports it as an outage."""
        async with self._changing():
            if self._senders is not None:
                return
            topics, there = await asyncio.to_thread(self._connect)
            try:
                if self._exactly_once:
                    self._senders = self._shard_producers(topics)
                else:
                    self._senders = Senders(await asyncio.to_thread(self._make_senders, topics, there), "kafka")
            except BaseException:
                topics.close()
                raise
            self._topics, self._was_open = topics, True

    async def recover(self, place: Place) -> bytes:
        if not isinstance(self._senders, ShardProducers):
            raise Outage(f"{self.description} is not open; call open() first")
        return await self._senders.recover(place)

    def leave(self, place: Place) -> None:
        if isinstance(self._senders, ShardProducers):
            self._senders.leave(place)

    async def examine(self) -> Sequence[Finding]:
        """The default topic: whether it exists, its limits, its replicas."""
        if self._topics is None:
            raise Outage(f"{self.description} is not open; call open() first")
        found: list[Finding] = []
        try:
            if self._topic:
                found += await asyncio.to_thread(examine_topic, self._topics, self._topic)
            if self._exactly_once:
                found.append(await asyncio.to_thread(examine_transactions, self._topics.admin))
            return found
        except UnreachableError as error:
            raise Outage(f"{self.description} cannot be reached: {error}") from error

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        """One outcome per event. Waits while no broker answers."""
        if not batch:
            return []
        if self._senders is None:
            outcome = UNTRIED if self._was_open else outage(f"{self.description} is not open; call open() first")
            return [outcome] * len(batch)
        return await self._senders.deliver(batch)

    async def close(self) -> None:
        """Disconnect. Messages in flight have a second to be confirmed."""
        async with self._changing():
            if self._senders is not None:
                await self._senders.close()
                self._senders = None
            if self._topics is not None:
                self._topics.close()
                self._topics = None

    def _connect(self) -> tuple[Topics, bool]:
        """The topics, and whether the default one is there."""
        # Only to find wrong properties, also while no broker answers.
        Client(self._producer_config, (0, 0))
        topics = Topics(self._admin_config, self.description)
        try:
            topics.connect(self._connect_seconds)
            # Before the producers are made: their batch size depends on the topic's limit.
            default = topics.get([self._topic])[self._topic] if self._topic else None
        except UnreachableError as error:
            raise Outage(f"{self.description} cannot be reached: {error}; the relay tries again") from error
        if self._exactly_once and default is not None and default.compacted:
            raise ConfigError(
                f"topic {self._topic!r} is compacted and forgets events; delivery=exactly-once needs a topic with "
                "cleanup.policy=delete"
            )
        return topics, default is not None and default.problem is None

    def _make_senders(self, topics: Topics, there: bool) -> list[Sender]:
        senders = [
            Sender(
                config=self._producer_config,
                topics=topics,
                link=self._link,
                message_of=self._message_of,
                default_topic=self._topic,
                strict_keys=self._strict_keys,
                stuck_seconds=self._stuck_seconds,
            )
            for _ in range(self._producers)
        ]
        if there:
            for sender in senders:
                sender.connect()
        return senders

    def _shard_producers(self, topics: Topics) -> ShardProducers:
        progress = ProgressTopics(self._admin_config, topics, self.description, self._topic)

        def make(place: Place) -> ShardProducer:
            return ShardProducer(
                place,
                config=self._producer_config,
                topics=topics,
                link=self._link,
                progress=progress,
                message_of=self._message_of,
                default_topic=self._topic,
            )

        return ShardProducers(make, self._producers)
