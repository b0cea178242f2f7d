"""The contract between a consumer and the broker that it reads from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple, Protocol


class Order(StrEnum):
    """The order that a source keeps while several consumers share its messages."""

    KEY = "key"  # messages of one key come to one consumer at a time, in order
    LANE = "lane"  # one consumer at a time reads a lane, in order
    NONE = "none"  # only while a single consumer reads


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """One assignment of a part of the broker's messages to this consumer: on Kafka a partition.

    A part that is taken away and comes back is another lane, so that nothing of the first time is taken for the second.
    Two lanes are equal only if they are the same object. name: for people, such as ``orders/3``.
    """

    name: str


class Message(NamedTuple):
    """One message, as the broker has it."""

    lane: Lane
    position: int  # grows within its lane; numbers may be missing
    topic: str
    key: bytes | None
    body: bytes
    headers: Sequence[tuple[str, bytes]] = ()
    content_type: str | None = None  # where the broker has a field of its own for it
    message_id: str | None = None  # the same
    written_at: datetime | None = None
    place: str = ""  # the same for each delivery of this message, such as "orders/3/1234"; empty: the broker has none


@dataclass(frozen=True, slots=True)
class SourceFeatures:
    """The abilities of a broker. order: what it keeps among consumers. lag: it knows how many messages wait."""

    order: Order = Order.LANE
    lag: bool = True


class Lanes(Protocol):
    """What a source tells its consumer about lanes. Called on the event loop in which ``open`` was called."""

    def assigned(self, lanes: Sequence[Lane]) -> None:
        """Messages of these lanes may come from now on."""

    async def revoked(self, lanes: Sequence[Lane]) -> None:
        """The lanes go when this returns. The consumer finishes what runs, and settles what is done.

        Wait for it for as long as the broker allows; then the lanes are lost."""

    def lost(self, lanes: Sequence[Lane]) -> None:
        """The lanes are gone: another consumer may have them. Nothing of them can be settled any more."""

    def failed(self, lane: Lane, error: str) -> None:
        """No message of this lane will come until an operator acts, as the error says."""


class Source(Protocol):
    """Reads the messages of one broker. Methods that are not awaited return at once.

    What is not settled is delivered again: to this consumer's next ``open``, or to another one of the same name.
    A source can be opened again after ``close``.
    """

    @property
    def features(self) -> SourceFeatures: ...

    @property
    def description(self) -> str:
        """The broker in a few words for logs and status, without secrets: ``kafka localhost:9092 orders``."""
        ...

    async def open(self, consumer: str, lanes: Lanes) -> None:
        """Join the consumers of this name. Raises Outage to be tried again later, ConfigError when a setting is
        wrong. It may return before lanes are assigned."""

    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        """Up to ``limit`` messages, each lane's in order; none after ``seconds`` without one.

        Raises Outage while the broker is away: the consumer asks again, and the source comes back by itself. Raises
        ConfigError when no waiting mends it. After any other error the source is dead, and the consumer ends."""
        ...

    def settle(self, lane: Lane, position: int) -> None:
        """Everything of this lane up to this position is done. The broker learns it soon, or in ``close``. Of a lane
        that is gone: ignored."""

    def pause(self, lane: Lane) -> None:
        """Bring no more messages of this lane; those that are on their way may still come. Of a lane that is gone, or
        paused: ignored."""

    def resume(self, lane: Lane) -> None:
        """Bring messages of this lane again."""

    async def lag(self) -> Mapping[Lane, int]:
        """How many messages of each lane are not settled, as far as the broker knows. Empty while it is away, and
        without the feature ``lag``."""
        ...

    async def close(self) -> None:
        """Tell the broker what is settled, and leave. It calls no ``revoked``: the consumer has finished. Safe to call
        twice."""
