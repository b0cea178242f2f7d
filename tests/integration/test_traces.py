"""Traces: from a request through the outbox to what its event causes, seen with the SDK of OpenTelemetry."""

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pillarbox import Consumer, Handlers, Outbox
from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.event import Event, Status
from pillarbox.observe import metrics
from pillarbox.observe.opentelemetry import SEMANTIC_CONVENTIONS, OpenTelemetry
from pillarbox.publisher import PUBLISHED, rejected, retry
from pillarbox.publishers.kafka import KafkaPublisher
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.store import Store
from pillarbox.stores.sqlite import SqliteStore
from servers import Kafka
from tests.integration.relays import STREAM, SqlOutbox, relay, settled, stream
from tests.integration.test_kafka_source import Cluster

SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"


class Spans:
    """The spans that ended, by name."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    @property
    def ended(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return sorted(span.name for span in self._exporter.get_finished_spans())


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """As the application's global provider, which handlers use."""
    found = Spans()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", found.provider)
    yield found
    found.provider.shutdown()


def observer(spans: Spans) -> OpenTelemetry:
    return OpenTelemetry(meter_provider=MeterProvider(), tracer_provider=spans.provider)


def about(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def trace_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def published(observer: OpenTelemetry, events: list[Event], outcomes: Any = None, shard: int | None = 0) -> None:
    batch = Batch.of(events, STREAM)
    if shard is not None:
        batch = Batch(STREAM, [batch.parts[0]._replace(shard=shard)])
    observer.before_publish(batch)
    observer.after_publish(batch, outcomes or [PUBLISHED] * len(events), 0.01)


def event(traceparent: str | None = SAMPLED, **fields: Any) -> Event:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    return make_event(**{"stream": STREAM, "headers": headers, **fields})


@pytest.mark.asyncio
async def test_one_trace_from_the_request_to_the_projection(tmp_path: Path, spans: Spans) -> None:
    path = tmp_path / "shop.db"
    store = SqliteStore(str(path))
    await store.migrate()
    await store.open()
    outbox, tracer = Outbox(), trace.get_tracer("shop")
    orders, mails = Handlers(), MemoryPublisher()

    @orders.on("order.created")
    def project(event: Event) -> None:
        with tracer.start_as_current_span("UPDATE projection"), sqlite3.connect(path, isolation_level=None) as tx:
            tx.execute("BEGIN")
            outbox.add(tx, "mail.wanted", {}, stream="mail")
            tx.execute("COMMIT")
            tx.execute("SELECT 1")

    with tracer.start_as_current_span("POST /orders"), sqlite3.connect(path, isolation_level=None) as tx:
        tx.execute("BEGIN")
        outbox.add(tx, "order.created", {}, stream=STREAM, key="7")
        tx.execute("COMMIT")
    async with relay(
        SqliteStore(str(path)), stream(orders), stream(mails, name="mail"), observers=[observer(spans)]
    ) as running:
        await settled(store, {Status.PUBLISHED: 1})
        await settled(store, {Status.PUBLISHED: 1}, name="mail")
        await running.drain()
    await store.close()

    request, process = spans.one("POST /orders"), spans.one("process order.created")
    projection, publish, mail = (
        spans.one("UPDATE projection"),
        spans.one(f"publish {STREAM}"),
        spans.one("publish mail"),
    )
    assert parent_of(publish) == parent_of(process) == id_of(request)
    assert parent_of(projection) == id_of(process)
    assert parent_of(mail) == id_of(projection)
    traces = {each.get_span_context().trace_id for each in (request, process, projection, publish, mail)}  # type: ignore[union-attr]
    assert len(traces) == 1
    assert (process.kind, publish.kind) == (SpanKind.CONSUMER, SpanKind.PRODUCER)
    assert about(publish)["outbox.wait_seconds"] >= 0
    assert (about(publish)["outbox.attempt"], about(publish)["outbox.outcome"]) == (1, "published")
    assert about(publish)["messaging.system"] == "handlers"
    (written,) = (each for each in mails.deliveries)
    assert written.headers["traceparent"].split("-")[2] == f"{id_of(projection):016x}"


@pytest.mark.asyncio
@pytest.mark.parametrize("envelope", ["raw", "legacy", "cloudevents", "cloudevents_structured"])
async def test_one_trace_through_a_broker_to_the_projection_of_a_consumer(
    tmp_path: Path, kafka: Kafka, spans: Spans, envelope: str
) -> None:
    path, topic = tmp_path / "shop.db", Cluster(kafka).topic()
    store = SqliteStore(str(path))
    await store.migrate()
    outbox, tracer = Outbox(), trace.get_tracer("shop")
    cards, done = Handlers(), asyncio.Event()

    @cards.on("*")
    async def project(event: Event) -> None:
        with tracer.start_as_current_span("UPDATE projection"):
            done.set()

    with tracer.start_as_current_span("POST /orders"), sqlite3.connect(path, isolation_level=None) as tx:
        tx.execute("BEGIN")
        outbox.add(tx, "order.created", {"id": 7}, stream=STREAM, key="7")
        tx.execute("COMMIT")
    to = KafkaPublisher(servers=kafka.bootstrap_servers, topic=topic, envelope=envelope)
    source = f"kafka://{kafka.bootstrap_servers}?topic={topic}&group=g-{topic}"
    dead = MemoryPublisher()
    async with relay(SqliteStore(str(path)), stream(to), observers=[observer(spans)]) as running:
        await running.drain()
        async with Consumer("cards", source, to=cards, dead_to=dead), asyncio.timeout(60):
            await done.wait()

    request, publish, projection = (
        spans.one(name) for name in ("POST /orders", f"publish {STREAM}", "UPDATE projection")
    )
    (process,) = (span for span in spans.ended if span.name.startswith("process "))
    assert parent_of(publish) == parent_of(process) == id_of(request)
    assert parent_of(projection) == id_of(process)
    assert {trace_of(each) for each in (publish, process, projection)} == {trace_of(request)}
    assert process.kind is SpanKind.CONSUMER
    assert not dead.deliveries


def test_a_call_has_one_span_with_links_to_the_writers(spans: Spans) -> None:
    published(observer(spans), [event(), event(UNSAMPLED), event(None), event(topic="sales")])
    call = spans.one(f"send {STREAM}")
    assert (call.kind, call.parent, len(call.links)) == (SpanKind.CLIENT, None, 2)
    assert {f"{link.context.span_id:016x}" for link in call.links} == {"00f067aa0ba902b7"}
    assert about(call)["messaging.batch.message_count"] == 4
    assert len(spans.named(f"publish {STREAM}")) == len(spans.named("publish sales")) == 1
    assert all(span.links[0].context.span_id == id_of(call) for span in spans.named(f"publish {STREAM}"))


def test_a_call_has_at_most_128_links(spans: Spans) -> None:
    published(observer(spans), [event() for _ in range(300)])
    assert len(spans.one(f"send {STREAM}").links) == 128
    assert len(spans.named(f"publish {STREAM}")) == 300


@pytest.mark.parametrize("traceparent", [None, UNSAMPLED, "", "nonsense", "00-1-2-zz", SAMPLED[:-2]])
def test_events_that_nobody_records_have_no_spans(spans: Spans, traceparent: str | None) -> None:
    published(observer(spans), [event(traceparent), event(traceparent)])
    assert spans.names == []


def test_a_failed_event_has_its_error_and_its_attempt(spans: Spans) -> None:
    events = [event(attempts=2), event(attempts=0), event()]
    published(observer(spans), events, [retry("the mail server is full"), rejected("no such address"), PUBLISHED])
    found = {about(span)["messaging.message.id"]: span for span in spans.named(f"publish {STREAM}")}
    late, refused, fine = (found[str(each.id)] for each in events)
    assert (about(late)["outbox.outcome"], about(late)["outbox.attempt"]) == ("retry", 3)
    assert (late.status.status_code, late.status.description) == (StatusCode.ERROR, "retry")
    assert about(refused)["outbox.outcome"] == "rejected"
    assert fine.status.status_code is StatusCode.UNSET
    assert spans.one(f"send {STREAM}").status.description == "2 of 3 events were not published"


def test_the_attempt_of_a_claim_is_charged_already(spans: Spans) -> None:
    published(observer(spans), [event(attempts=2)], shard=None)
    assert about(spans.one(f"publish {STREAM}"))["outbox.attempt"] == 2


def test_spans_of_the_destinations_client_belong_to_the_call(spans: Spans) -> None:
    own, tracer = observer(spans), spans.provider.get_tracer("client")
    batch = Batch.of([event()], STREAM)
    with tracer.start_as_current_span("the application"):
        own.before_publish(batch)
        tracer.start_span("produce").end()
        own.after_publish(batch, [PUBLISHED], 0.01)
        tracer.start_span("later").end()
    call = spans.one(f"send {STREAM}")
    assert parent_of(spans.one("produce")) == id_of(call)
    assert parent_of(spans.one("later")) == id_of(spans.one("the application"))


def test_a_call_that_raises_ends_its_span(spans: Spans) -> None:
    own, batch = observer(spans), Batch.of([event()], STREAM)
    own.before_publish(batch)
    own.call_failed("publish", (batch,), ValueError("payload: secret"), 0.01)
    call = spans.one(f"send {STREAM}")
    assert (call.status.status_code, call.status.description) == (StatusCode.ERROR, "ValueError")
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.asyncio
async def test_a_handler_that_fails_tells_no_payload(sqlite: SqlOutbox, store: Store, spans: Spans) -> None:
    handlers = Handlers()

    @handlers.on("order.created")
    async def fail(event: Event) -> None:
        await asyncio.sleep(0)
        raise ValueError("payload: secret")

    await store.add([event(type="order.created")])
    async with relay(sqlite(), stream(handlers, max_attempts=1), observers=[observer(spans)]):
        await settled(store, {Status.DEAD: 1})
    span = spans.one("process order.created")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "ValueError")
    assert "secret" not in span.to_json() + spans.one(f"publish {STREAM}").to_json()
    assert span.events == ()


