"""Metrics: each counter, gauge and histogram counts what was reported, and the page is valid OpenMetrics."""

import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError
from pillarbox.event import Event, Mode, Status
from pillarbox.observe import Observers
from pillarbox.observe.metrics import LATENCY_BOUNDS, METRICS, Kind
from pillarbox.observe.prometheus import Prometheus
from pillarbox.observe.tally import OTHER
from pillarbox.publisher import PUBLISHED, UNTRIED, outage, rejected, retry
from pillarbox.store import (
    PARKED,
    Claim,
    ClaimResults,
    Failure,
    Grant,
    HoldMode,
    Progress,
    Rescued,
    Settlement,
    StreamGauges,
)
from pillarbox.store.consumers import ConsumerReport

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
MINE = Grant("orders", 0, "ann", 7)
LOST = Grant("orders", 1, "ann", 8)

# By the name of a sample and its labels: the value.
Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def fresh(**options: Any) -> Prometheus:
    return Prometheus(registry=CollectorRegistry(), **options)


def families_of(page: bytes) -> list[Metric]:
    """The families of a page of OpenMetrics."""
    return list(text_string_to_metric_families(page.decode()))  # type: ignore[no-untyped-call]


def samples(prometheus: Prometheus) -> Samples:
    content_type, page = prometheus.page(OPEN_METRICS)
    assert content_type.startswith("application/openmetrics-text")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families_of(page)
        for sample in family.samples
    }


def value(prometheus: Prometheus, name: str, **labels: str) -> float | None:
    return samples(prometheus).get((name, frozenset(labels.items())))


def event(**fields: Any) -> Event:
    return make_event(**{"stream": "orders", **fields})


def results(prometheus: Prometheus) -> None:
    """One of each result: a settled turn and a refused one."""
    published = [event() for _ in range(5)]
    dead = [Failure(event(), "no", 1), Failure(event(), PARKED, 0)]
    stale = Settlement(LOST, published=published[3:], failed=[Failure(event(), "later", 1)])
    prometheus.after_settle([Settlement(MINE, published=published[:3], dead=dead), stale], [stale], 0.004)


def claims(prometheus: Prometheus) -> None:
    """Five claims of a queue stream, of which two were refused."""
    events = [event() for _ in range(5)]
    prometheus.after_settle_claims([Claim(each, 1) for each in events], ClaimResults(published=events), 2, 0.004)


def outcomes(prometheus: Prometheus) -> None:
    batch = Batch.of([event() for _ in range(6)], "orders")
    told = [PUBLISHED, retry("later"), rejected("no"), rejected("never"), outage("away"), UNTRIED]
    prometheus.before_publish(batch)
    prometheus.after_publish(batch, told, 0.02)


def consumed(prometheus: Prometheus) -> None:
    batch = Batch.of([event() for _ in range(7)], "mailer")
    told = [PUBLISHED, PUBLISHED, PUBLISHED, retry("later"), rejected("no"), outage("away"), UNTRIED]
    prometheus.before_consume(batch)
    prometheus.after_consume(batch, told, 0.02)


def takes(prometheus: Prometheus) -> None:
    previous = ["bob", "bob", "ann", None]
    prometheus.after_take("orders", [MINE._replace(previous=each) for each in previous], 0.01)


def inbox(prometheus: Prometheus) -> None:
    prometheus.inbox_asked("mailer", 3, 1)


def requests(prometheus: Prometheus) -> None:
    for outcome in ("done", "replayed", "replayed"):
        prometheus.request_served(outcome)


