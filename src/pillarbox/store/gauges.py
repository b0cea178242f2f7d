"""The contract of cheap questions: what waits, which keys are held, who works. A monitor may ask them all day.

Every answer comes from indexes and reads at most ``limit`` entries of each, however many events there are.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol
from uuid import UUID

from pillarbox.event import Mode, Status
from pillarbox.store.records import Found, HoldMode


class StreamGauges(NamedTuple):
    """A stream at a glance. Published events are not counted: no index has them."""

    stream: str
    mode: Mode | None  # none: no relay has served it yet
    destination: str | None
    paused: bool
    counts: Mapping[Status, int]  # only states that have events
    at_least: Collection[Status]  # states of which there may be more than their count says
    oldest_seconds: float | None  # how long the oldest event has waited; scheduled events do not count
    held_keys: Mapping[HoldMode, int]  # only modes that have keys
    workers: int  # live ones
    open_circuits: int  # live workers that wait for the destination


class StuckKey(NamedTuple):
    """A held key, with the event that it waits for."""

    key: str
    mode: HoldMode
    next_attempt_at: datetime | None  # none: it waits for an operator
    head: UUID | None  # the failed event, or the dead letter; none: its worker is about to release the key
    error: str | None  # the last one of the head
    since: datetime | None  # when the head failed or died last
    waiting: int  # events of the key that are failed or held, at most the limit that was asked for


class WorkerStatus(NamedTuple):
    """A worker of a stream. One that missed the renewal of its leases is not live, but keeps its shards until they run
    out."""

    name: str
    live: bool
    seen_seconds: float | None  # how long ago; none: it has left and still owns shards
    shards: int  # that it owns
    free_seconds: float  # until its shards or events come free, if it does not renew its leases
    circuit_error: str | None = None  # why it waits for the destination; none: the circuit is closed
    circuit_seconds: float | None = None  # for how long it has waited
    version: str | None = None  # of Pillarbox


class Ahead(NamedTuple):
    """What comes before a pending event of an ordered stream."""

    owner: str | None  # of its shard
    owned_seconds: float  # until the lease runs out
    events: int  # pending ones of its shard with a lower seq, at most the limit that was asked for


class Gauges(Protocol):
    """Questions whose cost does not grow with the outbox."""

    async def gauges(self, limit: int = 10_000) -> Sequence[StreamGauges]:
        """Every stream that has waiting events or was ever served or paused, sorted by name.

        A count below ``limit`` is exact; where more entries of an index were there, the state is in ``at_least``."""
        ...

    async def stuck_keys(self, stream: str, limit: int = 100, key: str | None = None) -> Sequence[StuckKey]:
        """Held keys of a stream by shard and name, up to ``limit``; only this one if ``key`` is given."""
        ...

    async def workers(self) -> Mapping[str, Sequence[WorkerStatus]]:
        """The workers of each stream by name: those that are live, and those that still own shards."""
        ...

    async def ahead(self, found: Found, limit: int = 10_000) -> Ahead:
        """What comes before this pending event."""
        ...

    async def clock(self) -> datetime:
        """The database's time."""
        ...
