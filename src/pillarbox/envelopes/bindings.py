"""Bindings: turn an envelope's message into one broker's message.

A broker needs a Binding for the names of its headers and a few lines that make its message: see ``kafka``.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from pillarbox.envelopes.envelope import Binding, Envelope
from pillarbox.envelopes.headers import Headers
from pillarbox.event import Event

KAFKA: Final = Binding("ce_")


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
