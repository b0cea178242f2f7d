"""A partition that a reader has, and a message of it."""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from confluent_kafka import TopicPartition

from pillarbox.source import Lane, Message


@dataclass(eq=False, slots=True)
class Partition:
    """One assignment of a partition. Offsets are those of the next message, as Kafka counts them.

    The reader's thread calls ``reached``, the event loop ``settle``."""

    lane: Lane
    topic: str
    number: int
    settled: int | None  # None: nothing was ever committed
    committed: int | None
    read_in: int  # the number of the read in which it was assigned
    delivered: int | None = None  # None: nothing yet
    end: int = 0  # where nothing more was to be read, the last time
    is_paused: bool = False  # as the consumer was told
    wants_pause: bool = False

    @property
    def is_settled(self) -> bool:
        return self.settled is not None and self.settled != self.committed

    def settle(self, position: int) -> None:
        if position >= (self.settled or 0):
            self.settled = position + 1
            self._settle_end()

    def reached(self, end: int) -> None:
        """Up to here all has been delivered."""
        self.end = end
        self._settle_end()

    def _settle_end(self) -> None:
        # Behind the last message there can be markers of transactions, and messages that were never committed. If
        # retention deleted them, an offset in front of them would be missing.
        begin = self.settled or 0
        if begin >= (self.delivered or 0) and self.end > begin:
            self.settled = self.end

    def at(self, offset: int | None = None) -> TopicPartition:
        place = (self.topic, self.number)
        return TopicPartition(*place) if offset is None else TopicPartition(*place, offset)


def message_of(raw: Any, lane: Lane) -> Message:
    kind, milliseconds = raw.timestamp()
    offset = raw.offset()
    # Debezium writes headers without a value for columns that are NULL.
    headers = [header for header in raw.headers() or () if header[1] is not None]
    written_at = _instant(milliseconds) if kind else None
    place = f"{lane.name}/{offset}"
    return Message(lane, offset, raw.topic(), raw.key(), raw.value() or b"", headers, None, None, written_at, place)


@lru_cache(maxsize=16)
def _instant(milliseconds: int) -> datetime:
    # Many messages are written in the same millisecond where time counts.
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
