"""Health: what the paths answer, and a server that no client can hold up."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Mount

from pillarbox.errors import ConfigError
from pillarbox.health import Health, HealthServer
from pillarbox.health.server import address_of
from pillarbox.observe.prometheus import Prometheus

ENOUGH = 20.0  # far above what anything takes here: it only ends a test that has failed
pytestmark = pytest.mark.asyncio


class Patient:
    """A relay whose health the test decides."""

    def __init__(self) -> None:
        self.trouble: list[str] = []
        self.waits_for: list[str] = []
        self.circuit: dict[str, str] = {"orders": "closed"}

    def troubles(self) -> Sequence[str]:
        return self.trouble

    def missing(self) -> Sequence[str]:
        return self.waits_for

    def circuits(self) -> Mapping[str, str]:
        return self.circuit


@asynccontextmanager
async def serving(patient: Patient, **options: Any) -> AsyncIterator[int]:
    observers = [Prometheus(registry=CollectorRegistry())]
    server = HealthServer("127.0.0.1:0", Health(patient, observers), **options)
    await server.start()
    try:
        yield server.port
    finally:
        await server.close()


async def sent(port: int, data: bytes, *, end: bool = False) -> bytes:
    """The whole answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        async with asyncio.timeout(ENOUGH):
            return await reader.read()
    finally:
        writer.close()


async def asked(port: int, request: str) -> tuple[int, Any]:
    """The status and the body of the answer to ``GET /livez``, read as JSON where it is that."""
    answer = await sent(port, f"{request} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    return status, json.loads(body) if b"application/json" in head else body.decode()


async def until(port: int, *, served: bool) -> None:
    """Ask until a request is served, or until a connection is closed at once."""
    async with asyncio.timeout(ENOUGH):
        while True:
            try:
                is_served = bool(await sent(port, b"GET /livez HTTP/1.1\r\n\r\n"))
            except ConnectionResetError:
                is_served = False
            if is_served is served:
                return


async def test_live_and_ready() -> None:
    patient = Patient()
    async with serving(patient) as port:
        assert await asked(port, "GET /livez") == (200, {"live": True, "troubles": []})
        ready = {"ready": True, "waits_for": [], "circuits": {"orders": "closed"}}
        assert await asked(port, "GET /readyz?verbose=1") == (200, ready)

        patient.trouble, patient.waits_for = ["it hangs"], ["the store"]
        patient.circuit = {"orders": "open"}
        assert await asked(port, "GET /livez") == (503, {"live": False, "troubles": ["it hangs"]})
        waits = {"ready": False, "waits_for": ["the store"], "circuits": {"orders": "open"}}
        assert await asked(port, "GET /readyz") == (503, waits)


async def test_the_page_of_metrics() -> None:
    async with serving(Patient()) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        plain = await client.get("/metrics")
        assert plain.status_code == 200
        assert plain.headers["content-type"].startswith("text/plain")
        assert "# TYPE outbox_done_total counter" in plain.text
        modern = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert modern.headers["content-type"].startswith("application/openmetrics-text")
        assert modern.text.endswith("# EOF\n")


async def test_without_an_exporter_the_page_says_what_to_do() -> None:
    answer = Health(Patient()).answer("GET", "/metrics")
    assert answer.status == 501
    assert b"pip install 'pillarbox[prometheus]'" in answer.body


async def test_a_head_has_no_body() -> None:
    async with serving(Patient()) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        answer = await client.head("/livez")
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) > 0
        assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /livez/../secrets HTTP/1.1\r\n\r\n", 404),
        (b"POST /livez HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /livez\r\n\r\n", 400),
        (b"GET /livez HTTP/2.0\r\n\r\n", 400),
        (b"GET /li vez HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", 400),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # the beginning of TLS
        (b"GET /livez HTTP/1.1\r\nCookie: " + b"x" * 20_000, 431),
        (b"x" * 100_000, 431),
    ],
)
async def test_what_is_no_proper_request_is_refused(request_: bytes, status: int) -> None:
    async with serving(Patient()) as port:
        try:
            answer = await sent(port, request_)
        except ConnectionResetError:
            # The server did not read all of it, so that its answer may be lost on the way.
            assert status == 431
        else:
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()) or (status == 431 and not answer)
        assert (await asked(port, "GET /livez"))[0] == 200


