"""Events to Pulsar: confirmed when they are stored, in order per key."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, Self, Unpack

from pillarbox.batch import Batch
from pillarbox.durations import Duration, seconds_of
from pillarbox.envelopes import Envelope, HeaderBuilder, envelope_named, pulsar
from pillarbox.errors import ConfigError, MissingExtra, Outage
from pillarbox.finding import Finding, failed, ok
from pillarbox.hints import hint
from pillarbox.publisher import UNTRIED, Outcome, Publisher, PublisherFeatures, outage
from pillarbox.publishers._link import Link
from pillarbox.publishers._senders import Senders
from pillarbox.publishers.pulsar.hashing import HASHES
from pillarbox.pulsar.settings import (
    PUBLISHER_OPTIONS,
    LoginOptions,
    login_of,
    namespace_of,
    parse_url,
)
from pillarbox.tasks import PerLoop

try:
    from pillarbox.publishers.pulsar.routes import Partitions, Settings
    from pillarbox.publishers.pulsar.sender import AwayError, NoAccessError, Sender
    from pillarbox.pulsar.client import BATCHINGS, COMPRESSIONS
except ModuleNotFoundError as error:
    if error.name not in ("pulsar", "_pulsar"):
        raise
    raise MissingExtra("PulsarPublisher", "pulsar") from error

logger = logging.getLogger("pillarbox.publishers.pulsar")

# The setting for events that all have a topic of their own.
_OWN_TOPICS: Final = "*"
_FIRST_BATCH: Final = 2000
_LEAST_MESSAGE_BYTES: Final = 10_000


class PulsarPublisher(Publisher):
    """Publishes to one Pulsar cluster.

    servers: ``host:port``, several with commas.
    topic: for events without one of their own; ``*``: each has one, and one without waits. A name, or with its
    namespace: ``tenant/namespace/orders``.
    namespace: of topics that are given by name alone.
    envelope: an envelope, or one of the names of ``pillarbox.envelopes.ENVELOPES``.
    headers: the header builder for a named envelope.
    source: the ``source`` attribute of CloudEvents.
    batching: ``key``: each batch has one key, as consumers of a Key_Shared subscription need; ``plain``: cheaper with
    many keys, for consumers of the other kinds.
    hash: ``java`` or ``murmur3``: how other producers of the topic choose the partition of a key.
    compression: ``none``, ``lz4``, ``zlib``, ``zstd`` or ``snappy``.
    max_message_bytes: ``maxMessageSize`` of the brokers or of the topics, whichever is smaller.
    producers: how many connections, and so how many calls of ``publish`` at once.
    stuck: how long a partition may be silent before the cluster is asked about it.
    connect_timeout: the longest time of a question to the cluster.
    login: TLS and credentials; see LoginOptions.
    """

    options = frozenset(PUBLISHER_OPTIONS)

    def __init__(
        self,
        *,
        servers: str | Sequence[str],
        topic: str = "",
        namespace: str = "public/default",
        envelope: str | Envelope = "raw",
        headers: HeaderBuilder | None = None,
        source: str = "/pillarbox",
        batching: str = "key",
        hash: str = "java",
        compression: str = "none",
        max_message_bytes: int = 5 * 1024 * 1024,
        producers: int = 4,
        stuck: Duration = "30s",
        connect_timeout: Duration = "5s",
        **login: Unpack[LoginOptions],
    ) -> None:
        self._login = login_of(servers, login)
        if not topic:
            raise ConfigError(
                "no Pulsar topic is given; write for instance topic=orders for events that have no topic of their own, "
                "or topic=* if every event has one"
            )
        for name, value, known in (
            ("batching", batching, BATCHINGS),
            ("hash", hash, HASHES),
            ("compression", compression, COMPRESSIONS),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r} is unknown; {hint(value, list(known))}")
        if producers < 1:
            raise ConfigError(f"producers={producers} leaves nothing to publish with; use 1 or more")
        if max_message_bytes < _LEAST_MESSAGE_BYTES:
            raise ConfigError(f"max_message_bytes={max_message_bytes} is little; use {_LEAST_MESSAGE_BYTES} or more")
        if isinstance(envelope, str):
            envelope = envelope_named(envelope, headers=headers, source=source)
        elif headers is not None:
            raise ConfigError("headers= goes with a named envelope; give the header builder to your envelope")
        self._message_of = pulsar(envelope)
        self._topic = "" if topic == _OWN_TOPICS else topic
        self._namespace = namespace_of(namespace)
        self._producers = producers
        self._stuck_seconds = seconds_of("stuck", stuck, "100ms")
        connect_seconds = seconds_of("connect_timeout", connect_timeout, "1s", "1h")
        self._settings = Settings(self._login, connect_seconds, batching, compression, hash, max_message_bytes)
        self._link = Link(self.description, logger)
        self._senders: Senders | None = None
        self._was_open = False
        self._changing = PerLoop(asyncio.Lock)

    @classmethod
    def from_url(cls, url: str, **overrides: Any) -> Self:
        """From ``pulsar://host:6650/tenant/namespace?topic=orders``; ``pulsar+ssl://`` uses TLS. Overrides are
        arguments too."""
        return cls(**{**parse_url(url, PUBLISHER_OPTIONS), **overrides})

    @property
    def features(self) -> PublisherFeatures:
        # The client itself refuses what can never be written, before anything later of its key is sent.
        return PublisherFeatures(calls=self._producers, first_batch=_FIRST_BATCH, joint=True)

    @property
    def description(self) -> str:
        return self._login.description

    @property
    def default_address(self) -> str:
        return self._topic

    @property
    def silence(self) -> str | None:
        return self._link.silence

    async def open(self) -> None:
        """Connect. A missing default topic does not raise: publishing reports it as an outage."""
        async with self._changing():
            if self._senders is None:
                self._senders = Senders(await asyncio.to_thread(self._connect), "pulsar")
                self._was_open = True

    async def examine(self) -> Sequence[Finding]:
        """The default topic: whether it can be written. The brokers tell a client nothing of copies."""
        if self._senders is None:
            raise Outage(f"{self.description} is not open; call open() first")
        if not self._topic:
            return []
        refusal = await asyncio.to_thread(self._ask)
        name = self._namespace.topic(self._topic)
        if refusal is not None:
            return [failed("address", str(refusal.error), "see the sentence")]
        said = f"a message has at most {self._settings.max_message_bytes:,} bytes"
        return [ok("address", f"topic {name!r} can be written"), ok("limits", said)]

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

    def _connect(self) -> list[Sender]:
        partitions = Partitions(self.description)
        senders = [self._sender(partitions, self._link) for _ in range(self._producers)]
        try:
            for sender in senders if self._topic else ():
                sender.connect()
        except (AwayError, NoAccessError) as error:
            for sender in senders:
                sender.close()
            raise self._outage(error) from error
        return senders

    def _ask(self) -> Outcome | None:
        """Why the default topic cannot be written; None: it can be."""
        sender = self._sender(Partitions(self.description), Link(self.description, logger))
        try:
            return sender.connect()
        except (AwayError, NoAccessError) as error:
            raise self._outage(error) from error
        finally:
            sender.close()

    def _sender(self, partitions: Partitions, link: Link) -> Sender:
        return Sender(
            settings=self._settings,
            namespace=self._namespace,
            partitions=partitions,
            link=link,
            message_of=self._message_of,
            default_topic=self._topic,
            stuck_seconds=self._stuck_seconds,
        )

    def _outage(self, error: Exception) -> Outage:
        # The client reports a refused login or certificate as a broker that does not answer.
        return Outage(
            f"{self.description} cannot be reached ({error}); the relay tries again. "
            "If a broker listens there, check the credentials and certificates"
        )
