"""Kafka's URLs, and client properties that would break a promise."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from pillarbox.errors import ConfigError
from pillarbox.hints import hint

TOPIC_NAME: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
# librdkafka's own lines come through logging; at its default level an outage writes twenty a second.
QUIET: Final = {"log_level": 2}
_HOST: Final = re.compile(r"(\[[^\]]+\]|[^:\[\]]+)(:[0-9]{1,5})?")
# The only librdkafka properties whose names have no dot.
DOTLESS: Final = ("acks", "retries", "partitioner", "debug")

# By the name of a property: whether a value in lower case is allowed, and the remedy if not.
Guarded: TypeAlias = Mapping[str, tuple[Callable[[str], bool], str]]


class KafkaUrl(NamedTuple):
    """The parts of a URL. options: those of the adapter, as text; properties: for the client."""

    servers: str
    options: Mapping[str, str]
    properties: Mapping[str, Any]


def only(*allowed: str) -> Callable[[str], bool]:
    """A rule: one of these values."""
    return lambda value: value in allowed


def never(_value: str) -> bool:
    """A rule: no value."""
    return False


def guarded_by_all(remedy: str) -> Guarded:
    """Properties that no adapter leaves to the user. remedy: for those that the adapter sets itself."""
    return {
        "bootstrap.servers": (never, "name the brokers with servers="),
        "metadata.broker.list": (never, "name the brokers with servers="),
        "error_cb": (never, remedy),
        "logger": (never, remedy),
    }


def check_properties(properties: Mapping[str, Any], guarded: Guarded) -> None:
    """Raises ConfigError for a property that would break a promise."""
    for name, value in properties.items():
        allowed, remedy = guarded.get(name, (None, ""))
        if allowed is not None and not allowed(str(value).lower()):
            raise ConfigError(f"Kafka property {name}={value!r} is refused; {remedy}")


def servers_of(servers: str | Sequence[str]) -> str:
    """The brokers as the client wants them; ConfigError when there is none."""
    joined = servers if isinstance(servers, str) else ",".join(servers)
    if not joined:
        raise ConfigError("servers='' names no Kafka broker; write for instance servers='localhost:9092'")
    return joined


def check_topic(topic: str) -> None:
    """Raises ConfigError for a name that no topic can have."""
    if not TOPIC_NAME.fullmatch(topic):
        raise ConfigError(
            f"topic={topic!r} is not a name that Kafka takes; use up to 249 letters, digits, '.', '_' and '-'"
        )


def parse_url(url: str, options: Sequence[str]) -> KafkaUrl:
    """The parts of ``kafka://[user:password@]host[:9092][,host...][?option=value&...]``.

    options: names that are not properties of the client. With a user, SASL PLAIN over TLS is used unless properties
    say otherwise.
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
    given: dict[str, str] = {}
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
        if option in options:
            given[option] = value
        elif "." in option or option in DOTLESS:
            properties[option] = value
        else:
            meant = hint(option, (*options, *DOTLESS), f"use one of: {', '.join(options)}")
            raise ConfigError(
                f"unknown option {option!r} in the Kafka URL; {meant} (names with a dot go to the Kafka client)"
            )
    if "sasl.mechanisms" in properties:
        properties.pop("sasl.mechanism", None)
    return KafkaUrl(servers, given, properties)


def _with_port(host: str) -> str:
    has_port = host.rpartition("]")[2].startswith(":") if host.startswith("[") else ":" in host
    return host if has_port else f"{host}:9092"
