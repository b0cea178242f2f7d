"""Bindings: turn an envelope's message into one broker's message.

A broker needs a Binding for the names of its headers and a few lines that make its message: see ``kafka``.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import quote

from pillarbox.envelopes.envelope import Binding, Envelope
from pillarbox.envelopes.headers import Headers
from pillarbox.event import Event

KAFKA: Final = Binding("ce_")
PULSAR: Final = Binding("ce_")
RABBITMQ: Final = Binding("ce-", content_type=None)
NATS: Final = Binding("ce-")
HTTP: Final = Binding("ce-", content_type=None)
KEY_HEADER: Final = "event_key"  # of a broker without keys
_PROPERTY_FRAME: Final = 12  # the bytes around a name and a value


class Message(NamedTuple):
    """One message as Kafka takes it."""

    key: bytes | None
    value: bytes | None
    headers: Headers


def kafka(envelope: Envelope) -> Callable[[Event], Message]:
    """The function that makes Kafka's message of an event; its key is the event's key."""
    make, body, headers = tuple.__new__, envelope.body, envelope.header_builder(KAFKA)

    def message(event: Event) -> Message:
        key = event.key
        # Half the cost of calling the class; the fields are those of Message, in its order.
        return make(Message, (None if key is None else key.encode(), body(event), headers(event)))

    return message


class PulsarMessage(NamedTuple):
    """One message as Pulsar takes it. Of several headers with one name, ``properties`` has the last.

    properties_bytes: at least the size of the properties.
    """

    key: str | None
    value: bytes
    properties: dict[str, str]
    properties_bytes: int


def pulsar(envelope: Envelope) -> Callable[[Event], PulsarMessage]:
    """The function that makes Pulsar's message of an event; its key is the event's key."""
    make, body, headers = tuple.__new__, envelope.body, envelope.header_builder(PULSAR)

    def message(event: Event) -> PulsarMessage:
        properties: dict[str, str] = {}
        size = 0
        for name, value in headers(event):
            properties[name] = value.decode()
            size += 4 * len(name) + len(value) + _PROPERTY_FRAME
        # Half the cost of calling the class; the fields are those of PulsarMessage, in its order.
        return make(PulsarMessage, (event.key, body(event), properties, size))

    return message


class RabbitMQMessage(NamedTuple):
    """The part of a RabbitMQ message that an envelope makes."""

    body: bytes
    headers: dict[str, str]
    content_type: str


def rabbitmq(envelope: Envelope) -> Callable[[Event], RabbitMQMessage]:
    """The function that makes RabbitMQ's message of an event. Its headers are text: of two with one name the last
    counts. The event's key is a header too, because RabbitMQ has no keys."""
    body, content_type, headers = envelope.body, envelope.content_type, envelope.header_builder(RABBITMQ)

    def message(event: Event) -> RabbitMQMessage:
        text = {name: value.decode() for name, value in headers(event)}
        # A header of the event's own must not pose as its key.
        text.pop(KEY_HEADER, None)
        if event.key is not None:
            text[KEY_HEADER] = event.key
        return RabbitMQMessage(body(event), text, content_type(event))

    return message


# As CloudEvents writes headers: all but printable ASCII, and the three characters that have a meaning there.
_PLAIN: Final = re.compile(rb"[!#$&-~]*")
_SAFE: Final = "!#$&'()*+,/:;<=>?@[\\]^`{|}~"
_NATS_NAME: Final = "!#$&'*+^`|~"
# They are commands to JetStream: one of them deletes all messages before its own.
_COMMANDS: Final = "nats-"


class NatsMessage(NamedTuple):
    """The part of a NATS message that an envelope makes."""

    body: bytes
    headers: dict[str, str]


