"""From an event to RabbitMQ's message and its address. Pure."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pamqp.commands import Basic

from pillarbox.amqp import is_name
from pillarbox.envelopes import RabbitMQMessage
from pillarbox.envelopes.headers import id_text
from pillarbox.errors import Reject
from pillarbox.event import Event

_SHORT_BYTES: Final = 255
_NAME_BYTES: Final = 128  # the client would cut it off
_PERSISTENT: Final = 2
# The properties stand in one frame with the headers; this is left for all but the headers.
_OTHER_PROPERTIES_BYTES: Final = 2048
# Headers by which the server routes. It closes the channel for one that is no list, and ours are text.
_ROUTING_HEADERS: Final = ("CC", "BCC")
_FIRST_INSTANT: Final = datetime(1970, 1, 1, tzinfo=UTC)  # the protocol has no earlier one


class Address(NamedTuple):
    """Where the server puts a message."""

    exchange: str
    routing_key: str


class Posting(NamedTuple):
    """A message with its address."""

    address: Address
    body: bytes
    properties: Basic.Properties


class Router:
    """The address of an event: its ``topic`` or else ``exchange``, with its routing key or else its type.

    queue: all events without a topic go to this queue, by the default exchange. by_key: the key is the routing key.
    """

    def __init__(self, exchange: str, queue: str, *, by_key: bool) -> None:
        self.exchange = exchange
        self.queue = queue
        self._by_key = by_key

    def address(self, event: Event) -> Address:
        if self.queue and not event.topic:
            return Address("", self.queue)
        if self._by_key:
            routing_key = id_text(event.id) if event.key is None else event.key
        else:
            routing_key = event.routing_key or event.type
        return Address(event.topic or self.exchange, routing_key)


def post(
    event: Event, address: Address, message_of: Callable[[Event], RabbitMQMessage], max_bytes: int, frame_bytes: int
) -> Posting:
    """Raises Reject for an event that no server takes. frame_bytes: the largest frame of the connection."""
    body, headers, content_type = message_of(event)
    if len(body) > max_bytes:
        raise Reject(
            f"the body takes {len(body)} bytes and RabbitMQ takes at most {max_bytes}; raise max_message_size of the "
            "server and max_bytes of the publisher, or store the content elsewhere and send a reference"
        )
    if event.topic and not is_name(event.topic):
        raise Reject(
            f"the topic {event.topic!r} is not a name that the RabbitMQ client takes; use up to 127 letters, digits, "
            "spaces and -_.:@#,/+"
        )
    for name, value in (
        ("routing key", address.routing_key),
        ("type", event.type),
        ("content type", content_type),
    ):
        if len(value) * 4 > _SHORT_BYTES and len(value.encode()) > _SHORT_BYTES:
            raise Reject(f"the {name} takes more than {_SHORT_BYTES} bytes, the most that RabbitMQ takes; shorten it")
    for name in headers:
        if name in _ROUTING_HEADERS:
            raise Reject(f"RabbitMQ routes by the header {name!r} and takes no text in it; give it another name")
        if len(name.encode()) > _NAME_BYTES:
            raise Reject(
                f"the header {name[:20]!r}... has a name of more than {_NAME_BYTES} bytes, the most that "
                "RabbitMQ takes; shorten it"
            )
    size = sum(len(name.encode()) + len(value.encode()) + 6 for name, value in headers.items())
    if size > frame_bytes - _OTHER_PROPERTIES_BYTES:
        raise Reject(
            f"the headers take {size} bytes and RabbitMQ takes at most {frame_bytes - _OTHER_PROPERTIES_BYTES}; "
            "shorten them, or raise frame_max of the server"
        )
    properties = Basic.Properties(
        content_type=content_type,
        headers=dict(headers),
        delivery_mode=_PERSISTENT,
        message_id=id_text(event.id),
        timestamp=event.occurred_at if event.occurred_at >= _FIRST_INSTANT else None,
        message_type=event.type,
    )
    return Posting(address, body, properties)
