"""A small server of HTTP for probes and monitors. Each connection has one request, and little time and memory."""

import asyncio
import logging
import re
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

from pillarbox.errors import ConfigError
from pillarbox.health.health import Answer, Health, headers_of

log = logging.getLogger("pillarbox.health")

_HEAD_BYTES: Final = 8192
_SECONDS: Final = 10.0  # for all of one connection
_CONNECTIONS: Final = 32
_ADDRESS: Final = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%a-z]+)\]|(?P<host>[^:\[\]/\s]*)):(?P<port>[0-9]{1,5})")
_REQUEST: Final = re.compile(rb"(?P<method>[A-Z]{1,20}) (?P<path>[!-~]{1,2000}) HTTP/1\.[01]")


def address_of(listen: str) -> tuple[str, int]:
    """The host and port of a setting such as ``127.0.0.1:9808``; ``:9808`` are all addresses. Raises ConfigError."""
    found = _ADDRESS.fullmatch(listen)
    if found is None or int(found["port"]) > 65_535:
        raise ConfigError(f"listen is {listen!r}; give an address and a port, for example 127.0.0.1:9808 or :9808")
    return found["six"] or found["host"] or "", int(found["port"])


def next_port(listen: str, step: int) -> str:
    """The address with a port that is higher by this number. Port 0 stays: it is any free one. Raises ConfigError."""
    _, port = address_of(listen)
    return f"{listen.rpartition(':')[0]}:{port + step}" if port else listen


class HealthServer:
    """Serves ``/livez``, ``/readyz`` and ``/metrics`` on one address. listen: ``HOST:PORT``; port 0: any free one.

    seconds: the time of one connection. connections: the most at a time; further ones are closed at once.
    """

    def __init__(
        self,
        listen: str,
        health: Health,
        *,
        seconds: float = _SECONDS,
        connections: int = _CONNECTIONS,
        logger: logging.Logger | None = None,
    ) -> None:
        self._host, self._port = address_of(listen)
        self._listen = listen
        self._health = health
        self._seconds = seconds
        self._limit = connections
        self._log = logger or log
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen. Raises ConfigError if that is not possible."""
        try:
            self._server = await asyncio.start_server(self._serve, self._host or None, self._port, limit=_HEAD_BYTES)
        except OSError as error:
            raise ConfigError(
                f"listen is {self._listen!r}, which is not possible ({error.strerror or error}); give another address"
            ) from error
        self._log.info(
            "listening on port %d for /livez, /readyz and /metrics", self.port, extra={"action": "listening"}
        )

    async def close(self) -> None:
        """Stop, and end the connections that are open."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        # Not cancelled: asyncio would log that as an error.
        for writer in self._open.values():
            writer.transport.abort()
        if self._open:
            await asyncio.wait(list(self._open))
        await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= self._limit:
            writer.transport.abort()
            return
        self._open[task] = writer
        try:
            # A client that goes away or takes its time ends only its own connection.
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._seconds):
                    is_head, answer = await self._answer(reader)
                    writer.write(_response(answer, with_body=not is_head))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            del self._open[task]
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[bool, Answer]:
        """Whether only the head of the answer is wanted, and the answer."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return False, _refusal(431, f"a request has at most {_HEAD_BYTES} bytes")
        except asyncio.IncompleteReadError:
            return False, _refusal(400, "the request is not complete")
        first, *lines = head[:-4].split(b"\r\n")
        request = _REQUEST.fullmatch(first)
        if request is None:
            return False, _refusal(400, "this is no request of HTTP/1.1")
        method = request["method"].decode()
        accept = next((line[7:].strip() for line in lines if line[:7].lower() == b"accept:"), b"")
        try:
            return method == "HEAD", self._health.answer(method, request["path"].decode(), accept.decode("latin-1"))
        except Exception:
            self._log.exception("a request for health failed", extra={"action": "health_failed"})
            return method == "HEAD", _refusal(500, "unexpected error; the log says more")


def _refusal(status: int, sentence: str) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", f"{sentence}\n".encode())


def _response(answer: Answer, *, with_body: bool) -> bytes:
    status = HTTPStatus(answer.status)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers_of(answer))]
    head = "\r\n".join([*lines, "connection: close", "", ""]).encode()
    return head + answer.body if with_body else head
