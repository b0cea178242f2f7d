"""Metrics, health and traces of a consumer."""

import asyncio
import signal
import subprocess
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from pillarbox import Consumer, Event, Fixed, Handlers, Outage
from pillarbox.conformance.events import make_event
from pillarbox.observe.prometheus import Prometheus
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.sources.memory import MemorySource, MemoryTopic
from servers.process import free_port
from tests.integration.commands import Command
from tests.integration.relays import WAIT, SqlOutbox, eventually, numbered, until

pytestmark = pytest.mark.asyncio
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def handlers(fails: dict[str, int]) -> Handlers:
    """Handlers that fail so often for the events of a key."""
    made = Handlers()

    @made.on("order.created")
    async def handle(event: Event) -> None:
        await asyncio.sleep(0)
        if fails.get(event.key or "", 0) > 0:
            fails[event.key or ""] -= 1
            raise RuntimeError("busy")

    return made


def sample(observer: Prometheus, name: str, **labels: str) -> float:
    """A value on the page; 0 if it is not there."""
    told = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    start = f"{name}{{{told}}} " if told else f"{name} "
    lines = observer.page()[1].decode().splitlines()
    return next((float(line.removeprefix(start)) for line in lines if line.startswith(start)), 0.0)


async def test_the_counters_are_what_a_consumer_did(sqlite: SqlOutbox) -> None:
    store, topic = sqlite(), MemoryTopic(2)
    await store.migrate()
    observer = Prometheus(registry=CollectorRegistry())
    nobodys = [make_event(type="nobodys") for _ in range(3)]
    for event in [*numbered("good", 10), *numbered("late", 1), *numbered("dead", 1), *nobodys]:
        topic.send(event)
    settings: dict[str, Any] = {"store": store, "retry": Fixed(0.0), "max_attempts": 3, "observers": [observer]}
    async with Consumer(
        "cards", MemorySource(topic), to=handlers({"late": 2, "dead": 99}), listen="127.0.0.1:0", **settings
    ) as consumer:
        await topic.wait_settled("cards", timeout=WAIT)
        await until(lambda: sample(observer, "consumer_lanes", consumer="cards") == 2)
        topic.fail("cards", 0, "its messages were deleted")
        await until(lambda: sample(observer, "consumer_failed_lanes", consumer="cards") == 1)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{consumer.port}") as client:
            ready = await client.get("/readyz")
            body = {"ready": True, "waits_for": [], "circuits": {"cards": "closed"}}
            assert (ready.status_code, ready.json()) == (200, body)
            assert (await client.get("/livez")).status_code == 200
            assert 'consumer_events_total{consumer="cards",outcome="done"} 11.0' in (await client.get("/metrics")).text
    assert sample(observer, "consumer_events_total", consumer="cards", outcome="skipped") == 3
    assert sample(observer, "consumer_events_total", consumer="cards", outcome="retry") == 5
    assert sample(observer, "consumer_died_total", consumer="cards") == 1
    assert sample(observer, "consumer_inflight", consumer="cards") == 0
    assert "outbox_done_total{" not in observer.page()[1].decode()


async def test_its_circuit_is_its_own() -> None:
    topic, to = MemoryTopic(), MemoryPublisher()
    observer = Prometheus(registry=CollectorRegistry())
    to.down("gone fishing")
    topic.send(make_event(key="a"))
    async with Consumer(
        "cards", MemorySource(topic), to=to, dead_to=MemoryPublisher(), observers=[observer]
    ) as consumer:
        await until(lambda: sample(observer, "consumer_circuit_open", consumer="cards") == 1)
        assert consumer.circuits() != {"cards": "closed"}
        assert consumer.health.answer("GET", "/livez").status == 200
        to.up()
        await topic.wait_settled("cards", timeout=WAIT)
        assert sample(observer, "consumer_circuit_open", consumer="cards") == 0
    assert sample(observer, "consumer_events_total", consumer="cards", outcome="outage") > 0


async def test_without_its_broker_it_is_live_and_not_ready() -> None:
    class Away(MemorySource):
        async def open(self, consumer: str, lanes: Any) -> None:
            raise Outage("the broker is away")

    consumer = Consumer("cards", Away(MemoryTopic()), to=MemoryPublisher(), dead_to=MemoryPublisher())
    assert consumer.health.answer("GET", "/readyz").status == 503
    async with consumer:
        answer = consumer.health.answer("GET", "/readyz")
        assert (answer.status, b"the source" in answer.body) == (503, True)
        assert consumer.health.answer("GET", "/livez").status == 200


async def test_a_consumer_that_has_failed_is_not_live() -> None:
    class Broken(MemorySource):
        async def receive(self, limit: int, seconds: float) -> Any:
            raise ValueError("a bug")

    async with Consumer("cards", Broken(MemoryTopic()), to=MemoryPublisher(), dead_to=MemoryPublisher()) as consumer:
        await until(lambda: consumer.health.answer("GET", "/livez").status == 503)
        assert b"has failed and does not start again" in consumer.health.answer("GET", "/livez").body


async def test_the_trace_of_the_writer_goes_on_in_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    topic = MemoryTopic()
    topic.send(make_event(type="order.created", headers={"traceparent": TRACE}))
    async with Consumer("cards", MemorySource(topic), to=handlers({}), dead_to=MemoryPublisher()):
        await topic.wait_settled("cards", timeout=WAIT)
    (span,) = exporter.get_finished_spans()
    assert span.name == "process order.created"
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == TRACE[3:52]
    provider.shutdown()


async def test_its_address_is_a_setting(on_sqlite: Command) -> None:
    (on_sqlite.folder / "cards.py").write_text(
        "from pillarbox.sources.memory import MemorySource, MemoryTopic\n"
        "from pillarbox import Consumer\n"
        "from pillarbox.publishers.memory import MemoryPublisher\n"
        "cards = Consumer('cards', MemorySource(MemoryTopic()), to=MemoryPublisher(), dead_to=MemoryPublisher(),\n"
        f"    listen='127.0.0.1:{(port := free_port())}')\n"
    )
    consumer = on_sqlite.start("consume", "cards:cards", stdout=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

            async def status() -> int:
                try:
                    return (await client.get("/readyz")).status_code
                except httpx.TransportError:
                    return 0

            await eventually(status, lambda found: found == 200)
    finally:
        consumer.send_signal(signal.SIGTERM)
        _, said = consumer.communicate(timeout=30)
    assert consumer.returncode == 0, said
