"""Connections to NATS: their URL, their TLS, and one sentence for each way in which a connection fails."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.errors import ConnectionClosedError, Error, NoServersError
from nats.errors import TimeoutError as NatsTimeout

from pillarbox.errors import ConfigError, Outage
from pillarbox.hints import hint
from pillarbox.tasks import run_to_completion
from pillarbox.tls import reason_of, tls_context

_SCHEMES: Final = ("nats", "tls")
_PORT: Final = 4222
_PING_SECONDS: Final = 20
_CLOSE_SECONDS: Final = 1.0
# The client may wait for the end of a TLS handshake that has failed already.
_ABORT_SECONDS: Final = 0.1
_REFUSED: Final = "permissions violation"  # in what the server says of a subject


class _NotedContext(ssl.SSLContext):
    """Notes that it was used: the client goes on in plain text if the server does not ask for TLS."""

    is_used = False

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        self.is_used = True
        return super().wrap_bio(*arguments, **options)


@dataclass(frozen=True, slots=True, repr=False)
class Server:
    """The servers of a cluster, and how this client logs in. hosts: each as host:port. A user without a password is a
    token."""

    hosts: tuple[str, ...]
    user: str | None
    password: str | None
    files: tuple[str, str, str] | None
    """cafile, certfile and keyfile; None: without TLS."""

    @classmethod
    def of(cls, url: str, *, cafile: str = "", certfile: str = "", keyfile: str = "") -> Self:
        """From ``nats://[user:password@]host[:port][,host...]``, ``tls`` with TLS. An option of the URL raises
        ConfigError."""
        scheme, user, password, hosts, query = _parts(url)
        if query:
            raise ConfigError("url= of a NATS server takes no options; give them as arguments")
        if scheme == "tls":
            tls_context(ssl.SSLContext, cafile, certfile, keyfile)
            return cls(hosts, user, password, (cafile, certfile, keyfile))
        if cafile or certfile or keyfile:
            raise ConfigError("cafile=, certfile= and keyfile= are for TLS; write tls:// in place of nats://")
        return cls(hosts, user, password, None)

    @property
    def description(self) -> str:
        return f"nats {','.join(self.hosts)}"


def split_url(url: str, options: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The URL without its options, and the options. One that is not in ``options`` raises ConfigError."""
    query = _parts(url)[-1]
    given = dict(parse_qsl(query, keep_blank_values=True))
    for name in given:
        if name not in options:
            raise ConfigError(f"unknown option {name!r} in the NATS URL; {hint(name, options)}")
    return url.partition("?")[0], given


def _parts(url: str) -> tuple[str, str | None, str | None, tuple[str, ...], str]:
    # No text of the URL is shown: with an unescaped password, a part of that would be taken for a host.
    remedy = "write nats://user:password@host:4222, in a password @ as %40, / as %2F, # as %23 and ? as %3F"
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"the NATS URL cannot be read; {remedy}") from None
    if parts.scheme not in _SCHEMES:
        raise ConfigError("a NATS URL starts with nats:// or tls://")
    login, _, names = parts.netloc.rpartition("@")
    hosts = tuple(_host(parts.scheme, name, remedy) for name in names.split(","))
    if parts.path.strip("/") or parts.fragment:
        raise ConfigError(f"the NATS URL has more than hosts in front of its options; {remedy}")
    user, colon, password = login.partition(":")
    return parts.scheme, unquote(user) or None, unquote(password) if colon else None, hosts, parts.query


