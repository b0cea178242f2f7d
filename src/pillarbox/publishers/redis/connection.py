"""Connections to Redis and Valkey: their URL, their TLS, and one sentence for each way in which a connection fails."""

import asyncio
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import Connection, SSLConnection
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from pillarbox.errors import ConfigError, Outage
from pillarbox.hints import hint
from pillarbox.tasks import run_to_completion
from pillarbox.tls import reason_of, tls_context

_SCHEMES: Final = {"redis": False, "rediss": True, "valkey": False, "valkeys": True}
_PORT: Final = 6379
_CLOSE_SECONDS: Final = 1.0
_REASON_LENGTH: Final = 200

Word = str | bytes | int


@dataclass(frozen=True, slots=True, repr=False)
class Server:
    """The address of a server, and how this client logs in. tls: None: without TLS."""

    host: str
    port: int
    database: int
    user: str | None
    password: str | None
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, *, cafile: str = "", certfile: str = "", keyfile: str = "") -> Self:
        """From ``redis://[[user]:password@]host[:port][/database]``, ``rediss`` with TLS. An option of the URL raises
        ConfigError."""
        parts, database = _parts(url)
        if parts.query:
            raise ConfigError("url= of a Redis server takes no options; give them as arguments")
        with_tls = _SCHEMES[parts.scheme]
        if not with_tls and (cafile or certfile or keyfile):
            raise ConfigError("cafile=, certfile= and keyfile= are for TLS; write rediss:// in place of redis://")
        return cls(
            parts.hostname or "",
            parts.port or _PORT,
            database,
            unquote(parts.username) if parts.username else None,
            unquote(parts.password) if parts.password else None,
            tls_context(ssl.SSLContext, cafile, certfile, keyfile) if with_tls else None,
        )

    @property
    def description(self) -> str:
        database = f"/{self.database}" if self.database else ""
        return f"redis {self.host}:{self.port}{database}"


def split_url(url: str, options: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The URL without its options, and the options. One that is not in ``options`` raises ConfigError."""
    parts, _ = _parts(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in given:
        if name not in options:
            raise ConfigError(f"unknown option {name!r} in the Redis URL; {hint(name, options)}")
    return parts._replace(query="").geturl(), given


def _parts(url: str) -> tuple[Any, int]:
    # No text of the URL is shown: with an unescaped password, a part of that would be taken for a host or a path.
    remedy = "write redis://user:password@host:6379/0, in a password @ as %40, / as %2F, # as %23 and ? as %3F"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"the Redis URL has a host or a port that cannot be read; {remedy}") from None
    if parts.scheme not in _SCHEMES:
        raise ConfigError("a Redis URL starts with redis:// or rediss://, or with valkey:// or valkeys://")
    database = parts.path[1:] or "0"
    if not parts.hostname or port == 0 or parts.fragment or not database.isdecimal():
        raise ConfigError(f"the Redis URL names no host, or has more than a database number behind it; {remedy}")
    return parts, int(database)


class RedisConnection:
    """One connection. It does not connect again, and sends nothing twice: make a new one."""

    def __init__(self, server: Server) -> None:
        self.description = server.description
        settings: dict[str, Any] = {
            "host": server.host,
            "port": server.port,
            "db": server.database,
            "username": server.user,
            "password": server.password,
            "protocol": 2,
            "socket_timeout": None,
        }
        self._connection: Any  # half of it has no types
        if server.tls is None:
            self._connection = Connection(**settings)
        else:
            secure = SSLConnection(**settings)
            secure.ssl_context.context = server.tls
            self._connection = secure

    @classmethod
    async def connect(cls, server: Server, seconds: float) -> Self:
        """Raises Outage when the server cannot be reached, or refuses this client."""
        made = cls(server)
        try:
            async with asyncio.timeout(seconds):
                await made._connection.connect()
        except BaseException as error:
            await made.abort()
            if isinstance(error, Exception):
                raise made._outage(error, seconds) from error
            raise
        return made

    def _outage(self, error: Exception, seconds: float) -> Outage:
        name = self.description
        # The client wraps an error of the network into one of its own.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        if isinstance(error, TimeoutError | RedisTimeout) or isinstance(cause, TimeoutError):
            return Outage(f"{name} did not answer within {seconds:g} s; the relay tries again")
        if isinstance(cause, ssl.SSLError):
            return Outage(
                f"{name}: TLS was refused ({reason_of(cause)}); correct cafile, certfile and keyfile, or the server's "
                "certificate"
            )
        if isinstance(error, AuthenticationError):
            return Outage(f"{name} refuses this client: {said(error)}; correct its user and password")
        if isinstance(error, BusyLoadingError):
            return Outage(f"{name} is reading its data from disk; the relay tries again")
        if isinstance(error, ResponseError):
            return Outage(f"{name} refuses the connection: {said(error)}")
        if isinstance(cause, OSError | EOFError):
            return Outage(f"{name} cannot be reached: {reason_of(cause)}; the relay tries again")
        return Outage(f"{name} cannot be reached: {said(error)}; the relay tries again")

    @property
    def is_open(self) -> bool:
        return bool(self._connection.is_connected)

    async def ask(self, *words: Word) -> Any:
        """The answer to a command. Raises ResponseError."""
        await self._connection.send_packed_command(self._connection.pack_command(*words), check_health=False)
        return await self._connection.read_response()

    async def transaction(self, commands: Sequence[tuple[Word, ...]]) -> list[Any]:
        """Run commands together. One result for each, which can be an exception. Raises ResponseError when the server
        refused one of them beforehand, and so ran none."""
        connection = self._connection
        packed = connection.pack_commands([("MULTI",), *commands, ("EXEC",)])
        await connection.send_packed_command(packed, check_health=False)
        refusal: ResponseError | None = None
        for _ in range(len(commands) + 1):
            try:
                await connection.read_response()
            except ResponseError as error:
                refusal = refusal or error
        try:
            results = await connection.read_response()
        except ResponseError as error:
            raise refusal or error from error
        assert isinstance(results, list)
        return results

    async def abort(self) -> None:
        """Throw the connection away: nothing more is sent."""
        # The client has no public way that does not write what waits, which a server that stands still lets nobody do.
        writer = self._connection._writer
        if writer is not None:
            writer.transport.abort()
        await run_to_completion(self._end())

    async def close(self) -> None:
        """Disconnect, within a second."""
        await self._end()
        await self.abort()

    async def _end(self) -> None:
        with suppress(TimeoutError, RedisError, OSError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._connection.disconnect(nowait=True)


def said(error: BaseException) -> str:
    """The server's words, without the arguments of a command that it quotes."""
    text = str(error).partition(", with args")[0].partition("\n")[0]
    return text[:_REASON_LENGTH].rstrip(". ") or type(error).__name__
