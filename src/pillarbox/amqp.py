"""Connections to RabbitMQ: their URL, their TLS, and one sentence for each way in which a connection fails."""

import asyncio
import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from aiormq import Channel, Connection, TransportFactory, spec
from aiormq.exceptions import AMQPError, AuthenticationError, InvalidFrameError, ProbableAuthenticationError
from yarl import URL

from pillarbox.errors import ConfigError, Outage
from pillarbox.hints import hint
from pillarbox.tasks import run_to_completion
from pillarbox.tls import reason_of, tls_context

_PORTS: Final = {"amqp": 5672, "amqps": 5671}
_HEARTBEAT_SECONDS: Final = 30
_CLOSE_SECONDS: Final = 1.0
# An argument that a queue has and a declaration leaves out, in the words of the server.
_LEFT_OUT: Final = re.compile(
    r"inequivalent arg '(.+?)' .* received none but current is the value '(.*)' of type '(\w+)'"
)


@dataclass(frozen=True, slots=True, repr=False)
class Server:
    """The address of a server, and how this client logs in. tls: None: without TLS."""

    host: str
    port: int
    vhost: str
    user: str
    password: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, *, cafile: str = "", certfile: str = "", keyfile: str = "") -> Self:
        """From ``amqp://[user:password@]host[:port][/vhost]``, ``amqps`` with TLS. An option of the URL raises
        ConfigError."""
        parts = _parts(url)
        if parts.query:
            raise ConfigError("url= of a RabbitMQ server takes no options; give them as arguments")
        tls = tls_context(ssl.SSLContext, cafile, certfile, keyfile) if parts.scheme == "amqps" else None
        if tls is None and (cafile or certfile or keyfile):
            raise ConfigError("cafile=, certfile= and keyfile= are for TLS; write amqps:// in place of amqp://")
        return cls(
            parts.hostname or "",
            parts.port or _PORTS[parts.scheme],
            unquote(parts.path[1:]) or "/",
            unquote(parts.username or "guest"),
            unquote(parts.password or "guest"),
            tls,
        )

    @property
    def description(self) -> str:
        vhost = "" if self.vhost == "/" else f"/{self.vhost}"
        return f"rabbitmq {self.host}:{self.port}{vhost}"

    @property
    def _url(self) -> URL:
        login = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        vhost = "" if self.vhost == "/" else quote(self.vhost, safe="")
        text = f"amqp://{login}@{host}:{self.port}/{vhost}?heartbeat={_HEARTBEAT_SECONDS}"
        return URL(text, encoded=True)


