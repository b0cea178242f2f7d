"""The contract of a consumer with a store: its dead letters, their replays, and what it tells of itself."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pillarbox.event import Event
from pillarbox.store.records import Failure


class ConsumerReport(NamedTuple):
    """What a consumer's process tells of itself. None: not known."""

    source: str  # its broker, in a few words
    lanes: int
    paused_lanes: int
    held_keys: int
    lag_events: int | None
    lag_seconds: float | None
    failed_lanes: str = ""  # those that bring no more messages, each with the reason; empty: none


class ConsumerStatus(NamedTuple):
    """A consumer's process, as an operator sees it."""

    consumer: str
    worker: str
    live: bool
    seen_seconds: float
    report: ConsumerReport


class Replay(NamedTuple):
    """A dead letter that an operator wants to be tried again. It is leased by one worker of its consumer."""

    event: Event
    error: str
    token: int


class Consumers(Protocol):
    """Dead letters of consumers stand beside those of relays; ``consumer`` is a part of their identity.

    A database without transactions refuses all but the reads: raises ConfigError."""

    async def bury(self, consumer: str, failure: Failure, earlier: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Write a dead letter, and count the event as applied in the consumer's inbox, in one transaction.

        False: the inbox has the event already, because a copy was applied or is dead; nothing changes. A letter that
        was replayed and died again keeps its history and its place, gets the new error, and waits for no replay.
        earlier: the errors before this one, oldest first, in the form of ``DeadLetter.errors``. Texts of a foreign
        event that the database could not keep are cut, or have a question mark for each such character."""
        ...

    async def take_replays(self, consumer: str, worker: str, limit: int, seconds: float) -> Sequence[Replay]:
        """Lease dead letters that an operator gave another run, for ``seconds``, in order of their first deaths."""
        ...

    async def finish_replay(self, consumer: str, replay: Replay) -> bool:
        """Delete the letter of a replay that succeeded, and count the event as applied. False: the lease is lost."""
        ...

    async def report(self, consumer: str, worker: str, report: ConsumerReport, seconds: float) -> None:
        """Register this worker as live for ``seconds``, with what it tells of itself."""

    async def leave_consumer(self, consumer: str, worker: str) -> None:
        """Remove this worker."""

    async def consumers(self) -> Sequence[ConsumerStatus]:
        """The workers of all consumers, by name. Those that were not seen for a day are left out."""
        ...

    async def dead_count(self, consumer: str) -> int:
        """The dead letters of a consumer."""
        ...

    async def dead_consumers(self) -> Mapping[str, int]:
        """The number of dead letters of each consumer that has any."""
        ...
