"""An event as one line of JSON."""

import base64
import json
from typing import NoReturn

from pillarbox.envelopes.envelope import is_json
from pillarbox.event import Event


def json_line(event: Event) -> bytes:
    """The event as a line. A payload that is JSON on one line stands in it as it is, any other in base64."""
    fields = {
        "id": str(event.id),
        "seq": event.seq,
        "stream": event.stream,
        "tenant": event.tenant,
        "topic": event.topic,
        "type": event.type,
        "key": event.key,
        "headers": dict(event.headers),
        "occurred_at": event.occurred_at.isoformat(),
        "content_type": event.content_type,
    }
    start = json.dumps(fields, separators=(",", ":"))[:-1].encode()
    # Last, so that a reader can cut the payload out byte for byte.
    if is_json(event.content_type) and _fits_a_line(event.payload):
        return b'%b,"payload":%b}\n' % (start, event.payload)
    return b'%b,"payload_base64":"%b"}\n' % (start, base64.b64encode(event.payload))


def _fits_a_line(payload: bytes) -> bool:
    if b"\n" in payload or b"\r" in payload:
        return False
    try:
        # Decoded here: from bytes json.loads would accept UTF-16 and UTF-32 too.
        json.loads(payload.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
