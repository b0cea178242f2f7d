"""The contract of envelopes, and the two simple ones: the raw payload and the legacy document."""

from base64 import b64encode
from functools import lru_cache
from typing import NamedTuple

from pillarbox.envelopes.headers import HeaderBuilder, default_headers, id_text, iso_instant
from pillarbox.errors import Reject
from pillarbox.event import Event


class Binding(NamedTuple):
    """Names of a broker's headers.

    prefix: stands before the name of an envelope's attribute.
    content_type: the header for the body's content type; None: the broker has a field of its own for it.
    """

    prefix: str
    content_type: str | None = "content-type"


class Envelope:
    """The form of a message. This one is ``raw``: the payload byte for byte, all the rest in headers.

    Derive from it for another form.
    """

    def __init__(self, headers: HeaderBuilder = default_headers) -> None:
        self.headers = headers

    def body(self, event: Event) -> bytes:
        """The body of the message. Raises Reject for an event that this form cannot hold."""
        return event.payload

    def content_type(self, event: Event) -> str:
        """The content type of the body."""
        return event.content_type

    def header_builder(self, binding: Binding) -> HeaderBuilder:
        """The function that makes all headers of a message, named as the binding says."""
        return self.headers


class Legacy(Envelope):
    """The JSON document ``{"_id", "payload", "created_at"}``, with the payload's own bytes inside.

    A payload that is not JSON in UTF-8 by its content type stands as base64 in ``payload_base64`` in place of
    ``payload``: readers of the known field never meet a string where they expect a document. The writer guarantees that
    a JSON payload is well-formed; only an empty one is refused here.
    """

    def body(self, event: Event) -> bytes:
        field, payload = json_field(event, "payload", "payload_base64")
        created_at = iso_instant(event.created_at)
        return b'{"_id":"%b","%b":%b,"created_at":"%b"}' % (id_text(event.id).encode(), field, payload, created_at)

    def content_type(self, event: Event) -> str:
        return "application/json"


@lru_cache(maxsize=256)
def is_json(content_type: str) -> bool:
    """Whether the type says JSON in UTF-8. A document has one encoding: JSON in another one stands in it as base64."""
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    charset = next((each.removeprefix("charset=").strip('"') for each in parameters if "charset=" in each), "utf-8")
    return (kind in ("application/json", "text/json") or kind.endswith("+json")) and charset in ("utf-8", "us-ascii")


def json_field(event: Event, plain: str, encoded: str) -> tuple[bytes, bytes]:
    """The payload as a field of a JSON document: name and value. Raises Reject when it is JSON and empty."""
    if not is_json(event.content_type):
        return encoded.encode(), b'"%b"' % b64encode(event.payload)
    if not event.payload or event.payload.isspace():
        raise Reject(f"the payload is empty, which is not {event.content_type}; write null, or another content type")
    return plain.encode(), event.payload