def split_url(url: str, options: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The URL without its options, and the options. One that is not in ``options`` raises ConfigError."""
    parts = _parts(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in given:
        if name not in options:
            raise ConfigError(f"unknown option {name!r} in the RabbitMQ URL; {hint(name, options)}")
    return parts._replace(query="").geturl(), given


def _parts(url: str) -> Any:
    # No text of the URL is shown: with an unescaped password, a part of that would be taken for a host or a path.
    remedy = (
        "write amqp://user:password@host:5672/vhost, in a password @ as %40, / as %2F, # as %23 and ? as %3F, "
        "in a vhost / as %2F"
    )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"the RabbitMQ URL has a host or a port that cannot be read; {remedy}") from None
    if parts.scheme not in _PORTS:
        raise ConfigError("a RabbitMQ URL starts with amqp:// or amqps://")
    if not parts.hostname or port == 0 or parts.fragment or "/" in parts.path[1:]:
        raise ConfigError(f"the RabbitMQ URL names no host, or has more than a vhost behind it; {remedy}")
    return parts


def is_name(name: str) -> bool:
    """Whether an exchange or a queue can have this name."""
    try:
        spec.Exchange.Declare(exchange=name), spec.Queue.Declare(queue=name)
    except ValueError:
        return False
    return len(name.encode()) <= 255


class _Given(TransportFactory):
    """A transport that is connected already: aiormq would log each failure with a traceback."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._pair = reader, writer

    async def create(self, url: URL, **_: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return self._pair


class AmqpConnection:
    """One connection. It does not connect again: make a new one."""

    def __init__(self, server: Server, connection: Connection, writer: asyncio.StreamWriter) -> None:
        self.description = server.description
        self._connection = connection
        self._writer = writer

    @classmethod
    async def connect(cls, server: Server, seconds: float) -> Self:
        """Raises Outage when the server cannot be reached, or refuses this client."""
        writer: asyncio.StreamWriter | None = None
        name = server.description
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(server.host, server.port, ssl=server.tls)
                properties: Mapping[str, Any] = {"connection_name": "pillarbox"}
                connection = Connection(
                    server._url, transport_factory=_Given(reader, writer), client_properties=dict(properties)
                )
                await connection.connect()
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, TimeoutError):
                raise Outage(f"{name} did not answer within {seconds:g} s") from error
            if (refusal := _tls_error(error)) is not None:
                raise Outage(
                    f"{name}: TLS was refused ({reason_of(refusal)}); correct cafile, certfile and keyfile, or the "
                    "server's certificate"
                ) from error
            if isinstance(error, (ProbableAuthenticationError, AuthenticationError)):
                raise Outage(
                    f"{name} refuses this client: {reason_of(error)}; correct its user and password"
                ) from error
            if isinstance(error, InvalidFrameError):  # aiormq's answer to a Close in place of an OpenOk
                raise Outage(
                    f"{name}: the vhost {server.vhost!r} does not exist, this user may not use it, or it takes no "
                    "more connections; create it, give the user permissions, or raise its limit"
                ) from error
            if isinstance(error, AMQPError):
                raise Outage(f"{name} refuses the connection: {reason_of(error)}") from error
            if isinstance(error, (OSError, EOFError)):
                raise Outage(f"{name} cannot be reached: {reason_of(error)}") from error
            raise
        return cls(server, connection, writer)

    @property
    def is_open(self) -> bool:
        return self._connection.is_opened

    @property
    def frame_bytes(self) -> int:
        """The size of the largest frame that the server takes."""
        return int(self._connection.connection_tune.frame_max)

    async def channel(self, *, confirms: bool) -> Channel:
        channel = await self._connection.channel(publisher_confirms=confirms)
        assert isinstance(channel, Channel)
        return channel

    async def is_blocked(self) -> bool:
        """Whether the server takes no messages now, because its memory or its disk is full."""
        try:
            async with asyncio.timeout(0):  # ready() waits only while the connection is blocked
                await self._connection.ready()
        except TimeoutError:
            return True
        return False

    async def answers(self, seconds: float) -> bool:
        """Whether the server answers a question now."""
        try:
            async with asyncio.timeout(seconds):
                channel = await self.channel(confirms=False)
                await channel.close()
        except (TimeoutError, AMQPError, OSError, RuntimeError):
            return False
        return True

    async def missing(self, *, exchange: str = "", queue: str = "") -> str | None:
        """Why the exchange or the queue cannot be used, in the server's words; None: it is there."""
        channel = await self.channel(confirms=False)
        try:
            if exchange:
                await channel.exchange_declare(exchange, passive=True)
            else:
                await channel.queue_declare(queue, passive=True)
        except AMQPError as error:
            if not self.is_open:
                raise
            return reason_of(error)
        await channel.close()
        return None

    async def differs(self, queue: str, arguments: dict[str, Any]) -> str | None:
        """How a queue that exists differs from a durable one with these arguments, in the server's words; None: it has
        them. It may have others."""
        given = dict(arguments)
        while True:
            channel = await self.channel(confirms=False)
            try:
                await channel.queue_declare(queue, durable=True, arguments=given)
            except AMQPError as error:
                if not self.is_open:
                    raise
                reason = reason_of(error)
                name, value = _left_out(reason)
                if name is None or name in given:
                    return reason
                given[name] = value  # the server names one difference at a time
                continue
            await channel.close()
            return None

    async def count(self, queue: str) -> int:
        """The messages that wait in a queue."""
        channel = await self.channel(confirms=False)
        declared = await channel.queue_declare(queue, passive=True)
        await channel.close()
        return declared.message_count or 0

    async def abort(self) -> None:
        """Throw the connection away: nothing more is sent."""
        self._writer.transport.abort()
        await run_to_completion(self._end())

    async def close(self) -> None:
        """Say goodbye, for a second at most."""
        if self.is_open:
            with suppress(TimeoutError, AMQPError, OSError):
                await self._connection.close(timeout=_CLOSE_SECONDS)
        await self.abort()

    async def _end(self) -> None:
        with suppress(TimeoutError, AMQPError, OSError):
            await self._connection.close(timeout=_CLOSE_SECONDS)


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """The error of TLS. With TLS 1.3 a server refuses a client's certificate when the client thinks all is done."""
    for each in (error, *error.args, error.__cause__):
        if isinstance(each, ssl.SSLError):
            return each
    return None


def _left_out(reason: str) -> tuple[str | None, Any]:
    found = _LEFT_OUT.search(reason)
    if found is None:
        return None, None
    name, value, kind = found.groups()
    if kind == "longstr":
        return name, value
    if kind == "bool":
        return name, value == "true"
    return (name, int(value)) if re.fullmatch(r"-?\d+", value) else (None, None)
