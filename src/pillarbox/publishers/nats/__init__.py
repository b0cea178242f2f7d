"""Events to NATS JetStream: confirmed by their stream, in order per key."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from pillarbox.batch import Batch
from pillarbox.durations import Duration, seconds_of
from pillarbox.envelopes import Envelope, HeaderBuilder, NatsMessage, envelope_named, nats
from pillarbox.errors import ConfigError, MissingExtra, Outage
from pillarbox.event import Event
from pillarbox.finding import Finding
from pillarbox.imports import load_object
from pillarbox.publisher import UNTRIED, Outcome, Publisher, PublisherFeatures, outage
from pillarbox.publishers._link import Link
from pillarbox.tasks import PerLoop
from pillarbox.tls import TLS_OPTIONS

try:
    from pillarbox.publishers.nats.connection import NatsConnection, Server, split_url
    from pillarbox.publishers.nats.messages import subject_problem
    from pillarbox.publishers.nats.sender import Sender, Target, logger
    from pillarbox.publishers.nats.streams import examine_subject
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "nats":
        raise
    raise MissingExtra("NatsPublisher", "nats") from error

__all__ = ["NatsPublisher"]

# The setting for events that all have a subject of their own.
_OWN_SUBJECTS: Final = "*"
_OPTIONS: Final = (
    "subject", "stream", "envelope", "headers", "source", "connections", "stuck", "connect_timeout", *TLS_OPTIONS,
)  # fmt: skip


class NatsPublisher(Publisher):
    """Publishes to the streams of one NATS server or cluster.

    url: ``nats://[user:password@]host[:port][,host...]``, or ``tls`` with TLS. A user without a password is a token.
    subject: for events that have neither a routing key nor a topic; ``*``: each has one, and one without waits.
    stream: the stream that must store all events; default: whichever takes their subject.
    envelope: an envelope, one of ``pillarbox.envelopes.ENVELOPES``, or a function from an event to a NatsMessage.
    headers: the header builder for a named envelope.
    source: the ``source`` attribute of CloudEvents.
    connections: how many, and so how many calls of ``publish`` at once.
    stuck: how long a stream may be silent; then its keys wait, uncharged.
    connect_timeout: how long to wait for a connection.
    cafile: the certificates to trust, for ``tls``; default: the system's.
    certfile: this client's own certificate.
    keyfile: the key of that certificate.
    """

    options = frozenset(_OPTIONS)

    def __init__(
        self,
        url: str,
        *,
        subject: str,
        stream: str = "",
        envelope: str | Envelope | Callable[[Event], NatsMessage] = "raw",
        headers: HeaderBuilder | None = None,
        source: str = "/pillarbox",
        connections: int = 4,
        stuck: Duration = "30s",
        connect_timeout: Duration = "5s",
        cafile: str = "",
        certfile: str = "",
        keyfile: str = "",
    ) -> None:
        if not subject:
            raise ConfigError(
                "give a NATS publisher a subject; write for instance subject=orders for events that have neither a "
                "routing key nor a topic, or subject=* if every event has one"
            )
        if subject != _OWN_SUBJECTS and (problem := subject_problem(subject)) is not None:
            raise ConfigError(f"subject={subject!r} is impossible: {problem}")
        if stream and (set(stream) & set(" .*>/\\\t\r\n") or not stream.isprintable()):
            raise ConfigError(f"stream={stream!r} is not the name of a stream; it has no spaces and none of .*>/\\")
        if connections < 1:
            raise ConfigError(f"connections={connections} leaves nothing to publish with; use 1 or more")
        if isinstance(envelope, str):
            envelope = envelope_named(envelope, headers=headers, source=source)
        elif headers is not None:
            raise ConfigError("headers= goes with a named envelope; give the header builder to your envelope")
        self._server = Server.of(url, cafile=cafile, certfile=certfile, keyfile=keyfile)
        message_of = nats(envelope) if isinstance(envelope, Envelope) else envelope
        self._connections = connections
        self._stuck_seconds = seconds_of("stuck", stuck, "100ms")
        self._connect_seconds = seconds_of("connect_timeout", connect_timeout, "1ms", "1h")
        waiting = Link(self.description, logger)
        self._target = Target("" if subject == _OWN_SUBJECTS else subject, stream, message_of, waiting)
        self._free: asyncio.LifoQueue[Sender] = asyncio.LifoQueue()
        self._senders: list[Sender] = []
        self._is_open = False
        self._was_open = False
        self._changing = PerLoop(asyncio.Lock)

    @classmethod
    def from_url(cls, url: str, **overrides: Any) -> Self:
        """From ``nats://host:4222?subject=orders``; overrides are arguments too."""
        server, given = split_url(url, _OPTIONS)
        return cls(server, **{"subject": "", **_converted(given), **overrides})

    @property
    def features(self) -> PublisherFeatures:
        return PublisherFeatures(calls=self._connections, joint=True, deduplicates=True)

    @property
    def description(self) -> str:
        return self._server.description

    @property
    def default_address(self) -> str:
        return self._target.subject

    @property
    def silence(self) -> str | None:
        return self._target.waiting.silence

    async def open(self) -> None:
        """Connect. A subject that no stream takes does not raise: publishing reports it as an outage."""
        async with self._changing():
            if self._is_open:
                return
            senders = [self._sender() for _ in range(self._connections)]
            # The others connect when they are needed.
            await senders[-1].connect()
            self._senders = senders
            self._free = asyncio.LifoQueue()
            for sender in senders:
                self._free.put_nowait(sender)
            self._is_open = self._was_open = True

    async def examine(self) -> Sequence[Finding]:
        """The stream of the default subject: its limits, its copies and what it drops."""
        if not self._is_open:
            raise Outage(f"{self.description} is not open; call open() first")
        if not self._target.subject:
            return []
        connection = await NatsConnection.connect(self._server, self._connect_seconds)
        try:
            return await examine_subject(connection, self._target.subject, self._target.stream, self._connect_seconds)
        finally:
            await connection.close()

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        """One outcome per event. Waits while the server is silent."""
        if not batch:
            return []
        if not self._is_open:
            outcome = UNTRIED if self._was_open else outage(f"{self.description} is not open; call open() first")
            return [outcome] * len(batch)
        free = self._free
        sender = await free.get()
        try:
            if sender.stop.is_set():  # closed while this call waited for its turn
                return [UNTRIED] * len(batch)
            return await sender.deliver(batch)
        finally:
            free.put_nowait(sender)

    async def close(self) -> None:
        """Disconnect. Messages in flight have a second to be confirmed."""
        async with self._changing():
            self._is_open = False
            for sender in self._senders:
                sender.stop.set()
            while self._senders:
                sender = await self._free.get()
                self._senders.remove(sender)
                await sender.close()

    def _sender(self) -> Sender:
        return Sender(
            self._server, self._target, connect_seconds=self._connect_seconds, stuck_seconds=self._stuck_seconds
        )


def _converted(given: Mapping[str, str]) -> dict[str, Any]:
    """The options of a URL as arguments."""
    arguments: dict[str, Any] = dict(given)
    if "connections" in given:
        if not given["connections"].isdecimal():
            raise ConfigError(
                f"connections={given['connections']!r} in the NATS URL is not a number; write for instance 4"
            )
        arguments["connections"] = int(given["connections"])
    if "headers" in given:
        build = load_object(given["headers"], "a header builder")
        if not callable(build):
            raise ConfigError(
                f"headers={given['headers']} in the NATS URL is not a function from an event to its headers"
            )
        arguments["headers"] = build
    return arguments
