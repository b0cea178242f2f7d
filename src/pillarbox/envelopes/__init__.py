"""Envelopes: the form of a message, apart from any broker.

An envelope gives the body, its content type, attributes and headers of an event's message. A binding turns them into
the message of one broker. Pure code, no I/O.
"""

from typing import Final

from pillarbox.envelopes.bindings import (
    HttpMessage,
    Message,
    NatsMessage,
    PulsarMessage,
    RabbitMQMessage,
    RedisMessage,
    http,
    kafka,
    nats,
    pulsar,
    rabbitmq,
    redis,
)
from pillarbox.envelopes.cloudevents import CloudEvents, StructuredCloudEvents
from pillarbox.envelopes.debezium import debezium_base64_headers, debezium_headers
from pillarbox.envelopes.envelope import Binding, Envelope, Legacy
from pillarbox.envelopes.headers import HeaderBuilder, Headers, default_headers, event_headers
from pillarbox.errors import ConfigError
from pillarbox.hints import hint

__all__ = [
    "ENVELOPES",
    "Binding",
    "CloudEvents",
    "Envelope",
    "HeaderBuilder",
    "Headers",
    "HttpMessage",
    "Legacy",
    "Message",
    "NatsMessage",
    "PulsarMessage",
    "RabbitMQMessage",
    "RedisMessage",
    "StructuredCloudEvents",
    "debezium_base64_headers",
    "debezium_headers",
    "default_headers",
    "envelope_named",
    "event_headers",
    "http",
    "kafka",
    "nats",
    "pulsar",
    "rabbitmq",
    "redis",
]

ENVELOPES: Final = (
    *("raw", "legacy", "cloudevents", "cloudevents_binary", "cloudevents_structured"),
    *("debezium", "debezium_base64"),
)


def envelope_named(name: str, *, headers: HeaderBuilder | None = None, source: str = "/pillarbox") -> Envelope:
    """The envelope that a setting names; ``cloudevents`` is the binary mode.

    headers: the header builder; None: the default of that envelope.
    """
    match name:
        case "raw":
            return Envelope(headers or default_headers)
        case "legacy":
            return Legacy(headers or default_headers)
        case "cloudevents" | "cloudevents_binary":
            return CloudEvents(source, headers or event_headers)
        case "cloudevents_structured":
            return StructuredCloudEvents(source, headers or event_headers)
        case "debezium":
            return Envelope(headers or debezium_headers)
        case "debezium_base64":
            return Envelope(headers or debezium_base64_headers)
    raise ConfigError(f"envelope={name!r} is unknown; {hint(name, ENVELOPES)}")
