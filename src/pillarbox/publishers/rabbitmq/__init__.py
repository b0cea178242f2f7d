"""Events to RabbitMQ: persistent, mandatory, confirmed, in order per key."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from pillarbox.batch import Batch
from pillarbox.durations import Duration, seconds_of
from pillarbox.envelopes import Envelope, HeaderBuilder, RabbitMQMessage, envelope_named, rabbitmq
from pillarbox.errors import ConfigError, MissingExtra, Outage
from pillarbox.event import Event
from pillarbox.finding import Finding, ok
from pillarbox.imports import load_object
from pillarbox.publisher import UNTRIED, Outcome, Publisher, PublisherFeatures, outage
from pillarbox.publishers._link import Link
from pillarbox.tasks import PerLoop
from pillarbox.tls import TLS_OPTIONS, reason_of

try:
    from aiormq.exceptions import AMQPError

    from pillarbox.amqp import AmqpConnection, Server, is_name, split_url
    from pillarbox.publishers.rabbitmq.addresses import Addresses
    from pillarbox.publishers.rabbitmq.examined import examine_address
    from pillarbox.publishers.rabbitmq.messages import Router
    from pillarbox.publishers.rabbitmq.sender import Sender, logger
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("aiormq", "pamqp", "yarl"):
        raise
    raise MissingExtra("RabbitMQPublisher", "rabbitmq") from error

__all__ = ["RabbitMQPublisher"]

# The setting for events that all have a topic of their own.
_OWN_TOPICS: Final = "*"
_ROUTES: Final = ("routing_key", "key")
_OPTIONS: Final = (
    "exchange", "queue", "route", "envelope", "headers", "source", "connections", "max_bytes", "stuck",
    "connect_timeout", *TLS_OPTIONS,
)  # fmt: skip


class RabbitMQPublisher(Publisher):
    """Publishes to one RabbitMQ server or cluster.

    url: ``amqp://[user:password@]host[:port][/vhost]``, or ``amqps`` with TLS.
    exchange: for events without a topic of their own; ``*``: each has one, and one without waits.
    queue: in place of ``exchange``: events without a topic go to this queue.
    route: what the routing key is: ``routing_key`` (the event's, or else its type) or ``key`` (for an exchange that
    spreads keys over queues).
    envelope: an envelope, one of ``pillarbox.envelopes.ENVELOPES``, or a function from an event to a RabbitMQMessage.
    headers: the header builder for a named envelope.
    source: the ``source`` attribute of CloudEvents.
    connections: how many, and so how many calls of ``publish`` at once.
    max_bytes: the largest body that is sent; RabbitMQ 4 takes 16 MiB unless its ``max_message_size`` says otherwise.
    stuck: how long a queue may be silent; then its keys wait, uncharged.
    connect_timeout: how long to wait for a connection.
    cafile: the certificates to trust, for ``amqps``; default: the system's.
    certfile: this client's own certificate.
    keyfile: the key of that certificate.
    """

    options = frozenset(_OPTIONS)

    def __init__(
        self,
        url: str,
        *,
        exchange: str = "",
        queue: str = "",
        route: str = "routing_key",
        envelope: str | Envelope | Callable[[Event], RabbitMQMessage] = "raw",
        headers: HeaderBuilder | None = None,
        source: str = "/pillarbox",
        connections: int = 4,
        max_bytes: int = 16 * 1024 * 1024,
        stuck: Duration = "30s",
        connect_timeout: Duration = "5s",
        cafile: str = "",
        certfile: str = "",
        keyfile: str = "",
    ) -> None:
        if bool(exchange) == bool(queue):
            raise ConfigError(
                "give a RabbitMQ publisher an exchange or a queue, and not both; write for instance exchange=shop or "
                "queue=orders for events that have no topic of their own, or exchange=* if every event has one"
            )
        for name, value in (("exchange", exchange), ("queue", queue)):
            if value != _OWN_TOPICS and not is_name(value):
                raise ConfigError(
                    f"{name}={value!r} is not a name that the RabbitMQ client takes; use up to 127 "
                    "letters, digits, spaces and -_.:@#,/+"
                )
        if route not in _ROUTES:
            raise ConfigError(f"route={route!r} is unknown; use one of: {', '.join(_ROUTES)}")
        if connections < 1:
            raise ConfigError(f"connections={connections} leaves nothing to publish with; use 1 or more")
        if max_bytes < 1:
            raise ConfigError(f"max_bytes={max_bytes} lets no event through; use 1 or more")
        if isinstance(envelope, str):
            envelope = envelope_named(envelope, headers=headers, source=source)
        elif headers is not None:
            raise ConfigError("headers= goes with a named envelope; give the header builder to your envelope")
        self._server = Server.of(url, cafile=cafile, certfile=certfile, keyfile=keyfile)
        self._message_of = rabbitmq(envelope) if isinstance(envelope, Envelope) else envelope
        default = "" if exchange == _OWN_TOPICS else exchange
        self._router = Router(default, queue, by_key=route == "key")
        self._connections = connections
        self._stuck_seconds = seconds_of("stuck", stuck, "100ms")
        self._connect_seconds = seconds_of("connect_timeout", connect_timeout, "1ms", "1h")
        self._waiting = Link(self.description, logger)
        self._addresses = Addresses(default, queue, max_bytes, self._waiting)
        self._free: asyncio.LifoQueue[Sender] = asyncio.LifoQueue()
        self._senders: list[Sender] = []
        self._is_open = False
        self._was_open = False
        self._changing = PerLoop(asyncio.Lock)

    @classmethod
    def from_url(cls, url: str, **overrides: Any) -> Self:
        """From ``amqp://host/vhost?exchange=shop``; overrides are arguments too."""
        server, given = split_url(url, _OPTIONS)
        return cls(server, **{**_converted(given), **overrides})

    @property
    def features(self) -> PublisherFeatures:
        return PublisherFeatures(calls=self._connections, joint=True)

    @property
    def description(self) -> str:
        return self._server.description

    @property
    def default_address(self) -> str:
        return self._addresses.exchange or self._addresses.queue

    @property
    def silence(self) -> str | None:
        return self._waiting.silence

    async def open(self) -> None:
        """Connect. A missing exchange or queue does not raise: publishing reports it as an outage."""
        async with self._changing():
            if self._is_open:
                return
            senders = [self._sender() for _ in range(self._connections)]
            # The others connect when they are needed.
            await senders[-1].prepare([""])
            self._senders = senders
            self._free = asyncio.LifoQueue()
            for sender in senders:
                self._free.put_nowait(sender)
            self._is_open = self._was_open = True

    async def examine(self) -> Sequence[Finding]:
        """The default exchange or queue: whether it exists, and whether the queue has copies."""
        if not self._is_open:
            raise Outage(f"{self.description} is not open; call open() first")
        exchange, queue = self._addresses.exchange, self._addresses.queue
        if not (exchange or queue):
            return []
        limits = ok("limits", f"a message has at most {self._addresses.max_bytes:,} bytes")
        connection = await AmqpConnection.connect(self._server, self._connect_seconds)
        try:
            async with asyncio.timeout(self._connect_seconds):
                return [*await examine_address(connection, exchange, queue), limits]
        except (AMQPError, TimeoutError, OSError) as error:
            raise Outage(f"{self.description} cannot be examined: {reason_of(error)}") from error
        finally:
            await connection.close()

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        """One outcome per event. Waits while the server takes no messages because its memory or disk is full."""
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
            self._server,
            self._router,
            self._addresses,
            self._message_of,
            self._waiting,
            connect_seconds=self._connect_seconds,
            stuck_seconds=self._stuck_seconds,
        )


def _converted(given: Mapping[str, str]) -> dict[str, Any]:
    """The options of a URL as arguments."""
    arguments: dict[str, Any] = dict(given)
    for name in ("connections", "max_bytes"):
        if name in given:
            if not given[name].isdecimal():
                raise ConfigError(f"{name}={given[name]!r} in the RabbitMQ URL is not a number; write for instance 4")
            arguments[name] = int(given[name])
    if "headers" in given:
        build = load_object(given["headers"], "a header builder")
        if not callable(build):
            raise ConfigError(
                f"headers={given['headers']} in the RabbitMQ URL is not a function from an event to its headers"
            )
        arguments["headers"] = build
    return arguments
