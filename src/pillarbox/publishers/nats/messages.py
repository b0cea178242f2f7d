"""From an event to NATS's message and its subject. Pure."""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from pillarbox.envelopes import NatsMessage
from pillarbox.envelopes.headers import id_text
from pillarbox.errors import Reject
from pillarbox.event import Event

_SUBJECT_BYTES: Final = 1024
# A wildcard is for readers; spaces and control characters end a line of the protocol.
_NOT_IN_SUBJECTS: Final = re.compile(r"[\x00-\x20\x7f*>]")
# Messages to them are commands to the server, or answers to its clients.
_NOT_FOR_EVENTS: Final = ("$", "_INBOX.")
_FRAME_BYTES: Final = len(b"NATS/1.0\r\n\r\n")
_LINE_BYTES: Final = len(b": \r\n")
ID_HEADER: Final = "Nats-Msg-Id"
STREAM_HEADER: Final = "Nats-Expected-Stream"


class Posting(NamedTuple):
    """A message with its subject."""

    subject: str
    body: bytes
    headers: dict[str, str]


def subject_problem(subject: str) -> str | None:
    """Why no message can be published to a subject; None: it can."""
    if _NOT_IN_SUBJECTS.search(subject):
        return "a subject has no spaces, no control characters and no wildcards"
    if not all(subject.split(".")):
        return "no part of a subject between its dots is empty"
    if subject.startswith(_NOT_FOR_EVENTS):
        return "subjects that start with $ or _INBOX. are the server's own"
    if len(subject.encode()) > _SUBJECT_BYTES:
        return f"a subject has at most {_SUBJECT_BYTES} bytes"
    return None


def post(
    event: Event, subject: str, message_of: Callable[[Event], NatsMessage], *, stream: str, max_bytes: int
) -> Posting:
    """Raises Reject for an event that no server takes. stream: must be the one that stores it; empty: any."""
    problem = subject_problem(subject)
    if problem is not None:
        raise Reject(
            f"the subject {subject[:100]!r} is impossible: {problem}; correct the event's routing key or topic"
        )
    body, headers = message_of(event)
    headers = {**headers, ID_HEADER: id_text(event.id)}
    if stream:
        headers[STREAM_HEADER] = stream
    size = len(body) + _FRAME_BYTES + sum(_size(name) + _size(value) + _LINE_BYTES for name, value in headers.items())
    if size > max_bytes:
        raise Reject(
            f"the message takes {size} bytes with its headers and the server takes at most {max_bytes}; raise its "
            "max_payload, or store the content elsewhere and send a reference"
        )
    return Posting(subject, body, headers)


def _size(text: str) -> int:
    # An envelope of the user's may write more than ASCII.
    return len(text) if text.isascii() else len(text.encode())
