"""The contract of an ordered stream's worker: ownership of shards, and turns on them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol
from uuid import UUID

from pillarbox.batch import Part
from pillarbox.store.records import Grant, KeyRun, Progress, Settlement
from pillarbox.store.serving import Serving


class Turns(Protocol):
    """One shard has one owner, and the owner runs one turn at a time on it: read, publish, settle."""

    async def take(self, stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        """Own up to ``limit`` shards that nobody owns or whose lease has run out, for ``seconds``."""
        ...

    async def renew(self, grants: Sequence[Grant], seconds: float) -> Collection[Grant]:
        """Extend leases; returns those that are still held."""
        ...

    async def give(self, grants: Sequence[Grant]) -> None:
        """Release shards, cleanly."""

    async def held_keys(self, grant: Grant) -> Collection[str]:
        """The keys of this shard that are held."""
        ...

    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        """Pending events of these shards, each shard in order of seq; shards without any, and lost ones, are left out.

        ``limit`` and ``max_bytes`` are for all shards together; at least one event is read, of any size. A read that
        reaches one of them may have cut a shard's part, or left out a shard. Nothing is read while the stream is
        paused. A part ends before an event that cannot be read, because somebody wrote it past the outbox. If it is
        the first one, it is alone in its part, as far as it can be read, and ``unreadable`` says why."""
        ...

    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        """The failed and held events, in order, of one held key whose time has come. One that cannot be read is alone,
        as in a part."""
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> Mapping[int, Collection[str]]:
        """Write the results of a turn. Returns for each shard which keys of its settlement are held now. A shard that
        is missing from the result is lost: nothing of it was changed.

        A settlement with a ticket also notes its batch: ``settle_ticket`` then finds it settled. If the ticket does not
        follow the last settled batch, the shard counts as lost.

        A settlement is one transaction, and an owner that has lost its shard changes nothing. One exception: where all
        events of a settlement without a ticket were pending and are published, a store may mark them one by one, and an
        owner that is losing its shard at this moment may still do so. It must change only events that are still
        pending."""
        ...

    async def settle_ticket(self, grant: Grant, ticket: bytes, *, keep_published: bool = True) -> Progress:
        """Answer whether the batch of this ticket is settled, and settle it if not: its events that are pending, failed
        or held become published, and the batch is noted, in one transaction. Raises LeaseLost; and ProgressError if the
        ticket does not follow the last settled batch.

        ticket: the last one that the destination has of this shard; empty: it has none. ``pillarbox.store.ticket``
        makes tickets and reads them. Nothing else of the shard was settled since that ticket was published. A store
        without transactions need not have it."""
        ...

    async def settled_batch(self, grant: Grant) -> UUID | None:
        """The batch that this shard settled last; None: none. Raises LeaseLost. For a destination that keeps the
        progress of a shard, as ``settle_ticket``."""
        ...

    async def note_suspect(self, grant: Grant, event_id: UUID | None, alone: int = 0) -> None:
        """Note the suspect, the event that is about to be published, and a number that the relay keeps with it: how
        often it was published alone. None clears the note. Raises LeaseLost."""

    async def set_crashes(self, grant: Grant, crashes: int) -> None:
        """Correct the count of crashes of this shard, and forget its suspect. Raises LeaseLost."""


class Ordered(Serving, Turns, Protocol):
    """The contract of a worker of an ordered stream."""