def nats(envelope: Envelope) -> Callable[[Event], NatsMessage]:
    """The function that makes NATS's message of an event. Its headers are text, percent-encoded as CloudEvents does it:
    of two with one name the last counts. The event's key is a header too, because NATS has no keys. Own headers that
    JetStream would take for its own are left out."""
    body, content_type, headers = envelope.body, envelope.content_type, envelope.header_builder(NATS)

    def message(event: Event) -> NatsMessage:
        text = {_nats_name(name): _percent_encoded(value) for name, value in headers(event)}
        text.pop("", None)
        if "ce-specversion" in text:  # CloudEvents for NATS has the type as an attribute
            text["ce-datacontenttype"] = _percent_encoded(content_type(event).encode())
        if event.key is not None:
            text[KEY_HEADER] = _percent_encoded(event.key.encode())
        return NatsMessage(body(event), text)

    return message


@lru_cache(maxsize=1024)
def _nats_name(name: str) -> str:
    """Empty: the header is left out."""
    return "" if name.lower().strip().startswith(_COMMANDS) else quote(name, safe=_NATS_NAME)


def _percent_encoded(value: bytes) -> str:
    return value.decode() if _PLAIN.fullmatch(value) else quote(value, safe=_SAFE)


REDIS: Final = Binding("ce_")
PAYLOAD_FIELD: Final = "payload"


RedisMessage: TypeAlias = dict[str, bytes]
"""The fields of an entry in a stream of Redis or Valkey."""


def redis(envelope: Envelope) -> Callable[[Event], RedisMessage]:
    """The function that makes the entry of an event: a field for each header, one for its key, and the body in
    ``payload``. Of two fields with one name the last counts."""
    body, headers = envelope.body, envelope.header_builder(REDIS)

    def message(event: Event) -> RedisMessage:
        fields = dict(headers(event))
        if event.key is not None:
            fields[KEY_HEADER] = event.key.encode()
        fields[PAYLOAD_FIELD] = body(event)
        return fields

    return message


class HttpMessage(NamedTuple):
    """The part of an HTTP request that an envelope makes. The names of its headers are lowercase."""

    body: bytes
    headers: dict[str, str]


_KEY_NAME: Final = "event-key"
_CONTENT_TYPE: Final = "content-type"
# Headers that say how a request is sent, and those that prove who sent it: no event may set them.
_OF_THE_REQUEST: Final = frozenset({
    _CONTENT_TYPE, "accept-encoding", "connection", "content-encoding", "content-length", "expect", "host",
    "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
_OF_A_NAME: Final = "!#$&'*+-.^_`|~"  # what a name may have beside letters and digits; % begins an encoded character
# What CloudEvents leaves as it is in the header of an attribute.
_ATTRIBUTE: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
_PRINTABLE: Final = re.compile("[!-~]([ -~]*[!-~])?|")


def http(envelope: Envelope) -> Callable[[Event], HttpMessage]:
    """The function that makes the body and the headers of an HTTP request. Of two headers with one name the first
    counts.

    A name has - in place of _, because common servers drop headers with _. Values that are not printable ASCII are
    percent-encoded UTF-8, those of CloudEvents' attributes as its HTTP binding says. The event's key is a header too.
    """
    body, content_type, headers = envelope.body, envelope.content_type, envelope.header_builder(HTTP)

    def message(event: Event) -> HttpMessage:
        text = {_CONTENT_TYPE: _header_value(_CONTENT_TYPE, content_type(event))}
        if event.key is not None:
            text[_KEY_NAME] = _header_value(_KEY_NAME, event.key)
        for given, value in headers(event):
            name = _header_name(given)
            if name and name not in text:
                text[name] = _header_value(name, value.decode())
        return HttpMessage(body(event), text)

    return message


@lru_cache(maxsize=1024)
def _header_name(name: str) -> str:
    """The name as HTTP takes it; empty: no event may set this header."""
    name = quote(name.lower().replace("_", "-"), safe=_OF_A_NAME)
    is_reserved = name in _OF_THE_REQUEST or name.startswith(("webhook-", "proxy-"))
    return "" if is_reserved else name


def _header_value(name: str, value: str) -> str:
    if name.startswith(HTTP.prefix):
        return quote(value, safe=_ATTRIBUTE)
    return value if _PRINTABLE.fullmatch(value) else quote(value, safe=_ATTRIBUTE)
