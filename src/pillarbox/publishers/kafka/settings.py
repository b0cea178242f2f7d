"""Settings of the Kafka publisher: options of its URL, and client properties that would break a promise."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from pillarbox.errors import ConfigError
from pillarbox.hints import hint
from pillarbox.imports import load_object

OPTIONS: Final = ("topic", "envelope", "headers", "source", "producers", "strict_keys", "stuck", "connect_timeout")
_HOST: Final = re.compile(r"(\[[^\]]+\]|[^:\[\]]+)(:[0-9]{1,5})?")
# The only librdkafka properties whose names have no dot.
DOTLESS: Final = ("acks", "retries", "partitioner", "debug")

_STABLE_PARTITIONERS: Final = (
    "murmur2_random", "murmur2", "consistent_random", "consistent", "fnv1a_random", "fnv1a"
)  # fmt: skip


def _is(*allowed: str) -> Callable[[str], bool]:
    return lambda value: value in allowed


def _never(_value: str) -> bool:
    return False


_FEW: Final = "set it from 1 to 5, or leave it out"
_UNTIMED: Final = "leave it out: a message that times out in an outage gives copies and disorder"
_UNLIMITED: Final = "leave it out: retries are unlimited, so that an outage loses nothing"
_CONFIRMED: Final = "leave it out: an event counts as published only when all in-sync replicas have it"
_OWN: Final = "leave it out: the publisher sets it itself"

_GUARDED: Final[Mapping[str, tuple[Callable[[str], bool], str]]] = {
    "acks": (_is("all", "-1"), _CONFIRMED),
    "request.required.acks": (_is("all", "-1"), _CONFIRMED),
    "enable.idempotence": (_is("true"), "leave it out: without it a retry gives copies and disorder"),
    "enable.gapless.guarantee": (
        _is("true"),
        "leave it out: without it a refused event is overtaken by its key",
    ),
    "message.timeout.ms": (_is("0"), _UNTIMED),
    "delivery.timeout.ms": (_is("0"), _UNTIMED),
    "retries": (_never, _UNLIMITED),
    "message.send.max.retries": (_never, _UNLIMITED),
    "max.in.flight": (_is(*"12345"), _FEW),
    "max.in.flight.requests.per.connection": (_is(*"12345"), _FEW),
    "delivery.report.only.error": (_is("false"), _OWN),
    "transactional.id": (_never, "leave it out: this publisher does not use transactions"),
    "partitioner": (
        _is(*_STABLE_PARTITIONERS),
        f"choose one that keeps a key on its partition: {', '.join(_STABLE_PARTITIONERS)}",
    ),
    "bootstrap.servers": (_never, "name the brokers with servers="),
    "metadata.broker.list": (_never, "name the brokers with servers="),
    "error_cb": (_never, _OWN),
    "dr_cb": (_never, _OWN),
    "on_delivery": (_never, _OWN),
    "logger": (_never, _OWN),
}


def check_properties(properties: Mapping[str, Any]) -> None:
    """Raises ConfigError for a property that would break a promise."""
    for name, value in properties.items():
        allowed, remedy = _GUARDED.get(name, (None, ""))
        if allowed is not None and not allowed(str(value).lower()):
            raise ConfigError(f"Kafka property {name}={value!r} is refused; {remedy}")


def parse_url(url: str) -> dict[str, Any]:
    """The keyword arguments of KafkaPublisher that a URL contains.

    ``kafka://[user:password@]host[:9092][,host...][?option=value&...]``; an option is one of the publisher's
    own or a librdkafka property. With a user, SASL PLAIN over TLS is used unless properties say otherwise.
    """
    parts = urlsplit(url)
    if parts.scheme != "kafka":
        raise ConfigError(f"a Kafka URL starts with kafka://, not {parts.scheme or url.partition(':')[0]}://")
    user, at, hosts = parts.netloc.rpartition("@")
    if not hosts or parts.path not in ("", "/") or parts.fragment:
        # The text is not shown: with an unescaped password, a part of that would be taken for a host or a path.
        raise ConfigError(
            "the Kafka URL names no broker or has a path; write kafka://user:password@host:9092?topic=orders, "
            "in a password @ as %40, / as %2F, # as %23 and ? as %3F"
        )
    for host in hosts.split(","):
        if not _HOST.fullmatch(host):
            raise ConfigError(
                "the Kafka URL has a broker without a name or a port that is no number; "
                "write kafka://host:9092,other:9092?topic=orders"
            )
    servers = ",".join(_with_port(host) for host in hosts.split(","))
    arguments: dict[str, Any] = {"servers": servers}
    properties: dict[str, Any] = {}
    if at:
        name, _, password = user.partition(":")
        properties |= {
            "sasl.username": unquote(name),
            "sasl.password": unquote(password),
            "sasl.mechanism": "PLAIN",
            "security.protocol": "SASL_SSL",
        }
    for option, value in parse_qsl(parts.query, keep_blank_values=True):
        if option in OPTIONS:
            arguments[option] = _converted(option, value)
        elif "." in option or option in DOTLESS:
            properties[option] = value
        else:
            meant = hint(option, (*OPTIONS, *DOTLESS), f"use one of: {', '.join(OPTIONS)}")
            raise ConfigError(
                f"unknown option {option!r} in the Kafka URL; {meant} (names with a dot go to the Kafka client)"
            )
    if "sasl.mechanisms" in properties:
        properties.pop("sasl.mechanism", None)
    return {**arguments, "properties": properties}


def _with_port(host: str) -> str:
    has_port = host.rpartition("]")[2].startswith(":") if host.startswith("[") else ":" in host
    return host if has_port else f"{host}:9092"


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