def _host(scheme: str, name: str, remedy: str) -> str:
    try:
        parts = urlsplit(f"{scheme}://{name}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"the NATS URL has a host or a port that cannot be read; {remedy}") from None
    if not host or port == 0:
        raise ConfigError(f"the NATS URL names no host; {remedy}")
    return f"[{host}]:{port or _PORT}" if ":" in host else f"{host}:{port or _PORT}"


class _Client(Client):
    """The client, with a way to throw a connection away. ``close`` first writes what waits, and a server that stands
    still lets nobody write; it leaves the tasks of subscriptions behind when that fails."""

    def abort(self) -> None:
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()
        for subscription in self._subs.values():
            subscription._stop_processing()


class NatsConnection:
    """One connection. It does not connect again: make a new one.

    answered: is called with the token and the message of each answer. refused: with what the server says about a
    subject that this user may not use, in lower case.
    """

    def __init__(self, server: Server) -> None:
        self.description = server.description
        self.client = _Client()
        self.closed = asyncio.Event()
        self.answered: Callable[[str, Msg], Awaitable[None]] = _nothing
        self.refused: Callable[[str], Awaitable[None]] = _ignored
        self._error: Exception | None = None
        self._refusal = ""
        self._inbox = ""

    @classmethod
    async def connect(cls, server: Server, seconds: float) -> Self:
        """Raises Outage when no server can be reached, or they refuse this client."""
        # Made anew, because the files may have been renewed.
        context = None if server.files is None else tls_context(_NotedContext, *server.files)
        made = cls(server)
        try:
            async with asyncio.timeout(seconds):
                await made._connect(server, context, seconds)
        except BaseException as error:
            await made.abort()
            cause = made._error if isinstance(error, NoServersError) and made._error is not None else error
            if isinstance(cause, Exception) and not isinstance(cause, Outage):
                raise made._outage(cause, seconds) from error
            raise
        return made

    async def _connect(self, server: Server, context: _NotedContext | None, seconds: float) -> None:
        def secret(value: str) -> Callable[[], str]:
            def tell() -> str:
                self._check_tls(context)
                return value

            return tell

        login: dict[str, Any] = {}
        if server.user is not None and server.password is not None:
            login = {"user": secret(server.user), "password": secret(server.password)}
        elif server.user is not None:
            login = {"token": secret(server.user)}
        await self.client.connect(
            [f"nats://{host}" for host in server.hosts],
            name="pillarbox",
            error_cb=self._failed,
            closed_cb=self._closed,
            allow_reconnect=False,
            # Without a limit it would try for ever.
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=max(1, round(seconds)),
            ping_interval=_PING_SECONDS,
            tls=context,
            **login,
        )
        self._check_tls(context)
        self._inbox = self.client.new_inbox()
        await self.client.subscribe(f"{self._inbox}.*", cb=self._answered)
        # An answer to this comes after what the server says about the subscription.
        await self.client.flush(timeout=max(1, round(seconds)))
        if self._refusal:
            raise Outage(f"{self.description} refuses this user: {self._refusal}; give it the permission")

    def _check_tls(self, context: _NotedContext | None) -> None:
        if context is not None and not context.is_used:
            raise Outage(f"{self.description} offers no TLS; correct the server, or write nats:// in place of tls://")

    def _outage(self, error: Exception, seconds: float) -> Outage:
        name = self.description
        if isinstance(error, TimeoutError):
            return Outage(f"{name} did not answer within {seconds:g} s; the relay tries again")
        if isinstance(error, ssl.SSLError):
            return Outage(
                f"{name}: TLS was refused ({reason_of(error)}); correct cafile, certfile and keyfile, or the server's "
                "certificate"
            )
        if isinstance(error, Error) and "uthorization" in str(error):
            return Outage(f"{name} refuses this client: {_said(error)}; correct its user and password")
        if isinstance(error, Error):
            return Outage(f"{name} refuses the connection: {_said(error)}")
        if isinstance(error, OSError | EOFError):
            return Outage(f"{name} cannot be reached: {reason_of(error)}; the relay tries again")
        return Outage(f"{name} cannot be reached: {type(error).__name__}; the relay tries again")

    @property
    def is_open(self) -> bool:
        return self.client.is_connected and not self.closed.is_set()

    @property
    def max_bytes(self) -> int:
        """The most that the server takes in one message, with its headers."""
        return self.client.max_payload

    @property
    def lost_by(self) -> str:
        """Why the connection was lost, in a few words."""
        error = self.client.last_error or self._error
        if error is None:
            return "the connection was lost"
        return _said(error) if isinstance(error, Error) else reason_of(error)

    async def publish(self, subject: str, body: bytes, headers: dict[str, str], token: str) -> None:
        """Send a message; its answer is given to ``answered`` with the token."""
        await self.client.publish(subject, body, reply=f"{self._inbox}.{token}", headers=headers)

    async def answers(self, seconds: float) -> bool:
        """Whether the server answers a question now."""
        try:
            async with asyncio.timeout(seconds):
                await self.client.flush(timeout=max(1, round(seconds)))
        except (TimeoutError, NatsTimeout, ConnectionClosedError, Error, OSError):
            return False
        return True

    async def abort(self) -> None:
        """Throw the connection away: nothing more is sent."""
        self.client.abort()
        await run_to_completion(self._end())

    async def close(self) -> None:
        """Say goodbye, for a second at most."""
        with suppress(TimeoutError, Error, OSError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.client.close()
        await self.abort()

    async def _end(self) -> None:
        with suppress(TimeoutError, Error, OSError):
            async with asyncio.timeout(_ABORT_SECONDS):
                await self.client.close()

    async def _answered(self, message: Msg) -> None:
        await self.answered(message.subject.rpartition(".")[2], message)

    async def _failed(self, error: Exception) -> None:
        self._error = error
        if _REFUSED in str(error):
            self._refusal = _said(error)
            await self.refused(self._refusal)

    async def _closed(self) -> None:
        self.closed.set()


def _said(error: BaseException) -> str:
    return str(error).removeprefix("nats: ").strip("' ") or type(error).__name__


async def _nothing(token: str, message: Msg) -> None:
    return


async def _ignored(sentence: str) -> None:
    return
