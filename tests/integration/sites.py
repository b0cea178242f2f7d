"""HTTP servers whose answers a test decides."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias

import uvicorn

from pillarbox.tasks import ended
from tests.integration.certificates import Certificates
from tests.integration.relays import until

Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]


class Request(NamedTuple):
    """One request. The names of its headers are lowercase."""

    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    connection: tuple[str, int]  # the client's end

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


Answer: TypeAlias = Callable[[Request, Send], Awaitable[None]]


def status(code: int, **headers: str) -> Answer:
    """Answers with this status. A name of a header has - in place of _."""

    async def answer(request: Request, send: Send) -> None:
        lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": code, "headers": lines})
        await send({"type": "http.response.body", "body": b"" if code == 204 else b"what it says is never shown"})

    return answer


def endless(code: int) -> Answer:
    """Answers with a body that does not end."""

    async def answer(request: Request, send: Send) -> None:
        await send({"type": "http.response.start", "status": code, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 16_384, "more_body": True})
            await asyncio.sleep(0)

    return answer


class Hang:
    """Answers nothing until ``release``, and then 204. waiting: the requests that wait."""

    def __init__(self) -> None:
        self.waiting = 0
        self._released = asyncio.Event()

    def release(self) -> None:
        self._released.set()

    async def __call__(self, request: Request, send: Send) -> None:
        self.waiting += 1
        await self._released.wait()
        self.waiting -= 1
        await status(204)(request, send)


class Site:
    """An ASGI application. answer: what it does with a request that it has noted."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.url = ""

    @property
    def ids(self) -> list[str]:
        return [each.id for each in self.requests]

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        request = Request(scope["path"], scope["query_string"].decode(), headers, body, tuple(scope["client"]))
        self.requests.append(request)
        await self.answer(request, send)


@asynccontextmanager
async def site(
    answer: Answer | None = None, *, files: Certificates | None = None, client_certificates: bool = False
) -> AsyncIterator[Site]:
    """A server on 127.0.0.1, in this event loop. files: with TLS."""
    made = Site(answer or status(204))
    settings: dict[str, Any] = {}
    if files is not None:
        settings = {"ssl_certfile": str(files.server), "ssl_keyfile": str(files.server_key)}
        if client_certificates:
            settings |= {"ssl_ca_certs": str(files.authority), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    config = uvicorn.Config(made, lifespan="off", log_config=None, timeout_graceful_shutdown=1, **settings)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    made.url = f"http{'s' if files else ''}://127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        yield made
    finally:
        server.force_exit = server.should_exit = True
        await asyncio.wait([serving], timeout=5)
        await ended(serving)
        listener.close()
