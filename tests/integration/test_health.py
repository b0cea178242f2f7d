"""Health of real relays: live through outages, ready when all is served, and the same figures on the command line."""

import asyncio
import json
import signal
import subprocess
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from prometheus_client import CollectorRegistry

from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError
from pillarbox.event import Status
from pillarbox.observe.prometheus import Prometheus
from pillarbox.publishers.kafka import KafkaPublisher
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Relay, supervisor
from pillarbox.store import Store
from pillarbox.stores.sqlite import SqliteStore
from servers import Kafka, Postgres
from servers.fixtures import OwnServer
from servers.process import free_port
from tests.integration.commands import Command
from tests.integration.relays import (
    STREAM,
    SqlOutbox,
    eventually,
    numbered,
    postgres_outbox,
    relay,
    settled,
    stream,
    until,
)

pytestmark = pytest.mark.asyncio
LISTEN = "127.0.0.1:0"


async def ask(running: Relay, path: str) -> tuple[int, Any]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}") as client:
        answer = await client.get(path)
        return answer.status_code, answer.json()


def live(running: Relay) -> bool:
    """By the page, not by the server: it is asked often."""
    return running.health.answer("GET", "/livez").status == 200


async def ready(running: Relay) -> None:
    await until(lambda: running.health.answer("GET", "/readyz").status == 200)


async def test_a_relay_is_live_at_once_and_ready_when_its_streams_are_served(sqlite: SqlOutbox, store: Store) -> None:
    running = relay(sqlite(), stream(MemoryPublisher()), listen=LISTEN)
    assert running.health.answer("GET", "/readyz").status == 503
    assert live(running)
    async with running:
        assert (await ask(running, "/livez"))[0] == 200
        await ready(running)
        body = {"ready": True, "waits_for": [], "circuits": {STREAM: "closed"}}
        assert await ask(running, "/readyz") == (200, body)
        port = running.port
    with pytest.raises(httpx.ConnectError):
        await asyncio.to_thread(httpx.get, f"http://127.0.0.1:{port}/livez")
    assert running.health.answer("GET", "/readyz").status == 503


async def test_a_relay_can_be_started_again(sqlite: SqlOutbox, store: Store) -> None:
    running = relay(sqlite(), stream(MemoryPublisher()), listen=LISTEN)
    for _ in range(2):
        async with running:
            await ready(running)
            assert (await ask(running, "/livez"))[0] == 200


async def test_a_port_that_is_taken_ends_the_start(sqlite: SqlOutbox, store: Store) -> None:
    async with relay(sqlite(), stream(MemoryPublisher()), listen=LISTEN) as first:
        other = relay(sqlite(), stream(MemoryPublisher()), listen=f"127.0.0.1:{first.port}")
        with pytest.raises(ConfigError, match="is not possible"):
            await other.start()


async def test_a_relay_without_its_database_is_live_and_not_ready(own_server: OwnServer) -> None:
    url = f"postgresql://postgres@127.0.0.1:{free_port()}/postgres"
    async with relay(postgres_outbox(url)(), stream(MemoryPublisher()), listen=LISTEN) as running:
        status, body = await ask(running, "/readyz")
        assert (status, body["waits_for"]) == (503, [f"stream '{STREAM}'", "the store"])
        assert await ask(running, "/livez") == (200, {"live": True, "troubles": []})


