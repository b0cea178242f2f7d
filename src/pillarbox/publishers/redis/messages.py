"""From an event to the entry of a stream. Pure."""

from collections.abc import Callable
from typing import Final, NamedTuple

from pillarbox.envelopes import RedisMessage
from pillarbox.errors import Reject
from pillarbox.event import Event
from pillarbox.publishers.redis.connection import Word

_NAME_BYTES: Final = 1024
_OVERHEAD_BYTES: Final = 32  # of a command, and of each of its words


class Posting(NamedTuple):
    """The command that adds an entry to a stream."""

    stream: str
    command: tuple[Word, ...]
    size: int


def post(
    event: Event, stream: str, message_of: Callable[[Event], RedisMessage], *, max_bytes: int, maxlen: int
) -> Posting:
    """Raises Reject for an event that is too large. maxlen: of the stream; 0: any."""
    if len(stream.encode()) > _NAME_BYTES:
        raise Reject(f"the topic has more than {_NAME_BYTES} bytes; shorten it")
    fields = message_of(event)
    words: list[Word] = ["XADD", stream]
    if maxlen:
        words += ["MAXLEN", "~", maxlen]
    words.append("*")
    size = _OVERHEAD_BYTES
    for name, value in fields.items():
        if not isinstance(value, bytes):
            raise Reject(f"the field {name[:100]!r} is a {type(value).__name__}; the envelope has to make bytes of it")
        words += (name, value)
        size += len(name) + len(value) + 2 * _OVERHEAD_BYTES
    if size > max_bytes:
        raise Reject(
            f"the entry takes {size} bytes and at most {max_bytes} are sent; raise max_bytes of the publisher and "
            "proto-max-bulk-len of the server, or store the content elsewhere and send a reference"
        )
    return Posting(stream, tuple(words), size)