async def test_half_a_request_is_refused_when_its_client_ends_it() -> None:
    async with serving(Patient()) as port:
        assert (await sent(port, b"GET /livez HTTP/1.1\r\n", end=True)).startswith(b"HTTP/1.1 400 ")


async def test_a_client_that_is_slow_is_cut_off() -> None:
    async with serving(Patient(), seconds=0.2) as port:
        assert await sent(port, b"GET /livez HT") == b""  # returns, because the server has closed the connection


async def test_a_client_that_does_not_read_loses_its_place() -> None:
    class Large(Health):
        def answer(self, method: str, path: str, accept: str = "") -> Any:
            answer = super().answer(method, path)
            return answer._replace(body=b"x" * 50_000_000) if path == "/readyz" else answer

    server = HealthServer("127.0.0.1:0", Large(Patient()), seconds=0.5, connections=1)
    await server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /readyz HTTP/1.1\r\n\r\n")
            await until(server.port, served=False)
            await until(server.port, served=True)
    finally:
        await server.close()


async def test_more_connections_than_allowed_are_refused_and_do_not_hold_up_others() -> None:
    async with serving(Patient(), connections=3) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in idle:
            writer.write(b"GET /")
            await writer.drain()
        await until(port, served=False)
        for _, writer in idle:
            writer.close()
        await until(port, served=True)


async def test_an_unexpected_error_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Patient):
        def circuits(self) -> Mapping[str, str]:
            raise ValueError("a secret")

    async with serving(Broken()) as port:
        status, body = await asked(port, "GET /readyz")
    assert status == 500
    assert "secret" not in body
    assert [getattr(record, "action", None) for record in caplog.records if record.levelno == logging.ERROR] == [
        "health_failed"
    ]


async def test_a_close_ends_open_connections() -> None:
    async with serving(Patient()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\n")
        await writer.drain()
        await asked(port, "GET /livez")
    async with asyncio.timeout(ENOUGH):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_a_port_that_is_taken_is_named() -> None:
    async with serving(Patient()) as port:
        with pytest.raises(ConfigError, match=f"listen is '127.0.0.1:{port}', which is not possible"):
            await HealthServer(f"127.0.0.1:{port}", Health(Patient())).start()


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:9808", ("127.0.0.1", 9808)),
        ("localhost:0", ("localhost", 0)),
        (":9808", ("", 9808)),
        ("[::1]:9808", ("::1", 9808)),
    ],
)
async def test_an_address(listen: str, address: tuple[str, int]) -> None:
    assert address_of(listen) == address


@pytest.mark.parametrize("listen", ["", "9808", "127.0.0.1", "here:port", "here:99999", "http://here:9808", "::1:9808"])
async def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="give an address and a port"):
        address_of(listen)


async def test_as_routes_of_an_application() -> None:
    patient = Patient()
    app = Starlette(routes=[Mount("/outbox", Health(patient))])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        assert (await client.get("/outbox/livez")).json() == {"live": True, "troubles": []}
        patient.waits_for = ["stream 'orders'"]
        ready = await client.get("/outbox/readyz")
        assert (ready.status_code, ready.json()["waits_for"]) == (503, ["stream 'orders'"])
        assert (await client.get("/outbox/other")).status_code == 404
        head = await client.head("/outbox/livez")
        assert (head.status_code, head.content) == (200, b"")
        assert (await client.post("/outbox/livez")).headers["allow"] == "GET, HEAD"


async def test_other_protocols_are_refused() -> None:
    async def unused(*_: Any) -> Any:
        raise AssertionError("nothing is sent or received")

    with pytest.raises(RuntimeError, match="not websocket"):
        await Health(Patient())({"type": "websocket"}, unused, unused)
