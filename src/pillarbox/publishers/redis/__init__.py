"""Events to streams of Redis or Valkey, in order per key."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from pillarbox.batch import Batch
from pillarbox.durations import Duration, seconds_of
from pillarbox.envelopes import Envelope, HeaderBuilder, RedisMessage, envelope_named, redis
from pillarbox.errors import ConfigError, MissingExtra, Outage
from pillarbox.event import Event
from pillarbox.finding import Finding
from pillarbox.imports import load_object
from pillarbox.publisher import UNTRIED, Outcome, Publisher, PublisherFeatures, outage
from pillarbox.publishers._link import Link
from pillarbox.tasks import PerLoop
from pillarbox.tls import TLS_OPTIONS

try:
    from redis.exceptions import RedisError

    from pillarbox.publishers.redis.connection import RedisConnection, Server, said, split_url
    from pillarbox.publishers.redis.sender import Sender, Target, logger
    from pillarbox.publishers.redis.settings import examine_stream
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "redis":
        raise
    raise MissingExtra("RedisPublisher", "redis") from error

__all__ = ["RedisPublisher"]

# The setting for events that all have a stream of their own.
_OWN_STREAMS: Final = "*"
_OPTIONS: Final = (
    "stream", "durable", "replicas", "maxlen", "envelope", "headers", "source", "connections", "max_bytes", "stuck",
    "connect_timeout", *TLS_OPTIONS,
)  # fmt: skip


class RedisPublisher(Publisher):
    """Publishes to streams of one Redis or Valkey server, not of a cluster.

    url: ``redis://[[user]:password@]host[:port][/database]``, or ``rediss`` with TLS; ``valkey`` and ``valkeys`` too.
    stream: for events without a topic of their own; ``*``: each has one, and one without waits.
    durable: refuse a server that can lose what it has confirmed. False: accept it.
    replicas: how many replicas must have an event too.
    maxlen: about how many entries a stream keeps; older ones are dropped, read or not. 0: all.
    envelope: an envelope, one of ``pillarbox.envelopes.ENVELOPES``, or a function from an event to a RedisMessage.
    headers: the header builder for a named envelope.
    source: the ``source`` attribute of CloudEvents.
    connections: how many, and so how many calls of ``publish`` at once.
    max_bytes: the largest entry that is sent.
    stuck: how long the server may be silent before the connection is thrown away.
    connect_timeout: how long to wait for a connection.
    cafile: the certificates to trust, for ``rediss``; default: the system's.
    certfile: this client's own certificate.
    keyfile: the key of that certificate.
    """

    options = frozenset(_OPTIONS)

    def __init__(
        self,
        url: str,
        *,
        stream: str,
        durable: bool = True,
        replicas: int = 0,
        maxlen: int = 0,
        envelope: str | Envelope | Callable[[Event], RedisMessage] = "raw",
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
        if not stream:
            raise ConfigError(
                "give a Redis publisher a stream; write for instance stream=orders for events that have no topic, or "
                "stream=* if every event has one"
            )
        for name, value, least in (
            ("connections", connections, 1),
            ("max_bytes", max_bytes, 1),
            ("replicas", replicas, 0),
            ("maxlen", maxlen, 0),
        ):
            if value < least:
                raise ConfigError(f"{name}={value} is too small; use {least} or more")
        if isinstance(envelope, str):
            envelope = envelope_named(envelope, headers=headers, source=source)
        elif headers is not None:
            raise ConfigError("headers= goes with a named envelope; give the header builder to your envelope")
        self._server = Server.of(url, cafile=cafile, certfile=certfile, keyfile=keyfile)
        self._connections = connections
        self._stuck_seconds = seconds_of("stuck", stuck, "100ms")
        self._connect_seconds = seconds_of("connect_timeout", connect_timeout, "1ms", "1h")
        self._target = Target(
            "" if stream == _OWN_STREAMS else stream,
            redis(envelope) if isinstance(envelope, Envelope) else envelope,
            Link(self.description, logger),
            durable=durable,
            replicas=replicas,
            maxlen=maxlen,
            max_bytes=max_bytes,
        )
        self._free: asyncio.LifoQueue[Sender] = asyncio.LifoQueue()
        self._senders: list[Sender] = []
        self._is_open = False
        self._was_open = False
        self._changing = PerLoop(asyncio.Lock)

    @classmethod
    def from_url(cls, url: str, **overrides: Any) -> Self:
        """From ``redis://host:6379/0?stream=orders``; overrides are arguments too."""
        server, given = split_url(url, _OPTIONS)
        return cls(server, **{"stream": "", **_converted(given), **overrides})

    @property
    def features(self) -> PublisherFeatures:
        return PublisherFeatures(calls=self._connections, joint=True)

    @property
    def description(self) -> str:
        return self._server.description

    @property
    def default_address(self) -> str:
        return self._target.stream

    @property
    def silence(self) -> str | None:
        return self._target.waiting.silence

    async def open(self) -> None:
        """Connect. Raises ConfigError when the server can lose what it confirms, unless ``durable`` is false."""
        async with self._changing():
            if self._is_open:
                return
            senders = [self._sender() for _ in range(self._connections)]
            # The others connect when they are needed.
            try:
                await senders[-1].prepare()
            except ConfigError:
                await senders[-1].drop()
                raise
            self._senders = senders
            self._free = asyncio.LifoQueue()
            for sender in senders:
                self._free.put_nowait(sender)
            self._is_open = self._was_open = True

    async def examine(self) -> Sequence[Finding]:
        """The server's settings: whether it keeps what it confirms, and its limits; and the default stream."""
        if not self._is_open:
            raise Outage(f"{self.description} is not open; call open() first")
        connection = await RedisConnection.connect(self._server, self._connect_seconds)
        try:
            async with asyncio.timeout(self._connect_seconds):
                return await examine_stream(connection, self._target.stream, self._target.most_bytes)
        except (TimeoutError, OSError, RedisError) as error:
            raise Outage(f"{self.description} cannot be examined: {said(error)}") from error
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
        """Disconnect. A transaction in flight has a second to be confirmed."""
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
    for name in ("connections", "max_bytes", "replicas", "maxlen"):
        if name in given:
            if not given[name].isdecimal():
                raise ConfigError(f"{name}={given[name]!r} in the Redis URL is not a number; write for instance 4")
            arguments[name] = int(given[name])
    if "durable" in given:
        if given["durable"] not in ("true", "false"):
            raise ConfigError(f"durable={given['durable']!r} in the Redis URL is unknown; write true or false")
        arguments["durable"] = given["durable"] == "true"
    if "headers" in given:
        build = load_object(given["headers"], "a header builder")
        if not callable(build):
            raise ConfigError(
                f"headers={given['headers']} in the Redis URL is not a function from an event to its headers"
            )
        arguments["headers"] = build
    return arguments
