"""Settings of the Kafka publisher: options of its URL, and client properties that would break a promise."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from pillarbox.errors import ConfigError
from pillarbox.imports import load_object
from pillarbox.kafka import settings as kafka_settings
from pillarbox.kafka.settings import Guarded, guarded_by_all, never, only

OPTIONS: Final = (
    *("topic", "envelope", "headers", "source", "producers", "strict_keys", "stuck", "connect_timeout"),
    "delivery",
)
Delivery = Literal["at-least-once", "exactly-once"]
_DELIVERIES: Final = ("at-least-once", "exactly-once")

_STABLE_PARTITIONERS: Final = (
    "murmur2_random", "murmur2", "consistent_random", "consistent", "fnv1a_random", "fnv1a"
)  # fmt: skip

_FEW: Final = "set it from 1 to 5, or leave it out"
_UNTIMED: Final = "leave it out: a message that times out in an outage gives copies and disorder"
_UNLIMITED: Final = "leave it out: retries are unlimited, so that an outage loses nothing"
_CONFIRMED: Final = "leave it out: an event counts as published only when all in-sync replicas have it"
_OWN: Final = "leave it out: the publisher sets it itself"

_GUARDED: Final[Guarded] = {
    **guarded_by_all(_OWN),
    "acks": (only("all", "-1"), _CONFIRMED),
    "request.required.acks": (only("all", "-1"), _CONFIRMED),
    "enable.idempotence": (only("true"), "leave it out: without it a retry gives copies and disorder"),
    "enable.gapless.guarantee": (
        only("true"),
        "leave it out: without it a refused event is overtaken by its key",
    ),
    "message.timeout.ms": (only("0"), _UNTIMED),
    "delivery.timeout.ms": (only("0"), _UNTIMED),
    "retries": (never, _UNLIMITED),
    "message.send.max.retries": (never, _UNLIMITED),
    "max.in.flight": (only(*"12345"), _FEW),
    "max.in.flight.requests.per.connection": (only(*"12345"), _FEW),
    "delivery.report.only.error": (only("false"), _OWN),
    "transactional.id": (
        never,
        "leave it out: delivery=exactly-once makes one for each shard, from the identity of the outbox",
    ),
    "partitioner": (
        only(*_STABLE_PARTITIONERS),
        f"choose one that keeps a key on its partition: {', '.join(_STABLE_PARTITIONERS)}",
    ),
    "dr_cb": (never, _OWN),
    "on_delivery": (never, _OWN),
}


def check_properties(properties: Mapping[str, Any]) -> None:
    """Raises ConfigError for a property that would break a promise."""
    kafka_settings.check_properties(properties, _GUARDED)


def check_delivery(delivery: str) -> None:
    """Raises ConfigError for a way of delivery that there is not."""
    if delivery not in _DELIVERIES:
        raise ConfigError(f"delivery={delivery!r} is unknown; use one of: {', '.join(_DELIVERIES)}")


def parse_url(url: str) -> dict[str, Any]:
    """The keyword arguments of KafkaPublisher that a URL contains; see :func:`pillarbox.kafka.settings.parse_url`."""
    servers, options, properties = kafka_settings.parse_url(url, OPTIONS)
    arguments = {option: _converted(option, value) for option, value in options.items()}
    return {"servers": servers, **arguments, "properties": dict(properties)}


def _converted(option: str, value: str) -> object:
    if option == "headers":
        build = load_object(value, "a header builder")
        if not callable(build):
            raise ConfigError(f"headers={value} in the Kafka URL is not a function from an event to its headers")
        return build
    try:
        if option == "producers":
            return int(value)
    except ValueError:
        raise ConfigError(f"{option}={value!r} in the Kafka URL is not a number; write for instance 4") from None
    if option == "strict_keys":
        if value.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"strict_keys={value!r} in the Kafka URL is neither true nor false")
        return value.lower() in ("true", "1")
    return value
