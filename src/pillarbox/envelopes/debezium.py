"""The headers that Debezium's outbox event router makes of an outbox's rows.

The router adds ``id``, and one header for each column that its settings place there. These are columns that are never
NULL, because the router makes a header without a value of a NULL.
"""

from base64 import b64encode
from collections.abc import Mapping
from typing import Final

from pillarbox.envelopes.headers import Headers, id_text
from pillarbox.event import Event

# Headers by column, in the order of the router's settings.
PLACED: Final[Mapping[str, str]] = {"type": "event_type", "tenant": "tenant", "content_type": "content_type"}


def debezium_headers(event: Event) -> Headers:
    """As from PostgreSQL, where an id is a text."""
    return [("id", id_text(event.id).encode()), *_placed(event)]


def debezium_base64_headers(event: Event) -> Headers:
    """As from MySQL and MongoDB, where an id is 16 bytes, which Kafka Connect writes as base64."""
    return [("id", b64encode(event.id.bytes)), *_placed(event)]


def _placed(event: Event) -> Headers:
    return [(header, getattr(event, column).encode()) for column, header in PLACED.items()]
