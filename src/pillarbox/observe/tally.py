"""Counts of what relays and applications do, which the exporters read."""

import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any, Final

from pillarbox.batch import Batch
from pillarbox.errors import ConfigError
from pillarbox.event import Event, Status
from pillarbox.observe import metrics
from pillarbox.observe.metrics import Metric
from pillarbox.observe.observer import Observer
from pillarbox.publisher import PUBLISHED, SKIPPED, Outcome, Result
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

# The values of a metric's labels, in the order of their names.
Labels = tuple[str, ...]

OTHER: Final = "other"
_NOTHING: Final = timedelta()
_CREATED_AT: Final = itemgetter(Event._fields.index("created_at"))
_AVAILABLE_AT: Final = itemgetter(Event._fields.index("available_at"))
_WAITING: Final = (Status.PENDING, Status.PROCESSING, Status.FAILED, Status.HELD)
_OUTCOMES: Final = ("retry", "rejected", "outage")
_OF_STREAMS: Final = (metrics.DIED, metrics.REFUSED, metrics.TAKEOVERS, metrics.RESCUED, metrics.DUPLICATES)
_STATES: Final = (*_WAITING, Status.SCHEDULED)


class Histogram:
    """Counts values by the first upper bound that is not below them; the last count has no bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_ages(self, instants: list[datetime], now: datetime) -> None:
        """Count the seconds from each of these instants until now. An instant that is to come counts as now."""
        # Sorted, so that a large call costs a few looks for each bucket and not one for each event.
        instants.sort()
        after = len(instants)
        past = instants[: bisect_right(instants, now)]
        # Not by datetime.timestamp, which costs more than all the rest.
        self.sum += sum(map(now.__sub__, past), _NOTHING).total_seconds()
        for place, bound in enumerate(self.bounds):
            if not after:
                return
            first = bisect_left(instants, now - timedelta(seconds=bound))
            self.counts[place] += after - first
            after = first
        self.counts[-1] += after


class Tally(Observer):
    """Counts what is reported to it. Relays, outboxes, inboxes and idempotency keys of one process may share it.

    topics, tenants: those that get a label of their own; all others are counted as ``other``. None: no such label.
    """

    def __init__(self, *, topics: Iterable[str] | None = None, tenants: Iterable[str] | None = None) -> None:
        self._topics = _labels_of("topics", topics)
        self._tenants = _labels_of("tenants", tenants)
        self._splits = self._topics is not None or self._tenants is not None
        # Applications write in many threads.
        self._lock = threading.Lock()
        self._counters: dict[Metric, Counter[Labels]] = defaultdict(Counter)
        self._histograms: dict[Metric, dict[str, Histogram]] = defaultdict(dict)
        self._in_flight: Counter[str] = Counter()
        self._consuming: Counter[str] = Counter()
        self._consumers: dict[Metric, dict[Labels, float]] = defaultdict(dict)
        self._circuits: dict[str, float] = {}
        self._gauges: Sequence[StreamGauges] = ()
        self._sampled_at: float | None = None

    def labels(self, metric: Metric) -> tuple[str, ...]:
        """The names of the metric's labels."""
        if not metric.splits:
            return metric.labels
        topic = ("topic",) if self._topics is not None else ()
        tenant = ("tenant",) if self._tenants is not None else ()
        return (*metric.labels, *topic, *tenant)

    def counts(self, metric: Metric) -> Mapping[Labels, int]:
        """The values of a counter."""
        with self._lock:
            return dict(self._counters[metric])

    def histograms(self, metric: Metric) -> Mapping[Labels, tuple[Sequence[int], float]]:
        """By labels: the counts of a histogram by bucket, and the sum of its values."""
        with self._lock:
            return {(stream,): (list(each.counts), each.sum) for stream, each in self._histograms[metric].items()}

    def values(self) -> Mapping[Metric, Mapping[Labels, float]]:
        """The values of all gauges."""
        with self._lock:
            found: dict[Metric, dict[Labels, float]] = {
                metrics.INFLIGHT: {(stream,): count for stream, count in self._in_flight.items()},
                metrics.CIRCUIT_OPEN: {(stream,): value for stream, value in self._circuits.items()},
            }
            found[metrics.CONSUMER_INFLIGHT] = {(consumer,): count for consumer, count in self._consuming.items()}
            found.update({metric: dict(values) for metric, values in self._consumers.items()})
            gauges, sampled_at = self._gauges, self._sampled_at
        found.update(_sampled(gauges))
        if sampled_at is not None:
            found[metrics.SAMPLE_AGE] = {(): time.monotonic() - sampled_at}
        return found

    def serves(self, stream: str, destination: str) -> None:
        """Begin at zero, so that a monitor sees the first change too."""
        with self._lock:
            self._in_flight[stream] += 0
            self._circuits.setdefault(stream, 0.0)
            for metric in _OF_STREAMS:
                self._counters[metric][stream,] += 0
            if not self._splits:
                self._counters[metrics.DONE][stream,] += 0
                for outcome in _OUTCOMES:
                    self._counters[metrics.FAILED][stream, outcome] += 0

    def before_publish(self, batch: Batch) -> None:
        with self._lock:
            self._in_flight[batch.stream] += len(batch)

    def after_publish(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
        stream = batch.stream
        if outcomes.count(PUBLISHED) == len(batch):
            published: Sequence[Event] = batch
        else:
            published = [event for event, outcome in zip(batch, outcomes, strict=False) if outcome == PUBLISHED]
        instants, now = instants_of(published), datetime.now(UTC)
        with self._lock:
            self._in_flight[stream] -= len(batch)
            self._histogram(metrics.PUBLISH_DURATION, stream, metrics.DURATION_BOUNDS).add(seconds)
            self._histogram(metrics.LATENCY, stream, metrics.LATENCY_BOUNDS).add_ages(instants, now)
            if len(published) < len(batch):
                for event, outcome in zip(batch, outcomes, strict=False):
                    if (name := outcome_name(outcome)) not in (None, "published"):
                        self._count(metrics.FAILED, [event], stream, str(name))

    def after_settle(self, settlements: Sequence[Settlement], lost: Sequence[Settlement], seconds: float) -> None:
        with self._lock:
            for settlement in settlements:
                stream = settlement.grant.stream
                if lost and settlement in lost:
                    refused = len(settlement.published) + len(settlement.failed) + len(settlement.dead)
                    # Exactly once, whoever owns the shard now settles what was published: no consumer gets a copy.
                    copies = 0 if settlement.ticket else len(settlement.published)
                    self._refused(stream, refused, copies)
                else:
                    self._settled(stream, settlement.published, settlement.dead)
            if settlements:
                stream = settlements[0].grant.stream
                self._histogram(metrics.SETTLE_DURATION, stream, metrics.DURATION_BOUNDS).add(seconds)

    def after_recover(self, grant: Grant, ticket: bytes, progress: Progress, seconds: float) -> None:
        # A ticket has the ids of its events, and not their topics and tenants.
        others = [OTHER for names in (self._topics, self._tenants) if names is not None]
        with self._lock:
            self._counters[metrics.DONE][grant.stream, *others] += progress.settled

    def after_settle_claims(self, claims: Sequence[Claim], results: ClaimResults, refused: int, seconds: float) -> None:
        if not claims:
            return
        stream = claims[0].event.stream
        with self._lock:
            if refused:
                # The store does not say which. What is counted as done was done, if the refused ones were published.
                copies = min(refused, len(results.published))
                self._refused(stream, refused, copies)
                self._settled(stream, results.published[copies:], results.dead[refused - copies :])
            else:
                self._settled(stream, results.published, results.dead)
            self._histogram(metrics.SETTLE_DURATION, stream, metrics.DURATION_BOUNDS).add(seconds)

    def after_take(self, stream: str, grants: Sequence[Grant], seconds: float) -> None:
        # A worker that lost the database for longer than its lease takes its own shards back.
        dead = sum(grant.previous not in (None, grant.worker) for grant in grants)
        if dead:
            with self._lock:
                self._counters[metrics.TAKEOVERS][stream,] += dead

    def after_rescue(self, stream: str, rescued: Rescued, seconds: float) -> None:
        if rescued.retried or rescued.dead:
            with self._lock:
                self._counters[metrics.RESCUED][stream,] += rescued.retried + rescued.dead
                self._counters[metrics.DIED][stream,] += rescued.dead

    def before_consume(self, batch: Batch) -> None:
        with self._lock:
            self._consuming[batch.stream] += len(batch)

    def after_consume(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
        consumer = batch.stream
        done = outcomes.count(PUBLISHED)
        with self._lock:
            self._consuming[consumer] -= len(batch)
            self._histogram(metrics.CONSUME_DURATION, consumer, metrics.DURATION_BOUNDS).add(seconds)
            counter = self._counters[metrics.CONSUMED]
            skipped = sum([outcome is SKIPPED for outcome in outcomes])
            counter[consumer, "done"] += done - skipped
            if skipped:
                counter[consumer, "skipped"] += skipped
            if done < len(outcomes):
                for outcome in outcomes:
                    if (name := outcome_name(outcome)) in _OUTCOMES:
                        counter[consumer, str(name)] += 1

    def event_buried(self, consumer: str, event: Event) -> None:
        with self._lock:
            self._counters[metrics.BURIED][consumer,] += 1

    def consumer_circuit_changed(self, consumer: str, state: str) -> None:
        with self._lock:
            self._consumers[metrics.CONSUMER_CIRCUIT][consumer,] = 0.0 if state == "closed" else 1.0

    def consumer_reported(self, consumer: str, report: ConsumerReport) -> None:
        told = {
            metrics.CONSUMER_LANES: report.lanes,
            metrics.CONSUMER_PAUSED: report.paused_lanes,
            metrics.CONSUMER_FAILED: len(report.failed_lanes.splitlines()),
            metrics.CONSUMER_KEYS: report.held_keys,
            metrics.CONSUMER_LAG: report.lag_events,
            metrics.CONSUMER_LAG_SECONDS: report.lag_seconds,
        }
        with self._lock:
            self._consumers[metrics.CONSUMER_CIRCUIT].setdefault((consumer,), 0.0)
            for metric, value in told.items():
                self._consumers[metric].pop((consumer,), None)
                if value is not None:
                    self._consumers[metric][consumer,] = value

    def call_failed(self, call: str, arguments: tuple[Any, ...], error: BaseException, seconds: float) -> None:
        in_flight = {"publish": self._in_flight, "consume": self._consuming}.get(call)
        if in_flight is not None:
            with self._lock:
                in_flight[arguments[0].stream] -= len(arguments[0])

    def circuit_changed(self, stream: str, state: str) -> None:
        with self._lock:
            self._circuits[stream] = 0.0 if state == "closed" else 1.0

    def sampled(self, gauges: Sequence[StreamGauges], seconds: float) -> None:
        with self._lock:
            self._gauges, self._sampled_at = gauges, time.monotonic()

    def added(self, events: Sequence[Event]) -> None:
        with self._lock:
            for stream in {event.stream for event in events}:
                self._count(metrics.NEW, [event for event in events if event.stream == stream], stream)

    def inbox_asked(self, consumer: str, new: int, copies: int) -> None:
        with self._lock:
            self._counters[metrics.INBOX][consumer, "new"] += new
            self._counters[metrics.INBOX][consumer, "copy"] += copies

    def request_served(self, outcome: str) -> None:
        with self._lock:
            self._counters[metrics.REQUESTS][outcome,] += 1

    def _settled(self, stream: str, published: Sequence[Event], dead: Sequence[Failure]) -> None:
        if published:
            self._count(metrics.DONE, published, stream)
        if dead:
            died = sum(failure.error != PARKED for failure in dead)
            self._counters[metrics.DIED][stream,] += died

    def _refused(self, stream: str, events: int, published: int) -> None:
        self._counters[metrics.REFUSED][stream,] += events
        self._counters[metrics.DUPLICATES][stream,] += published

    def _count(self, metric: Metric, events: Sequence[Event], *labels: str) -> None:
        counter = self._counters[metric]
        if not self._splits:
            counter[labels] += len(events)
            return
        for event in events:
            topic = () if self._topics is None else (event.topic if event.topic in self._topics else OTHER,)
            tenant = () if self._tenants is None else (event.tenant if event.tenant in self._tenants else OTHER,)
            counter[(*labels, *topic, *tenant)] += 1

    def _histogram(self, metric: Metric, stream: str, bounds: Sequence[float]) -> Histogram:
        found = self._histograms[metric].get(stream)
        if found is None:
            found = self._histograms[metric][stream] = Histogram(bounds)
        return found


def outcome_name(outcome: Outcome) -> str | None:
    """The outcome as a label; None: the event was not tried, and nothing has failed."""
    if outcome.result is Result.UNTRIED:
        return "outage" if outcome.is_outage else None
    return str(outcome.result)


def instants_of(events: Iterable[Event]) -> list[datetime]:
    """When each event was written, or the instant that it waited for."""
    if any(map(_AVAILABLE_AT, events)):
        return [event.available_at or event.created_at for event in events]
    return list(map(_CREATED_AT, events))


def _sampled(gauges: Sequence[StreamGauges]) -> Mapping[Metric, dict[Labels, float]]:
    found: dict[Metric, dict[Labels, float]] = defaultdict(dict)
    for each in gauges:
        stream = each.stream
        found[metrics.BACKLOG][stream,] = sum(each.counts.get(state, 0) for state in _WAITING)
        for state in _STATES:
            found[metrics.EVENTS][stream, str(state)] = each.counts.get(state, 0)
        found[metrics.DEAD][stream,] = each.counts.get(Status.DEAD, 0)
        found[metrics.LAG][stream,] = each.oldest_seconds or 0.0
        for mode in HoldMode:
            found[metrics.KEYS_HELD][stream, str(mode)] = each.held_keys.get(mode, 0)
        found[metrics.PAUSED][stream,] = float(each.paused)
        found[metrics.WORKERS][stream,] = each.workers
    return found


def _labels_of(setting: str, names: Iterable[str] | None) -> frozenset[str] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise ConfigError(f"{setting} is a text; give a list of names, for example {setting}=[{names!r}]")
    return frozenset(names)
