"""The contract of the prune service."""

from typing import Any, Protocol

from pillarbox.store.records import Page


class Retention(Protocol):
    """Deletes what is old enough. Nothing unpublished is ever deleted."""

    async def prune_published(self, keep_seconds: float, limit: int, after: Any = None) -> Page:
        """Delete from one page of published events; continue from ``Page.after``."""
        ...

    async def prune_dead(self, keep_seconds: float, limit: int) -> int:
        """Delete dead letters, but none that a blocked or parked key waits for, and none that a consumer shall apply
        again; returns their number."""
        ...

    async def prune_inbox(self, keep_seconds: float, limit: int) -> int:
        """Delete rows of the inbox; returns their number. A copy of such an event is processed again."""
        ...

    async def prune_idempotency(self, keep_seconds: float, limit: int) -> int:
        """Delete idempotency keys, whatever their state; returns their number."""
        ...
