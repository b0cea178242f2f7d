"""The argument of ``publish``: events in order, grouped by shard. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from pillarbox.event import Event


class Part(NamedTuple):
    """The events of one shard.

    shard: none in a queue stream. token: proves the ownership under which the events were read. ticket: names these
    events, for a destination that keeps the progress of a shard; a publisher passes it on unread. unreadable: why its
    one event cannot be read, and must not be published; empty for all that a publisher gets.
    """

    shard: int | None
    token: int
    events: Sequence[Event]
    ticket: bytes = b""
    unreadable: str = ""


class Batch(tuple[Event, ...]):
    """The events of one call, in order; ``parts`` has the same events by shard."""

    stream: str
    parts: Sequence[Part]

    def __new__(cls, stream: str, parts: Sequence[Part]) -> Self:
        if len(parts) == 1:
            batch = super().__new__(cls, parts[0].events)
        else:
            batch = super().__new__(cls, (event for part in parts for event in part.events))
        batch.stream, batch.parts = stream, parts
        return batch

    @classmethod
    def of(cls, events: Iterable[Event], stream: str = "default") -> Self:
        """Events that come from no store, for example in a test."""
        return cls(stream, [Part(None, 0, tuple(events))])
