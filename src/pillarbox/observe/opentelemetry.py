"""Metrics and traces for OpenTelemetry. Needs the extra ``otel``."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from pillarbox.batch import Batch
from pillarbox.errors import MissingExtra
from pillarbox.observe import metrics
from pillarbox.observe.metrics import METRICS, Kind, Metric
from pillarbox.observe.tally import Tally, instants_of
from pillarbox.publisher import PUBLISHED, Outcome, Result
from pillarbox.store import Claim, ClaimResults, Settlement

try:
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation, get_meter
    from opentelemetry.trace import TracerProvider, get_tracer
    from opentelemetry.util.types import AttributeValue

    from pillarbox.observe.spans import Spans
except ImportError:
    raise MissingExtra("OpenTelemetry", "otel") from None

# The version of the semantic conventions whose names are used. Those of messaging are still in development.
SEMANTIC_CONVENTIONS: Final = "1.44.0"
_SCHEMA: Final = f"https://opentelemetry.io/schemas/{SEMANTIC_CONVENTIONS}"
_MOST_VALUES: Final = 100  # of one call, in a histogram


class OpenTelemetry(Tally):
    """Exports metrics and spans through the API of OpenTelemetry. One object serves all relays and outboxes of a
    process.

    meter_provider, tracer_provider: default: the global ones. topics, tenants: those that get an attribute of their
    own; all others are counted as ``other``. None: no such attribute.
    """

    def __init__(
        self,
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
        topics: Iterable[str] | None = None,
        tenants: Iterable[str] | None = None,
    ) -> None:
        super().__init__(topics=topics, tenants=tenants)
        meter = get_meter("pillarbox", "", meter_provider, _SCHEMA)
        self._spans = Spans(get_tracer("pillarbox", None, tracer_provider, _SCHEMA))
        self._instruments = {each: self._make(meter, each) for each in METRICS}
        self._operations = meter.create_histogram(
            "messaging.client.operation.duration", "s", "Duration of one call of the publisher"
        )
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Events that were handed over")
        self._destinations: dict[str, str] = {}

    def _make(self, meter: Meter, metric: Metric) -> Any:
        if metric.kind is Kind.HISTOGRAM:
            bounds = metrics.LATENCY_BOUNDS if metric is metrics.LATENCY else metrics.DURATION_BOUNDS
            return meter.create_histogram(
                metric.name, "s", metric.help, explicit_bucket_boundaries_advisory=list(bounds)
            )
        if metric.kind is Kind.COUNTER:
            # Exporters for Prometheus append the ending.
            name = metric.name.removesuffix("_total")
            return meter.create_observable_counter(name, [self._reader(metric)], description=metric.help)
        return meter.create_observable_gauge(metric.name, [self._reader(metric)], description=metric.help)

    def _reader(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(options: CallbackOptions) -> Iterator[Observation]:
            values = self.counts(metric) if metric.kind is Kind.COUNTER else self.values().get(metric, {})
            names = self.labels(metric)
            for labels, value in values.items():
                yield Observation(value, dict(zip(names, labels, strict=True)))

        return read

    def serves(self, stream: str, destination: str) -> None:
        super().serves(stream, destination)
        self._destinations[stream] = destination.partition(" ")[0]

    def before_publish(self, batch: Batch) -> None:
        super().before_publish(batch)
        self._spans.begin(batch, self._about(batch), _topic(batch) or batch.stream)

    def after_publish(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
        super().after_publish(batch, outcomes, seconds)
        about = self._about(batch)
        self._spans.end(batch, outcomes, about)
        stream = {"stream": batch.stream}
        self._histogram_of(metrics.PUBLISH_DURATION).record(seconds, stream)
        latency = self._histogram_of(metrics.LATENCY)
        published = [event for event, outcome in zip(batch, outcomes, strict=True) if outcome == PUBLISHED]
        now = datetime.now(UTC)
        for instant in instants_of(_some(published)):
            latency.record(max(0.0, (now - instant).total_seconds()), stream)
        operation: dict[str, AttributeValue] = {
            "messaging.system": self._destinations.get(batch.stream, "unknown"),
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": batch.stream,
        }
        failed = next((outcome for outcome in outcomes if outcome.result is not Result.PUBLISHED), None)
        self._sent.add(len(published), operation)
        error = {} if failed is None else {"error.type": str(failed.result)}
        self._operations.record(seconds, {**operation, **error})

    def after_settle(self, settlements: Sequence[Settlement], lost: Sequence[Settlement], seconds: float) -> None:
        super().after_settle(settlements, lost, seconds)
        if settlements:
            self._histogram_of(metrics.SETTLE_DURATION).record(seconds, {"stream": settlements[0].grant.stream})

    def after_settle_claims(self, claims: Sequence[Claim], results: ClaimResults, refused: int, seconds: float) -> None:
        super().after_settle_claims(claims, results, refused, seconds)
        if claims:
            self._histogram_of(metrics.SETTLE_DURATION).record(seconds, {"stream": claims[0].event.stream})

    def after_consume(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
        super().after_consume(batch, outcomes, seconds)
        self._histogram_of(metrics.CONSUME_DURATION).record(seconds, {"consumer": batch.stream})

    def call_failed(self, call: str, arguments: tuple[Any, ...], error: BaseException, seconds: float) -> None:
        super().call_failed(call, arguments, error, seconds)
        if call == "publish":
            self._spans.fail(arguments[0], error)

    def _histogram_of(self, metric: Metric) -> Histogram:
        found: Histogram = self._instruments[metric]
        return found

    def _about(self, batch: Batch) -> dict[str, AttributeValue]:
        return {
            "messaging.system": self._destinations.get(batch.stream, "unknown"),
            "messaging.destination.name": _topic(batch) or batch.stream,
            "outbox.stream": batch.stream,
        }


def _topic(batch: Batch) -> str:
    """The topic of all events of the batch; empty: they have several, or the publisher's own."""
    first = batch[0].topic if batch else ""
    return first if all(event.topic == first for event in batch) else ""


def _some(values: Sequence[Any]) -> Sequence[Any]:
    """At most a hundred of them, evenly spaced."""
    step = -(-len(values) // _MOST_VALUES)
    return values[::step] if step > 1 else values
