"""The reference is complete: every public name and every setting is on the page."""

import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pillarbox import Event
from pillarbox.observe.metrics import METRICS, Metric

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
# What users import. A module without __all__ offers the public classes and functions that it defines.
PUBLIC = (
    "pillarbox",
    "pillarbox.alembic",
    "pillarbox.batch",
    "pillarbox.conformance",
    "pillarbox.consumer",
    "pillarbox.django",
    "pillarbox.django.testing",
    "pillarbox.drivers",
    "pillarbox.durations",
    "pillarbox.envelopes",
    "pillarbox.errors",
    "pillarbox.health",
    "pillarbox.idempotency",
    "pillarbox.inbox",
    "pillarbox.maintenance.check",
    "pillarbox.maintenance.prune",
    "pillarbox.maintenance.reconcile",
    "pillarbox.maintenance.rescue",
    "pillarbox.maintenance.sample",
    "pillarbox.maintenance.service",
    "pillarbox.maintenance.watch",
    "pillarbox.observe",
    "pillarbox.operations",
    "pillarbox.projections",
    "pillarbox.publisher",
    "pillarbox.publishers.handlers",
    "pillarbox.publishers.kafka",
    "pillarbox.publishers.keyed",
    "pillarbox.publishers.memory",
    "pillarbox.publishers.nats",
    "pillarbox.publishers.http",
    "pillarbox.publishers.pulsar",
    "pillarbox.publishers.rabbitmq",
    "pillarbox.publishers.redis",
    "pillarbox.publishers.stdout",
    "pillarbox.relay",
    "pillarbox.source",
    "pillarbox.sources.kafka",
    "pillarbox.sources.memory",
    "pillarbox.sqlalchemy",
    "pillarbox.store",
    "pillarbox.sources.rabbitmq",
    "pillarbox.stores.memory",
    "pillarbox.stores.mongo",
    "pillarbox.stores.mysql",
    "pillarbox.stores.postgres",
    "pillarbox.stores.sqlite",
    "pillarbox.task_queues",
    "pillarbox.testing",
    "pillarbox.urls",
)
_DIRECTIVE = re.compile(r"^\.\. auto(?:class|function|exception|data|protocol)?:: (\S+)$", re.MULTILINE)
_MODULE = re.compile(r"^\.\. automodule:: (\S+)\n   :members:", re.MULTILINE)


def offered(module: ModuleType) -> dict[str, Any]:
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__ == module.__name__
        ]
    return {name: getattr(module, name) for name in names}


def documented() -> set[int]:
    """The identities of the objects that the page shows."""
    text = PAGE.read_text()
    found = set()
    for path in _DIRECTIVE.findall(text):
        module, _, name = path.rpartition(".")
        found.add(id(getattr(import_module(module), name)))
    for path in _MODULE.findall(text):
        found |= {id(value) for value in offered(import_module(path)).values()}
    return found


def test_every_field_of_an_event_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", PAGE.with_name("event.md").read_text(), re.MULTILINE)
    assert rows == list(Event._fields)


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("kafka", "pillarbox.publishers.kafka.KafkaPublisher"),
        ("pulsar", "pillarbox.publishers.pulsar.PulsarPublisher"),
        ("pulsar", "pillarbox.sources.pulsar.PulsarSource"),
        ("kafka-consumer", "pillarbox.sources.kafka.KafkaSource"),
        ("rabbitmq", "pillarbox.publishers.rabbitmq.RabbitMQPublisher"),
        ("rabbitmq", "pillarbox.sources.rabbitmq.RabbitMQSource"),
        ("nats", "pillarbox.publishers.nats.NatsPublisher"),
        ("redis", "pillarbox.publishers.redis.RedisPublisher"),
        ("webhooks", "pillarbox.publishers.http.HttpPublisher"),
        ("webhooks", "pillarbox.publishers.http.Endpoint"),
        ("handlers", "pillarbox.Handlers"),
        ("idempotency", "pillarbox.Idempotency"),
    ],
)
def test_every_setting_is_on_its_page(page: str, kind: str) -> None:
    module, _, name = kind.rpartition(".")
    text = (PAGE.parent / "howto" / f"{page}.md").read_text()
    missing = [each for each in settings(getattr(import_module(module), name)) if f"`{each}`" not in text]
    assert not missing, f"docs/howto/{page}.md does not explain {', '.join(missing)}"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    known = documented()
    objects = offered(import_module(name))
    missing = [each for each, value in objects.items() if _is_shown(value) and id(value) not in known]
    assert not missing, f"docs/reference.md lacks {', '.join(f'{name}.{each}' for each in missing)}"


def _is_shown(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def settings(kind: type) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.init]
    parameters = inspect.signature(kind).parameters.values()
    return [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]


SETTLED = (
    "pillarbox.Consumer",
    "pillarbox.Inbox",
    "pillarbox.Outbox",
    "pillarbox.Relay",
    "pillarbox.Stream",
    "pillarbox.Handlers",
    "pillarbox.Idempotency",
    "pillarbox.Check",
    "pillarbox.Exponential",
    "pillarbox.Fixed",
    "pillarbox.Linear",
    "pillarbox.observe.opentelemetry.OpenTelemetry",
    "pillarbox.observe.prometheus.Prometheus",
    "pillarbox.publishers.kafka.KafkaPublisher",
    "pillarbox.publishers.pulsar.PulsarPublisher",
    "pillarbox.sources.kafka.KafkaSource",
    "pillarbox.publishers.rabbitmq.RabbitMQPublisher",
    "pillarbox.publishers.nats.NatsPublisher",
    "pillarbox.publishers.redis.RedisPublisher",
    "pillarbox.publishers.http.HttpPublisher",
    "pillarbox.publishers.http.Endpoint",
    "pillarbox.publisher.PublisherFeatures",
    "pillarbox.stores.postgres.PostgresStore",
    "pillarbox.stores.mysql.MysqlStore",
    "pillarbox.stores.sqlite.SqliteStore",
    "pillarbox.stores.mongo.MongoStore",
)


@pytest.mark.parametrize("path", SETTLED)
def test_every_setting_is_explained(path: str) -> None:
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    text = f"{kind.__doc__} {kind.__init__.__doc__ or ''}"
    missing = [each for each in settings(kind) if not re.search(rf"\b{each}\b", text)]
    assert not missing, f"the docstring of {path} does not explain {', '.join(missing)}"


METRICS_PAGE = (PAGE.parent / "metrics.md").read_text()


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_is_explained(metric: Metric) -> None:
    line = next((line for line in METRICS_PAGE.splitlines() if line.startswith(f"| `{metric.name}` |")), "")
    missing = [each for each in metric.labels if f"`{each}`" not in line.split("|")[2]] if line else ["the metric"]
    assert not missing, f"docs/metrics.md lacks {', '.join(missing)} of {metric.name}"


def test_every_metric_that_is_explained_is_there() -> None:
    explained = set(re.findall(r"^\| `((?:outbox|inbox|idempotency|consumer)_\w+)`", METRICS_PAGE, re.MULTILINE))
    assert explained - {metric.name for metric in METRICS} == {"outbox_failed", "outbox_publish_latency"}  # recorded