@pytest.mark.parametrize(
    ("name", "labels", "happen", "expected"),
    [
        ("outbox_new_total", {"stream": "orders"}, lambda each: each.added([event(), event()]), 2),
        ("outbox_done_total", {"stream": "orders"}, results, 3),
        ("outbox_done_total", {"stream": "orders"}, claims, 3),
        ("outbox_failed_total", {"stream": "orders", "outcome": "retry"}, outcomes, 1),
        ("outbox_failed_total", {"stream": "orders", "outcome": "rejected"}, outcomes, 2),
        ("outbox_failed_total", {"stream": "orders", "outcome": "outage"}, outcomes, 1),
        ("outbox_died_total", {"stream": "orders"}, results, 1),
        ("outbox_died_total", {"stream": "orders"}, lambda each: each.after_rescue("orders", Rescued(4, 2), 0.1), 2),
        ("outbox_settle_refused_total", {"stream": "orders"}, results, 3),
        ("outbox_settle_refused_total", {"stream": "orders"}, claims, 2),
        ("outbox_takeovers_total", {"stream": "orders"}, takes, 2),
        ("outbox_rescued_total", {"stream": "orders"}, lambda each: each.after_rescue("orders", Rescued(4, 2), 0.1), 6),
        ("outbox_duplicates_total", {"stream": "orders"}, results, 2),
        ("outbox_duplicates_total", {"stream": "orders"}, claims, 2),
        ("inbox_events_total", {"consumer": "mailer", "result": "new"}, inbox, 3),
        ("inbox_events_total", {"consumer": "mailer", "result": "copy"}, inbox, 1),
        ("consumer_events_total", {"consumer": "mailer", "outcome": "done"}, consumed, 3),
        ("consumer_events_total", {"consumer": "mailer", "outcome": "retry"}, consumed, 1),
        ("consumer_events_total", {"consumer": "mailer", "outcome": "rejected"}, consumed, 1),
        ("consumer_events_total", {"consumer": "mailer", "outcome": "outage"}, consumed, 1),
        ("consumer_died_total", {"consumer": "mailer"}, lambda each: each.event_buried("mailer", event()), 1),
        ("idempotency_requests_total", {"outcome": "replayed"}, requests, 2),
    ],
)
def test_a_counter_counts(
    name: str, labels: dict[str, str], happen: Callable[[Prometheus], None], expected: int
) -> None:
    prometheus = fresh()
    assert value(prometheus, name, **labels) is None
    for times in (1, 2):
        happen(prometheus)
        assert value(prometheus, name, **labels) == expected * times


def test_what_a_recovery_settles_is_done_and_its_refused_settle_made_no_copy() -> None:
    prometheus = fresh()
    stale = Settlement(LOST, published=[event(), event()], ticket=b"ticket")
    prometheus.after_settle([stale], [stale], 0.004)
    prometheus.after_recover(MINE, b"ticket", Progress(None, 2), 0.004)
    assert value(prometheus, "outbox_settle_refused_total", stream="orders") == 2
    assert value(prometheus, "outbox_duplicates_total", stream="orders") == 0
    assert value(prometheus, "outbox_done_total", stream="orders") == 2

    split = fresh(topics=["sales"], tenants=["acme"])
    split.after_recover(MINE, b"ticket", Progress(None, 3), 0.004)
    assert value(split, "outbox_done_total", stream="orders", topic=OTHER, tenant=OTHER) == 3


