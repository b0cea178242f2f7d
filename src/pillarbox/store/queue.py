"""The contract of a queue stream's worker: events that are leased one by one."""

from collections.abc import Collection, Sequence
from typing import Protocol
from uuid import UUID

from pillarbox.store.records import Claim, ClaimResults, Rescued
from pillarbox.store.serving import Serving


class Claims(Protocol):
    """Single events, in no order, leased by workers."""

    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        """Lease pending events of a shard and charge each an attempt. Without a shard: lease one suspect, to run
        alone."""
        ...

    async def renew_claims(self, claims: Sequence[Claim], seconds: float) -> Collection[UUID]:
        """Extend leases; returns those that are still held."""
        ...

    async def settle_claims(self, claims: Sequence[Claim], results: ClaimResults) -> int:
        """Write the results of leased events of one stream; returns how many were refused as stale."""
        ...

    async def rescue(self, stream: str, stuck_seconds: float, limit: int) -> Rescued:
        """Take events from workers that died (lease run out) or that hang (held for longer than ``stuck_seconds``).
        They become suspects and are not charged; one that was taken CRASHES_ALONE times while it ran alone dies."""
        ...


class Queue(Serving, Claims, Protocol):
    """The contract of a worker of a queue stream."""
