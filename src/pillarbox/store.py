"""The contract between the relay and a database: meaning, never SQL.

Every instant is compared by the database's clock; durations are seconds. Whatever changes an event carries the token
that was granted with it: a stale one changes nothing and raises LeaseLost (or is left out of the answer, where several
are named). A database that cannot be reached raises StoreDown.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

from pillarbox.event import Event, Status


@dataclass(frozen=True, slots=True)
class Features:
    """What a database can do beyond the contract: declared here, never guessed.

    wake_up: it tells a sleeping relay of new events.
    concurrent_writers: a transaction may stay open while others commit.
    transactions: several changes are made as one.
    """

    wake_up: bool = False
    concurrent_writers: bool = True
    transactions: bool = True


class Grant(NamedTuple):
    """Ownership of one shard of an ordered stream."""

    stream: str
    shard: int
    worker: str
    token: int
    unclean_count: int = 0  # take-overs of an expired lease since the last clean stretch
    suspect: UUID | None = None  # the one event that the last owner was alone with when it died


class Claim(NamedTuple):
    """One leased event of a queue stream."""

    event: Event
    token: int


@dataclass(frozen=True, slots=True)
class Work:
    """The answer to one poll of a stream."""

    paused: bool
    live: int  # workers of this stream, the asker included
    rank: int  # of those, how many have a name that sorts before the asker's
    free: int  # shards without an owner, or whose lease has run out
    ready: frozenset[int]  # owned shards with pending events
    due: frozenset[int]  # owned shards with a key whose time has come
    scheduled: bool  # events whose instant has come: promote them
    suspects: bool  # queue streams: events that were in a crash, to be claimed alone


class Aside(StrEnum):
    """Why a key is set aside."""

    RETRY = "retry"  # its head failed and is tried again
    BLOCKED = "blocked"  # its head died: nothing moves until an operator acts
    PARKED = "parked"  # its head died: what follows dies too


PARKED: Final = "parked: an earlier event of its key is dead"


class Failure(NamedTuple):
    """An event that did not succeed."""

    event: Event
    error: str
    attempts: int  # as they are now
    delay: float | None = None  # seconds until the next attempt


class KeyAside(NamedTuple):
    """A key that is set aside from now on; due after ``delay`` seconds, or when an operator acts."""

    mode: Aside
    delay: float | None
    dead_head: UUID | None = None  # blocked and parked: the event whose fate an operator has to decide


@dataclass(frozen=True, slots=True)
class Settlement:
    """All that one turn changes, in one transaction."""

    published: Sequence[Event] = ()
    failed: Sequence[Failure] = ()
    dead: Sequence[Failure] = ()
    held: Sequence[Event] = ()  # pending events of keys that are set aside; dead where the key is parked
    aside: Mapping[str, KeyAside] = field(default_factory=dict)
    release: Collection[str] = ()  # keys to free if nothing of them is failed or held
    keep_published: bool = True  # False: delete instead of marking

    def __bool__(self) -> bool:
        return bool(self.published or self.failed or self.dead or self.held or self.aside or self.release)


class KeyRun(NamedTuple):
    """What a key that is set aside has waiting, from its head on."""

    key: str
    mode: Aside
    events: Sequence[Event]
    dead_head: UUID | None = None


class DeadLetter(NamedTuple):
    """An event that will not be tried again, with the history of its errors (oldest first)."""

    event: Event
    died_at: datetime
    error: str
    errors: Sequence[Mapping[str, Any]]


class StreamStatus(NamedTuple):
    """A stream as an operator sees it."""

    stream: str
    paused: bool
    workers: int  # live ones
    counts: Mapping[Status, int]  # of the states that have events
    oldest_seconds: float | None  # how long the oldest event has waited; what is scheduled does not wait yet
    published_last_hour: int  # of those that are still kept


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events are meant: all that is given must agree."""

    stream: str | None = None
    status: Status | None = None
    key: str | None = None
    type: str | None = None
    tenant: str | None = None
    since: datetime | None = None  # written at this instant or later; a dead letter: died
    until: datetime | None = None  # and before this one
    ids: Sequence[UUID] | None = None


class Found(NamedTuple):
    """An event and where it stands, as an operator sees it."""

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


class Audit(NamedTuple):
    """What an operator did."""

    at: datetime
    by: str
    action: str
    stream: str
    event_id: UUID | None


class Page(NamedTuple):
    """One step of a prune: rows deleted, and where to go on (None: through)."""

    deleted: int
    after: Any


class Rescued(NamedTuple):
    """What a rescue did: events handed back, and events that died of it."""

    retried: int
    dead: int