@pytest.mark.long
async def test_outages_of_database_and_broker_leave_it_live(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loops have to turn all the time, not only every five minutes.
    monkeypatch.setattr(supervisor, "_STUCK_SECONDS", 20.0)
    server, kafka = own_server(Postgres), own_server(Kafka)
    outbox = postgres_outbox(server.url)
    store = outbox()
    await store.migrate()
    await store.open()
    admin: Any = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0})
    admin.create_topics([NewTopic("orders", 4, 1)])["orders"].result()
    to = KafkaPublisher(servers=kafka.bootstrap_servers, topic="orders")
    observer = Prometheus(registry=CollectorRegistry())
    await store.add(numbered("a", 3))
    async with relay(outbox(), stream(to), listen=LISTEN, observers=[observer], grace=10.0) as running:
        await settled(store, {Status.PUBLISHED: 3})
        await ready(running)

        await asyncio.to_thread(kafka.kill)
        await store.add(numbered("a", 3, first=4))
        await asyncio.to_thread(server.kill)
        for _ in range(50):
            await asyncio.sleep(0)  # other tasks go on
            status, body = await ask(running, "/livez")
            assert (status, body["troubles"]) == (200, [])
        assert (await ask(running, "/readyz"))[0] == 200  # a restart would not help, and no request is lost
        page = httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}")
        async with page:
            assert "outbox_done_total" in (await page.get("/metrics")).text

        await asyncio.to_thread(server.start)
        await asyncio.to_thread(kafka.start)
        await settled(store, {Status.PUBLISHED: 6}, seconds=60.0)
        assert live(running)
    await store.close()


async def test_a_loop_that_does_not_turn_is_reported(
    sqlite: SqlOutbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_STUCK_SECONDS", 0.2)
    own = sqlite()
    hangs = asyncio.Event()

    async def poll(*_: Any) -> Any:
        hangs.set()
        await asyncio.Event().wait()

    async with relay(own, stream(MemoryPublisher()), grace=0.2) as running:
        await ready(running)
        monkeypatch.setattr(own, "poll", poll)
        await hangs.wait()
        await until(lambda: not live(running))
        answer = running.health.answer("GET", "/livez")
        assert answer.status == 503
        assert f"stream '{STREAM}' has done nothing for".encode() in answer.body


async def test_a_relay_that_stops_is_not_ready(sqlite: SqlOutbox, store: Store) -> None:
    to = MemoryPublisher()
    await store.add(numbered("a", 1))
    to.hold()
    running = relay(sqlite(), stream(to), listen=LISTEN)
    await running.start()
    await to.wait_until_held(1)
    stopping = asyncio.create_task(running.stop())
    await until(lambda: running.health.answer("GET", "/readyz").status == 503)
    status, body = await ask(running, "/readyz")
    assert (status, "stop" in body["waits_for"]) == (503, True)
    assert (await ask(running, "/livez"))[0] == 200
    to.release()
    await stopping


async def test_the_command_listens(on_sqlite: Command) -> None:
    port = free_port()
    store = SqliteStore(str(on_sqlite.folder / "shop.db"))
    await store.open()
    relay = on_sqlite.start("relay", "--to", "stdout:", "--listen", f"127.0.0.1:{port}", stdout=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

            async def status(path: str) -> int:
                try:
                    return (await client.get(path)).status_code
                except httpx.TransportError:
                    return 0

            async def done() -> bool:
                return 'outbox_done_total{stream="default"} 2.0' in (await client.get("/metrics")).text

            await eventually(lambda: status("/readyz"), lambda found: found == 200)
            await store.add([make_event() for _ in range(2)])
            await eventually(done)
            assert await status("/livez") == 200
            assert await status("/other") == 404
    finally:
        relay.send_signal(signal.SIGTERM)
        _, said = relay.communicate(timeout=30)
        await store.close()
    assert relay.returncode == 0, said
    assert f"listening on port {port}" in said.decode()


async def test_an_address_that_is_wrong_is_refused(on_sqlite: Command) -> None:
    on_sqlite("relay", "--to", "stdout:", "--listen", "9808").failed(2, "listen is '9808'", "127.0.0.1:9808 or :9808")


async def test_without_the_extra_the_command_says_so(on_sqlite: Command, tmp_path: Any) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError\n")
    port = free_port()
    relay = on_sqlite.start(
        "relay", "--to", "stdout:", "--listen", f"127.0.0.1:{port}", "--log-format", "json", stdout=subprocess.DEVNULL
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

        async def status() -> int:
            try:
                return (await client.get("/metrics")).status_code
            except httpx.TransportError:
                return 0

        try:
            assert await eventually(status) == 501
        finally:
            relay.send_signal(signal.SIGTERM)
            _, said = relay.communicate(timeout=30)
    lines = [json.loads(line) for line in said.decode().splitlines()]
    assert "no_metrics" in [line["action"] for line in lines]
