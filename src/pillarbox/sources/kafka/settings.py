"""Settings of the Kafka source: options of its URL, and client properties that would break a promise."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

from pillarbox.errors import ConfigError
from pillarbox.hints import hint
from pillarbox.kafka import settings as kafka_settings
from pillarbox.kafka.settings import QUIET, Guarded, check_topic, guarded_by_all, never, only

OPTIONS: Final = ("topic", "group", "start", "connect_timeout")

Start: TypeAlias = Literal["earliest", "latest"]

_OWN: Final = "leave it out: the source sets it itself"
_GUARDED: Final[Guarded] = {
    **guarded_by_all(_OWN),
    "group.id": (never, "name the group with group="),
    "enable.auto.commit": (only("false"), "leave it out: an offset is committed when its event is done"),
    "enable.auto.offset.store": (only("false"), _OWN),
    "auto.offset.reset": (
        only("error"),
        "say with start= where a new group begins; a group whose data are gone stops, so that nothing is skipped",
    ),
    "partition.assignment.strategy": (
        only("cooperative-sticky"),
        "leave it out: with another strategy each rebalance stops all partitions",
    ),
    "enable.partition.eof": (only("true"), _OWN),
    "on_commit": (never, _OWN),
    "offset_commit_cb": (never, _OWN),
    "rebalance_cb": (never, _OWN),
}
_DEFAULTS: Final = {
    "queued.min.messages": 5000,
    "fetch.queue.backoff.ms": 20,
    # For each partition; the client's own default would be 64 MB.
    "queued.max.messages.kbytes": 8192,
}
_PROMISES: Final = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
}


def client_config(servers: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """The client's configuration without its group; ConfigError for a property that would break a promise."""
    kafka_settings.check_properties(properties, _GUARDED)
    config = {**QUIET, **_DEFAULTS, **properties, **_PROMISES, "bootstrap.servers": servers}
    if str(config.get("group.protocol", "classic")).lower() == "classic":
        # The new protocol assigns on the broker, and refuses a strategy of the client.
        config["partition.assignment.strategy"] = "cooperative-sticky"
    return config


def topics_of(topic: str | Sequence[str]) -> tuple[str, ...]:
    """The topics that a setting names; ConfigError when there is none, or one cannot exist."""
    names = topic.split(",") if isinstance(topic, str) else list(topic)
    if not any(names):
        raise ConfigError("no Kafka topic is given; write for instance topic=orders, or topic=orders,payments")
    for name in names:
        check_topic(name)
    return tuple(dict.fromkeys(names))


def check_start(start: str) -> None:
    if start not in get_args(Start):
        raise ConfigError(f"start={start!r}: {hint(start, get_args(Start))}")


def parse_url(url: str) -> dict[str, Any]:
    """The keyword arguments of KafkaSource that a URL contains; see :func:`pillarbox.kafka.settings.parse_url`."""
    servers, options, properties = kafka_settings.parse_url(url, OPTIONS)
    return {"servers": servers, **options, "properties": dict(properties)}