class Store(Protocol):
    """One outbox in one database."""

    @property
    def features(self) -> Features: ...
    @property
    def description(self) -> str:
        """Where the outbox is, without secrets."""
        ...

    @property
    def shards(self) -> int:
        """How many shards a stream has: the table's own number, known once the store is open."""
        ...

    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        """Connect and check the schema. ``on_wake(stream)`` is called when events may have arrived.

        May be called again, by another relay of the process: the last close lets go."""
        ...

    async def close(self) -> None: ...
    async def migrate(self) -> Sequence[str]:
        """Bring the schema to this release's version; the names of the steps that were run."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """The database's own transaction, for ``add``."""

    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        """Write events, in ``tx`` or in a transaction of its own. Raises DuplicateEvent."""

    # Ordered streams: ownership of shards.
    async def join(self, stream: str, worker: str, seconds: float) -> None:
        """Be counted among the stream's live workers for so long; announces the stream at the first call."""

    async def leave(self, stream: str, worker: str) -> None: ...
    async def take(self, stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        """Own up to ``limit`` shards that nobody owns, or whose lease has run out."""

    async def renew(self, grants: Sequence[Grant], seconds: float) -> Collection[Grant]:
        """Extend leases; the answer is what is still held."""

    async def give(self, grants: Sequence[Grant]) -> None:
        """Let go of shards, cleanly."""

    async def poll(self, stream: str, worker: str, grants: Sequence[Grant] | None) -> Work:
        """In one round trip: what these shards (None: all shards) have to do, and how the stream is shared."""

    # Ordered streams: one turn on one shard.
    async def keys_aside(self, grant: Grant) -> Collection[str]:
        """The keys of this shard that are set aside."""

    async def read(self, grant: Grant, limit: int, max_bytes: int) -> Sequence[Event]:
        """Pending events in order of seq; at least one if there is any, whatever its size."""

    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        """The failed and held events, in order, of one key whose time has come."""

    async def suspect(self, grant: Grant, event: Event | None) -> None:
        """Note which single event is about to be published; None: it ended."""

    async def trust(self, grant: Grant, unclean_count: int = 0) -> None:
        """Forget that owners died with this shard, but for so many of them."""

    async def settle(self, grant: Grant, settlement: Settlement) -> Collection[str]:
        """Write what became of a turn. Of the keys that it names, the answer is those that are set aside now."""

    # Events that wait for an instant of their own: scheduled ones, and failed ones without a key or in a queue.
    async def promote(self, stream: str, limit: int) -> int:
        """Make those whose instant has come pending; how many."""

    # Queue streams: leased events.
    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        """Lease pending events of a shard, each charged an attempt. No shard: one suspect, to be worked alone."""

    async def renew_claims(self, claims: Sequence[Claim], seconds: float) -> Collection[UUID]:
        """Extend leases; the answer is what is still held."""

    async def settle_claims(self, claims: Sequence[Claim], settlement: Settlement, refund: Sequence[UUID] = ()) -> int:
        """Settle leased events; ``refund`` gives events back uncharged. How many were refused as stale."""

    async def rescue(self, stream: str, stuck_seconds: float, max_attempts: int, limit: int) -> Rescued:
        """Take events from workers that died (lease run out) or that hang (held for longer than so)."""

    # Retention.
    async def prune_published(self, keep_seconds: float, limit: int, after: Any = None) -> Page: ...
    async def prune_dead(self, keep_seconds: float, limit: int) -> int: ...

    # Steering and operators.
    async def pause(self, stream: str, by: str) -> None: ...
    async def resume(self, stream: str, by: str) -> None: ...
    async def doze(self, stream: str, worker: str, asleep: bool) -> None:
        """Say that this worker sleeps (and wants to be woken), or that it is awake."""

    async def unserved(self) -> Sequence[str]:
        """Streams with waiting events and no live worker."""

    async def count(self, stream: str) -> Mapping[Status, int]: ...
    async def dead_letters(self, stream: str | None = None, limit: int = 100) -> Sequence[DeadLetter]: ...
    async def replay(self, ids: Sequence[UUID], by: str) -> int:
        """Give dead letters another run of attempts; how many there were."""

    async def discard(self, ids: Sequence[UUID], by: str) -> int:
        """Give up dead letters for good, leaving an audit row; a key that they blocked goes on."""

    # Looking. Lists load no payloads.
    async def streams(self) -> Sequence[StreamStatus]:
        """Every stream that has events or was ever served or paused, by name. Reads the whole outbox."""

    async def find(self, where: Filter, limit: int, newest_first: bool = True) -> Sequence[Found]:
        """Events in order of their ids, which is the order of time for ids that Pillarbox made."""

    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        """Dead letters in order of seq, from above ``after`` on."""

    async def look(self, id: UUID) -> Found | None:
        """One event, dead or not, with its payload and its errors."""

    async def audit(self, limit: int) -> Sequence[Audit]:
        """What operators did, newest first."""
