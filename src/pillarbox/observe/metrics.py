"""The metrics of Pillarbox: their names, kinds, labels and help. Pure."""

from enum import StrEnum
from typing import Final, NamedTuple


class Kind(StrEnum):
    """The kind of a metric, in the words of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric. The name of a counter is that of its samples, with ``_total``."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    splits: bool = False  # whether it has the labels topic and tenant, where lists of them are given


def _counter(name: str, help: str, *labels: str, splits: bool = False) -> Metric:
    return Metric(name, Kind.COUNTER, labels or ("stream",), help, splits)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, ("stream", *labels), help)


def _of_consumer(name: str, help: str) -> Metric:
    return Metric(name, Kind.GAUGE, ("consumer",), help)


def _histogram(name: str, help: str, label: str = "stream") -> Metric:
    return Metric(name, Kind.HISTOGRAM, (label,), help)


NEW: Final = _counter(
    "outbox_new_total", "Events that writers added, those of transactions that rolled back included", splits=True
)
DONE: Final = _counter(
    "outbox_done_total", "Events that were published and marked as published in the database", splits=True
)
FAILED: Final = _counter(
    "outbox_failed_total",
    "Failed attempts to publish an event; outcome: retry, rejected, or outage (uncharged)",
    "stream",
    "outcome",
    splits=True,
)
DIED: Final = _counter(
    "outbox_died_total", "Events that died of an error of their own; without those that a parked key took along"
)
REFUSED: Final = _counter(
    "outbox_settle_refused_total", "Results of events that the database refused, because another worker has them now"
)
TAKEOVERS: Final = _counter("outbox_takeovers_total", "Shards that were taken over from a worker that died or hung")
RESCUED: Final = _counter("outbox_rescued_total", "Events that were taken from a worker that died or hung")
DUPLICATES: Final = _counter(
    "outbox_duplicates_total", "Published events whose results were refused: consumers get a copy of each"
)
INBOX: Final = _counter(
    "inbox_events_total", "Events that a consumer asked its inbox about; result: new or copy", "consumer", "result"
)
REQUESTS: Final = _counter(
    "idempotency_requests_total",
    "Requests that Idempotency served; outcome: done, unkeyed, replayed, busy, mismatch, unfinished, failed or "
    "unavailable",
    "outcome",
)
CONSUMED: Final = _counter(
    "consumer_events_total",
    "Events that a consumer gave to its destination; outcome: done, skipped (no handler), retry, rejected, outage",
    "consumer",
    "outcome",
)
BURIED: Final = _counter(
    "consumer_died_total", "Events that died in a consumer, and are kept as dead letters", "consumer"
)

INFLIGHT: Final = _gauge("outbox_inflight", "Events that this process is publishing now")
CIRCUIT_OPEN: Final = _gauge("outbox_circuit_open", "1 while this process waits for the stream's destination")
BACKLOG: Final = _gauge("outbox_backlog", "Events that wait to be published, scheduled ones not counted; capped")
EVENTS: Final = _gauge("outbox_events", "Events in the outbox by state, published ones not counted; capped", "state")
DEAD: Final = _gauge("outbox_dead", "Dead letters; capped")
LAG: Final = _gauge("outbox_lag_seconds", "Age of the oldest event that waits to be published")
KEYS_HELD: Final = _gauge("outbox_keys_held", "Keys that wait behind a failed or dead event; capped", "mode")
PAUSED: Final = _gauge("outbox_paused", "1 while an operator has paused the stream")
WORKERS: Final = _gauge("outbox_workers", "Live workers of the stream, in all relays")
SAMPLE_AGE: Final = Metric(
    "outbox_sample_age_seconds", Kind.GAUGE, (), "Time since this process last read the gauges from the database"
)

CONSUMER_INFLIGHT: Final = _of_consumer("consumer_inflight", "Events that this process gives to the destination now")
CONSUMER_CIRCUIT: Final = _of_consumer("consumer_circuit_open", "1 while this process waits for the destination")
CONSUMER_LANES: Final = _of_consumer("consumer_lanes", "Lanes that this process reads: on Kafka partitions")
CONSUMER_PAUSED: Final = _of_consumer("consumer_paused_lanes", "Lanes that are paused, because their window is full")
CONSUMER_FAILED: Final = _of_consumer("consumer_failed_lanes", "Lanes that bring no more until somebody acts")
CONSUMER_KEYS: Final = _of_consumer("consumer_keys_held", "Keys that wait behind a failed event")
CONSUMER_LAG: Final = _of_consumer("consumer_lag_events", "Messages of these lanes that are not settled")
CONSUMER_LAG_SECONDS: Final = _of_consumer("consumer_lag_seconds", "Age of the oldest message that is not settled")

LATENCY: Final = _histogram(
    "outbox_publish_latency_seconds", "Time from writing an event, or its instant, until the destination confirmed it"
)
PUBLISH_DURATION: Final = _histogram("outbox_publish_duration_seconds", "Duration of one call of the publisher")
SETTLE_DURATION: Final = _histogram("outbox_settle_duration_seconds", "Duration of one settle in the database")
CONSUME_DURATION: Final = _histogram(
    "consumer_duration_seconds", "Duration of one call of a consumer's destination", "consumer"
)

METRICS: Final = (
    *(NEW, DONE, FAILED, DIED, REFUSED, TAKEOVERS, RESCUED, DUPLICATES, INBOX, REQUESTS, CONSUMED, BURIED),
    *(INFLIGHT, CIRCUIT_OPEN, BACKLOG, EVENTS, DEAD, LAG, KEYS_HELD, PAUSED, WORKERS, SAMPLE_AGE),
    *(CONSUMER_INFLIGHT, CONSUMER_CIRCUIT, CONSUMER_LANES, CONSUMER_PAUSED, CONSUMER_FAILED, CONSUMER_KEYS),
    *(CONSUMER_LAG, CONSUMER_LAG_SECONDS),
    *(LATENCY, PUBLISH_DURATION, SETTLE_DURATION, CONSUME_DURATION),
)

# Upper bounds in seconds: fine below a second, where a healthy relay is, and up to an hour for an outage.
LATENCY_BOUNDS: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    900.0,
    3600.0,
)
DURATION_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
