"""The targets of one ``publish`` call: topics, and what they refuse. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pillarbox.envelopes import Message
from pillarbox.event import Event
from pillarbox.publisher import Outcome, rejected
from pillarbox.publishers import _waves as waves
from pillarbox.publishers.kafka.topics import lone_batch_bytes


class Target(NamedTuple):
    """The Kafka topic for the events with one value of ``topic``."""

    topic: str
    refusal: Outcome | None
    compacted: bool
    max_bytes: int
    roomy_bytes: int

    def refuse(self, message: Message) -> Outcome | None:
        """The outcome for a message that the topic cannot take; None: it can."""
        if self.compacted and message.key is None:
            return rejected(f"topic {self.topic!r} is compacted and takes no event without a key; give it a key")
        size = lone_batch_bytes(message)
        if size <= self.max_bytes:
            return None
        return rejected(
            f"the event takes {size} bytes and topic {self.topic!r} at most {self.max_bytes}; "
            "raise max.message.bytes of the topic, or store the content elsewhere and send a reference"
        )


class Call(waves.Call):
    """One call of ``publish``, with its targets."""

    def __init__(self, events: Sequence[Event], targets: Mapping[str, Target]) -> None:
        super().__init__(events)
        self.targets = targets