def test_every_counter_is_tried_above() -> None:
    marks = next(mark for mark in test_a_counter_counts.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    assert {case[0] for case in marks.args[1]} == {each.name for each in METRICS if each.kind is Kind.COUNTER}


def test_the_gauges_of_a_sample() -> None:
    counts = {
        Status.PENDING: 5,
        Status.FAILED: 2,
        Status.HELD: 3,
        Status.PROCESSING: 1,
        Status.SCHEDULED: 7,
        Status.DEAD: 4,
    }
    held = {HoldMode.BLOCKED: 2}
    prometheus = fresh()
    assert value(prometheus, "outbox_sample_age_seconds") is None
    prometheus.sampled([StreamGauges("orders", Mode.ORDERED, "x", True, counts, (), 12.5, held, 3, 1)], 0.01)

    found = {
        (name, *sorted(text for _, text in labels)): number for (name, labels), number in samples(prometheus).items()
    }
    assert found["outbox_backlog", "orders"] == 11
    states = {"pending": 5, "failed": 2, "held": 3, "processing": 1, "scheduled": 7}
    by_state = {key[1:]: number for key, number in found.items() if key[0] == "outbox_events"}
    assert by_state == {tuple(sorted((state, "orders"))): number for state, number in states.items()}
    assert (found["outbox_dead", "orders"], found["outbox_lag_seconds", "orders"]) == (4, 12.5)
    assert (found["outbox_keys_held", "blocked", "orders"], found["outbox_keys_held", "orders", "parked"]) == (2, 0)
    assert (found["outbox_paused", "orders"], found["outbox_workers", "orders"]) == (1, 3)
    assert 0 <= found["outbox_sample_age_seconds",] < 60


def test_a_stream_that_is_gone_has_no_gauges_any_more() -> None:
    prometheus = fresh()
    prometheus.sampled([StreamGauges("orders", None, None, False, {}, (), None, {}, 0, 0)], 0.01)
    assert value(prometheus, "outbox_lag_seconds", stream="orders") == 0
    prometheus.sampled([], 0.01)
    assert value(prometheus, "outbox_lag_seconds", stream="orders") is None


def test_events_are_in_flight_until_their_call_ends_or_raises() -> None:
    prometheus, batch = fresh(), Batch.of([event(), event()], "orders")
    prometheus.before_publish(batch)
    prometheus.before_publish(batch)
    assert value(prometheus, "outbox_inflight", stream="orders") == 4
    prometheus.after_publish(batch, [PUBLISHED, PUBLISHED], 0.1)
    assert value(prometheus, "outbox_inflight", stream="orders") == 2
    prometheus.call_failed("publish", (batch,), ValueError("a bug"), 0.1)
    assert value(prometheus, "outbox_inflight", stream="orders") == 0


def test_a_consumers_gauges_are_what_it_tells_of_itself() -> None:
    prometheus = fresh()
    prometheus.consumer_reported("mailer", ConsumerReport("kafka", 4, 1, 2, 30, 1.5))
    names = ("lanes", "paused_lanes", "keys_held", "lag_events", "lag_seconds", "circuit_open")

    def found() -> list[float | None]:
        return [value(prometheus, f"consumer_{name}", consumer="mailer") for name in names]

    assert found() == [4, 1, 2, 30, 1.5, 0]
    prometheus.consumer_circuit_changed("mailer", "open")
    prometheus.consumer_reported("mailer", ConsumerReport("kafka", 4, 1, 2, None, None))
    assert found() == [4, 1, 2, None, None, 1]


def test_events_of_a_consumer_are_in_flight_until_their_call_ends_or_raises() -> None:
    prometheus, batch = fresh(), Batch.of([event(), event()], "mailer")
    prometheus.before_consume(batch)
    prometheus.before_consume(batch)
    assert value(prometheus, "consumer_inflight", consumer="mailer") == 4
    prometheus.after_consume(batch, [PUBLISHED, PUBLISHED], 0.02)
    prometheus.call_failed("consume", (batch,), ValueError("a bug"), 0.1)
    assert value(prometheus, "consumer_inflight", consumer="mailer") == 0
    assert value(prometheus, "consumer_duration_seconds_count", consumer="mailer") == 1


@pytest.mark.parametrize(("state", "expected"), [("open", 1), ("half_open", 1), ("closed", 0)])
def test_the_circuit(state: str, expected: int) -> None:
    prometheus = fresh()
    prometheus.circuit_changed("orders", state)
    assert value(prometheus, "outbox_circuit_open", stream="orders") == expected


def test_the_latency_is_that_of_published_events_since_they_were_written_or_due() -> None:
    now = datetime.now(UTC)
    old = event(created_at=now - timedelta(seconds=20))
    due = event(created_at=now - timedelta(days=3), available_at=now - timedelta(seconds=20))
    ahead = event(created_at=now + timedelta(minutes=5))
    failed = event(created_at=now - timedelta(days=3))
    prometheus, batch = fresh(), Batch.of([old, due, ahead, failed], "orders")
    prometheus.before_publish(batch)
    prometheus.after_publish(batch, [PUBLISHED, PUBLISHED, PUBLISHED, retry("later")], 0.02)

    def bucket(bound: str) -> float | None:
        return value(prometheus, "outbox_publish_latency_seconds_bucket", stream="orders", le=bound)

    assert [bucket(bound) for bound in ("0.005", "10.0", "30.0", "+Inf")] == [1, 1, 3, 3]
    total = value(prometheus, "outbox_publish_latency_seconds_sum", stream="orders")
    assert total is not None
    assert 40 <= total < 60
    assert value(prometheus, "outbox_publish_latency_seconds_count", stream="orders") == 3


@pytest.mark.parametrize(
    ("name", "happen"), [("outbox_publish_duration_seconds", outcomes), ("outbox_settle_duration_seconds", results)]
)
def test_a_duration_is_that_of_a_call(name: str, happen: Callable[[Prometheus], None]) -> None:
    prometheus = fresh()
    happen(prometheus)
    happen(prometheus)
    assert value(prometheus, f"{name}_count", stream="orders") == 2
    assert value(prometheus, f"{name}_bucket", stream="orders", le="0.0025") == 0
    assert value(prometheus, f"{name}_bucket", stream="orders", le="0.025") == 2


def test_topics_and_tenants_get_a_label_only_if_they_are_listed() -> None:
    prometheus = fresh(topics=["sales"], tenants=["acme"])
    known, strange = event(topic="sales", tenant="acme"), event(topic=f"topic-{uuid4()}", tenant="somebody")
    prometheus.added([known, strange, event(topic="sales", tenant="somebody")])

    def count(topic: str, tenant: str) -> float | None:
        return value(prometheus, "outbox_new_total", stream="orders", topic=topic, tenant=tenant)

    assert [count("sales", "acme"), count("sales", OTHER), count(OTHER, OTHER)] == [1, 1, 1]
    assert len([name for name, _ in samples(prometheus) if name == "outbox_new_total"]) == 3


def test_a_text_is_no_list_of_topics() -> None:
    with pytest.raises(ConfigError, match=r"topics is a text; give a list of names, for example topics=\['sales'\]"):
        fresh(topics="sales")


def test_a_second_one_on_the_same_registry_is_refused() -> None:
    registry = CollectorRegistry()
    first = Prometheus(registry=registry)
    with pytest.raises(ConfigError, match="share one Prometheus"):
        Prometheus(registry=registry)
    first.close()
    Prometheus(registry=registry)


def test_the_page_is_valid_in_both_formats_and_has_each_family_once() -> None:
    prometheus = fresh()
    for happen in (results, claims, outcomes, takes, inbox, requests):
        happen(prometheus)
    prometheus.sampled([StreamGauges("orders", None, None, False, {}, (), None, {}, 0, 0)], 0.01)
    families = families_of(prometheus.page(OPEN_METRICS)[1])
    plain = list(parse_text(prometheus.page()[1].decode()))

    expected = {(each.name.removesuffix("_total"), str(each.kind)) for each in METRICS}
    assert {(family.name, family.type) for family in families} == expected
    assert {(family.name.removesuffix("_total"), family.type) for family in plain} == expected
    assert len(families) == len(expected)
    assert all(family.documentation for family in families)


def test_bounds_rise() -> None:
    assert sorted(set(LATENCY_BOUNDS)) == list(LATENCY_BOUNDS)


def test_events_that_many_threads_add_are_all_counted() -> None:
    prometheus = fresh()

    def work() -> None:
        for _ in range(500):
            prometheus.added([event()])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(prometheus, "outbox_new_total", stream="orders") == 2000


def test_an_error_in_a_hook_does_not_stop_the_count(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Prometheus):
        def request_served(self, outcome: str) -> None:
            raise ValueError("a bug")

    prometheus, broken = fresh(), Broken(registry=CollectorRegistry())
    observers = Observers([broken, prometheus])
    observers.request_served("done")
    observers.request_served("done")
    assert value(prometheus, "idempotency_requests_total", outcome="done") == 2
    assert [getattr(record, "action", None) for record in caplog.records] == ["observer_failed"]
