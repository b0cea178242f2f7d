"""Metrics for Prometheus. Needs the extra ``prometheus``."""

from collections.abc import Iterable, Iterator, Sequence

from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.observe import metrics
from pillarbox.observe.metrics import METRICS, Kind, Metric
from pillarbox.observe.tally import Tally

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError:
    raise MissingExtra("metrics for Prometheus", "prometheus") from None

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_BOUNDS = {
    metrics.LATENCY: metrics.LATENCY_BOUNDS,
    metrics.PUBLISH_DURATION: metrics.DURATION_BOUNDS,
    metrics.SETTLE_DURATION: metrics.DURATION_BOUNDS,
    metrics.CONSUME_DURATION: metrics.DURATION_BOUNDS,
}


class Prometheus(Tally, Collector):
    """Exports metrics to a registry of prometheus_client. One object serves all relays and outboxes of a process.

    registry: default: the one of the whole process. topics, tenants: those that get a label of their own; all others
    are counted as ``other``. None: no such label.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry = REGISTRY,
        topics: Iterable[str] | None = None,
        tenants: Iterable[str] | None = None,
    ) -> None:
        super().__init__(topics=topics, tenants=tenants)
        self._registry = registry
        try:
            registry.register(self)
        except ValueError as error:
            raise ConfigError(
                "this registry has the metrics of Pillarbox already; share one Prometheus() among the relays and "
                "outboxes of a process, or give the second one a registry of its own"
            ) from error

    def describe(self) -> Iterable[Family]:
        """The families without values: the registry checks their names."""
        return [self._family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Family]:
        """The families with their values now."""
        gauges = self.values()
        for metric in METRICS:
            family = self._family(metric)
            if isinstance(family, CounterMetricFamily):
                for labels, count in self.counts(metric).items():
                    family.add_metric(labels, count)
            elif isinstance(family, HistogramMetricFamily):
                for labels, (counts, total) in self.histograms(metric).items():
                    family.add_metric(labels, _buckets(_BOUNDS[metric], counts), total)
            else:
                for labels, value in gauges.get(metric, {}).items():
                    family.add_metric(labels, value)
            yield family

    def page(self, accept: str = "") -> tuple[str, bytes]:
        """The page that Prometheus reads: its content type and its bytes. accept: the header of the request."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)

    def close(self) -> None:
        """Remove the metrics from the registry."""
        self._registry.unregister(self)

    def _family(self, metric: Metric) -> Family:
        kinds = {
            Kind.COUNTER: CounterMetricFamily,
            Kind.GAUGE: GaugeMetricFamily,
            Kind.HISTOGRAM: HistogramMetricFamily,
        }
        made: Family = kinds[metric.kind](metric.name, f"{metric.help}.", labels=self.labels(metric))
        return made


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    found, so_far = [], 0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        so_far += count
        found.append((bound, float(so_far)))
    return found
