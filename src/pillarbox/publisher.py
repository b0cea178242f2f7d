"""The contract between the relay and a destination."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, runtime_checkable

from pillarbox.event import Event

ERROR_LENGTH: Final = 500


class Result(StrEnum):
    """What became of one event in one call of ``publish``."""

    PUBLISHED = "published"  # the destination confirmed it
    RETRY = "retry"  # an error that may pass: charged an attempt, and its key waits
    REJECTED = "rejected"  # can never succeed: dead at once
    UNTRIED = "untried"  # not sent, nothing is charged; with an error: the destination is down


class Outcome(NamedTuple):
    """One event's result. Make it with the functions below; the error never contains the payload."""

    result: Result
    error: str | None = None
    charged: bool = True

    @property
    def is_outage(self) -> bool:
        """Whether the destination could not be reached: its circuit opens."""
        return self.result is Result.UNTRIED and self.error is not None


PUBLISHED: Final = Outcome(Result.PUBLISHED)
UNTRIED: Final = Outcome(Result.UNTRIED)


def retry(error: str, *, charged: bool = True) -> Outcome:
    """A passing error of this event; ``charged=False`` when the event is not to blame."""
    return Outcome(Result.RETRY, error[:ERROR_LENGTH], charged)


def rejected(error: str) -> Outcome:
    """An error that no retry can mend."""
    return Outcome(Result.REJECTED, error[:ERROR_LENGTH])


def outage(error: str) -> Outcome:
    """The destination is unreachable: this event was not delivered and is charged nothing."""
    return Outcome(Result.UNTRIED, error[:ERROR_LENGTH])


@dataclass(frozen=True, slots=True)
class PublisherFeatures:
    """What a destination can do beyond the contract: declared here, never guessed.

    calls: how many calls of ``publish`` it serves at once (each is for another shard or event).
    first_batch: how many events an ordered stream gives it at first, before it is known how long a call takes.
    strict_keys: after a rejected event nothing later of its key was sent in the same call; the relay asks for it where
    a stream's policy is to block or park the key of a dead event.
    deduplicates: the destination itself drops a second copy of an event id.
    """

    calls: int = 4
    first_batch: int = 500
    strict_keys: bool = True
    deduplicates: bool = False


@runtime_checkable
class Publisher(Protocol):
    """Delivers events to one destination.

    ``publish`` never raises for a single event and may be called several times at once. It keeps the **prefix per
    key**: when an event's outcome is not ``published``, no later event of the same key in that call was sent; those are
    ``untried``. It returns only when every outcome is known: waiting for a destination that is away is allowed.
    """

    @property
    def features(self) -> PublisherFeatures: ...

    @property
    def description(self) -> str:
        """The destination in a few words for logs and status, without secrets: ``kafka localhost:9092``."""
        ...

    async def open(self) -> None:
        """Connect. Raises DestinationDown to be tried again later, ConfigError when a setting is wrong."""
        ...

    async def publish(self, events: Sequence[Event]) -> Sequence[Outcome]:
        """One outcome per event: the same order, the same length."""
        ...

    async def close(self) -> None:
        """Let go. Calls of ``publish`` that still wait return soon: what is confirmed as published, the rest
        untried. Safe to call twice."""
        ...
