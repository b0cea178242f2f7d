"""The contract between the relay and a destination."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

from pillarbox.batch import Batch
from pillarbox.finding import Finding

ERROR_LENGTH: Final = 500


class Result(StrEnum):
    """The result of one event in one call of ``publish``."""

    PUBLISHED = "published"  # the destination confirmed it
    RETRY = "retry"  # an error that may pass: charged an attempt, and its key waits
    REJECTED = "rejected"  # can never succeed: dead at once
    UNTRIED = "untried"  # not sent, nothing is charged; with an error: the destination is down


class Limits(NamedTuple):
    """The limits of one event, in place of its stream's; None: as the stream says.

    retry: a retry policy, from the number of attempts so far to the seconds until the next one.
    max_attempts: attempts before the event is dead. An event's own limit comes first.
    """

    retry: Callable[[int], float] | None = None
    max_attempts: int | None = None


class Outcome(NamedTuple):
    """One event's result. Make it with the functions below; the error never contains the payload.

    after_seconds: the destination asked for a pause: the event is tried again after this many seconds at the earliest.
    limits: for an event that is to be tried in another way than the others of its stream.
    ambiguous: a refusal that is either the event's fault or the destination's. When five different events in a row are
    refused like this, and nothing is confirmed between them, the relay takes it for an outage.
    """

    result: Result
    error: str | None = None
    charged: bool = True
    after_seconds: float | None = None
    limits: Limits | None = None
    ambiguous: bool = False

    @property
    def is_outage(self) -> bool:
        """Whether the destination could not be reached: its circuit opens."""
        return self.result is Result.UNTRIED and self.error is not None


PUBLISHED: Final = Outcome(Result.PUBLISHED)
# Equal to PUBLISHED, but another object: nobody wanted the event. Only metrics tell the two apart, with ``is``.
SKIPPED: Final = Outcome(Result.PUBLISHED)
UNTRIED: Final = Outcome(Result.UNTRIED)


def retry(
    error: str,
    *,
    charged: bool = True,
    after_seconds: float | None = None,
    limits: Limits | None = None,
    ambiguous: bool = False,
) -> Outcome:
    """A passing error of this event; ``charged=False`` when the event is not to blame, ``ambiguous=True`` when the
    destination may be to blame instead."""
    return Outcome(Result.RETRY, error[:ERROR_LENGTH], charged, after_seconds, limits, ambiguous)


def rejected(error: str) -> Outcome:
    """An error that no retry can mend."""
    return Outcome(Result.REJECTED, error[:ERROR_LENGTH])


def outage(error: str, *, after_seconds: float | None = None) -> Outcome:
    """The destination is unreachable: this event was not delivered and is charged nothing."""
    return Outcome(Result.UNTRIED, error[:ERROR_LENGTH], after_seconds=after_seconds)


@dataclass(frozen=True, slots=True)
class PublisherFeatures:
    """The abilities of a destination beyond the contract.

    calls: how many calls of ``publish`` it serves at once. Each call is for other shards or another event.
    first_batch: how many events an ordered stream passes at first, before the duration of a call is known.
    joint: a call for the events of many shards costs no more than one for the events of a few, and no slow event holds
    the others up. Shards of an ordered stream that have few events then share a call.
    strict_keys: after a rejected event nothing later of its key is sent in the same call. A stream that blocks or
    parks the key of a dead event needs it.
    deduplicates: the destination itself drops a second copy of an event id.
    concurrency: how many events a queue stream passes at once; None: as many as the stream says.
    exactly_once: it publishes all events of a part or none, together with the part's ticket, and knows after a crash
    which ticket came last: see ``recover``. It serves ordered streams only, on a store with transactions.
    """

    calls: int = 4
    first_batch: int = 500
    joint: bool = False
    strict_keys: bool = True
    deduplicates: bool = False
    concurrency: int | None = None
    exactly_once: bool = False


class Place(NamedTuple):
    """A shard for a destination that keeps its progress.

    identity: of the outbox. shards: how many its streams have. token: proves the ownership.
    """

    identity: str
    stream: str
    shard: int
    shards: int
    token: int


class Needs(NamedTuple):
    """The wishes of one stream, or of a consumer, for its publisher.

    concurrency: how many events the stream wants worked at once.
    strict_keys: the stream blocks or parks the key of a dead event.
    unhandled: what handlers do with an event type that they do not know: ``wait`` in a relay, ``skip`` in a consumer.
    """

    stream: str
    concurrency: int
    strict_keys: bool
    unhandled: Literal["wait", "skip"] = "wait"


@runtime_checkable
class Publisher(Protocol):
    """Delivers events to one destination. Derive from it, and write ``description`` and ``publish``.

    ``publish`` never raises for a single event and may be called several times at once. It keeps the **prefix per
    key**: when an event's outcome is not ``published``, no later event of the same key in that call was sent; those are
    ``untried``. It returns only when every outcome is known: waiting for a destination that is away is allowed.
    """

    @property
    def features(self) -> PublisherFeatures:
        return PublisherFeatures()

    @property
    @abstractmethod
    def description(self) -> str:
        """The destination in a few words for logs and status, without secrets: ``kafka localhost:9092``."""

    @property
    def default_address(self) -> str:
        """Where events without a topic go, for logs: a topic, an exchange or a queue. Empty: there is no such place."""
        return ""

    @property
    def silence(self) -> str | None:
        """Why nothing has been confirmed for some seconds, while calls of ``publish`` wait. None: all is well.

        For a publisher that waits by itself while its destination is away: metrics and health then show the outage."""
        return None

    def prepared(self, needs: Needs) -> "Publisher":
        """The publisher for this stream: this one, or a new one with other settings. Called before ``open``.

        A publisher that serves several streams must not change itself here.
        """
        return self

    async def open(self) -> None:
        """Connect. Raises Outage to be tried again later, ConfigError when a setting is wrong."""
        return

    @abstractmethod
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        """One outcome per event of the batch: the same order, the same length."""

    async def recover(self, place: Place) -> bytes:
        """The ticket of the last part that was published of this shard; empty: there was none. For a publisher with
        the feature ``exactly_once``.

        After it returns no earlier owner can publish anything of the shard, and this one can. It is called after each
        take-over, and after each call of ``publish`` that did not end with all events published and settled. Until
        then the publisher leaves the shard's events untried. Raises Outage, or ConfigError when it can never work."""
        return b""

    def leave(self, place: Place) -> None:
        """The shard is not this owner's any more: free what ``recover`` has opened. Returns at once."""
        return

    async def examine(self) -> Sequence[Finding]:
        """Checks of the destination for ``pillarbox doctor``, while it is open: its address, its limits, whether it
        keeps what it confirms. They change nothing."""
        return []

    async def close(self) -> None:
        """Disconnect. Calls of ``publish`` that still wait return soon: confirmed events are published, the others
        untried. Safe to call twice."""
        return