def test_the_bytes_of_an_event_do_not_change(spans: Spans) -> None:
    first = event()
    published(observer(spans), [first])
    assert first.headers == {"traceparent": SAMPLED}


def read(reader: InMemoryMetricReader) -> dict[str, Any]:
    """The points of each instrument, by its name."""
    data = reader.get_metrics_data()
    assert data is not None
    (resource,) = data.resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.schema_url.endswith(SEMANTIC_CONVENTIONS)
    return {each.name: list(each.data.data_points) for each in scope.metrics}


def test_the_instruments_are_those_of_prometheus_and_of_messaging(spans: Spans) -> None:
    reader = InMemoryMetricReader()
    own = OpenTelemetry(meter_provider=MeterProvider([reader]), tracer_provider=spans.provider)
    own.serves(STREAM, "kafka localhost:9092")
    published(own, [event() for _ in range(1000)], [*[PUBLISHED] * 998, retry("later"), rejected("no")])
    own.added([event()])
    own.request_served("done")
    own.inbox_asked("mailer", 1, 2)
    found = read(reader)

    names = {each.name.removesuffix("_total") for each in metrics.METRICS}
    assert found.keys() <= names | {"messaging.client.operation.duration", "messaging.client.sent.messages"}
    assert {point.attributes["outcome"]: point.value for point in found["outbox_failed"]} == {
        "retry": 1,
        "rejected": 1,
        "outage": 0,
    }
    assert [point.value for point in found["outbox_new"]] == [1]
    (sent,) = found["messaging.client.sent.messages"]
    assert (sent.value, sent.attributes["messaging.system"]) == (998, "kafka")
    (operation,) = found["messaging.client.operation.duration"]
    assert (operation.count, operation.attributes["error.type"]) == (1, "retry")
    (latency,) = found["outbox_publish_latency_seconds"]
    assert 90 <= latency.count <= 100  # a sample of the events of a call
    assert latency.explicit_bounds == metrics.LATENCY_BOUNDS


def test_the_ids_of_events_are_no_attributes_of_metrics(spans: Spans) -> None:
    reader = InMemoryMetricReader()
    own = OpenTelemetry(meter_provider=MeterProvider([reader]), tracer_provider=spans.provider)
    published(own, [event(key="secret", tenant="acme", topic="orders", id=UUID(int=7))])
    values = {str(value) for points in read(reader).values() for point in points for value in point.attributes.values()}
    assert values == {STREAM, "unknown", "send"}
