"""The records that pass between a store and its callers. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple
from uuid import UUID

from pillarbox.event import Event, Status


@dataclass(frozen=True, slots=True)
class Features:
    """Abilities of a database beyond the contract. wake_up: it tells a sleeping relay of new events. transactions:
    several changes commit together.
    """

    wake_up: bool = False
    transactions: bool = True


class Grant(NamedTuple):
    """Ownership of one shard of an ordered stream."""

    stream: str
    shard: int
    worker: str
    token: int
    crashes: int = 0  # owners that died while they owned this shard
    suspect: UUID | None = None  # the event that the last owner had noted when it died
    alone: int = 0  # the number that was noted with the suspect
    previous: str | None = None  # the owner whose lease ran out; none: it had given the shard back


# An event dies if so many workers died while they published it alone.
CRASHES_ALONE: Final = 3


class Claim(NamedTuple):
    """One leased event of a queue stream."""

    event: Event
    token: int
    unreadable: str = ""  # why the event cannot be read, and must not be published


@dataclass(frozen=True, slots=True)
class Work:
    """The answer to one poll of a stream: its workers and the work to do."""

    paused: bool
    live: int  # workers of this stream, the asker included
    rank: int  # how many of them have a name that sorts before the asker's
    free: int  # shards without an owner, or whose lease has run out
    ready: frozenset[int]  # owned shards with pending events
    due: frozenset[int]  # owned shards with a key whose time has come
    scheduled: bool  # events whose instant has come
    suspects: bool  # queue streams: events that were in a crash, to be claimed alone


class HoldMode(StrEnum):
    """The reason why a key is held."""

    RETRYING = "retrying"  # its head failed and is tried again
    BLOCKED = "blocked"  # its head died: nothing moves until an operator acts
    PARKED = "parked"  # its head died: what follows dies too


PARKED: Final = "parked: an earlier event of its key is dead"


class Failure(NamedTuple):
    """An event that did not succeed."""

    event: Event
    error: str
    attempts: int  # after this outcome
    delay: float | None = None  # seconds until the next attempt
    limit: int | None = None  # attempts before it is dead, if neither the event nor the stream says so


def error_entry(error: str, attempts: int) -> dict[str, Any]:
    """One entry of an event's error history."""
    return {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "attempts": attempts, "error": error}


class Hold(NamedTuple):
    """The new state of a held key; due after ``delay`` seconds, or when an operator acts."""

    mode: HoldMode
    delay: float | None
    dead_head: UUID | None = None  # blocked and parked: the dead letter that an operator has to replay or discard


@dataclass(frozen=True, slots=True)
class Settlement:
    """The results of a turn on one shard, written together."""

    grant: Grant
    published: Sequence[Event] = ()
    failed: Sequence[Failure] = ()
    dead: Sequence[Failure] = ()
    held: Sequence[Event] = ()  # pending events whose key is held; they die if it is parked
    hold_keys: Mapping[str, Hold] = field(default_factory=dict)
    release_keys: Collection[str] = ()  # keys to release if nothing of them is failed or held
    keep_published: bool = True  # False: delete instead of marking
    ticket: bytes = b""  # of the batch that was published; it is noted as settled in the same transaction

    @property
    def only_published(self) -> bool:
        """Whether it says nothing but that events are published."""
        more = self.failed or self.dead or self.held or self.hold_keys or self.release_keys or self.ticket
        return bool(self.published) and not more

    def __bool__(self) -> bool:
        return bool(self.published or self.failed or self.dead or self.held or self.hold_keys or self.release_keys)


class Progress(NamedTuple):
    """How far a shard is settled.

    batch: the one that it settled last; None: none. settled: events that were published before and are settled now.
    gone: events of the ticket that are in the outbox no more.
    """

    batch: UUID | None
    settled: int = 0
    gone: Sequence[UUID] = ()


@dataclass(frozen=True, slots=True)
class ClaimResults:
    """The results of leased events of one queue stream."""

    published: Sequence[Event] = ()
    failed: Sequence[Failure] = ()
    dead: Sequence[Failure] = ()
    refund: Sequence[Event] = ()  # given back uncharged
    keep_published: bool = True  # False: delete instead of marking


class KeyRun(NamedTuple):
    """The events of a held key, from its head on."""

    key: str
    mode: HoldMode
    events: Sequence[Event]
    dead_head: UUID | None = None
    unreadable: str = ""  # why its one event cannot be read, as in a part


class DeadLetter(NamedTuple):
    """An event that will not be tried again, with the history of its errors (oldest first)."""

    event: Event
    died_at: datetime
    error: str
    errors: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects events: every field that is given must match."""

    stream: str | None = None
    status: Status | None = None
    key: str | None = None
    type: str | None = None
    tenant: str | None = None
    topic: str | None = None
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    since: datetime | None = None  # written (a dead letter: died) at this instant or later
    until: datetime | None = None  # and before this instant
    ids: Sequence[UUID] | None = None
    consumer: str = ""  # only the dead letters of this consumer; empty: events, and dead letters of relays


class Ref(NamedTuple):
    """The identity of an event: the same id may stand in several streams. With a consumer, that of its dead letter."""

    id: UUID
    stream: str
    consumer: str = ""


class Found(NamedTuple):
    """An event and its state, as an operator sees it."""

    event: Event  # in a list without its payload
    payload_bytes: int
    next_attempt_at: datetime | None = None
    published_at: datetime | None = None
    processing_started_at: datetime | None = None
    lease_owner: str | None = None
    lease_until: datetime | None = None
    lease_token: int = 0
    last_error: str | None = None
    last_error_at: datetime | None = None  # of a dead letter: when it died
    errors: Sequence[Mapping[str, Any]] = ()  # oldest first; in a list left out
    holds_key: bool = False  # a dead letter that its key waits for
    unreadable: str = ""  # which fields cannot be read; they have empty values
    consumer: str = ""  # of a dead letter: the consumer for which it died; empty: a relay
    replay_at: datetime | None = None  # since when it waits for its consumer to apply it again


class Audit(NamedTuple):
    """An action of an operator."""

    at: datetime
    by: str
    action: str
    stream: str
    event_id: UUID | None
    consumer: str = ""  # of a dead letter of a consumer


class Page(NamedTuple):
    """One step of a prune: the number of deleted rows, and where to continue (None: done)."""

    deleted: int
    after: Any


class Rescued(NamedTuple):
    """The result of a rescue: events handed back, and events that died."""

    retried: int
    dead: int
