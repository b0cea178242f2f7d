"""The contract of a stream's worker, in both modes."""

from collections.abc import Sequence
from typing import Protocol

from pillarbox.event import Mode
from pillarbox.store.records import Grant, Work


class Serving(Protocol):
    """Membership, polling and sleep."""

    async def announce(self, stream: str, mode: Mode, destination: str) -> None:
        """Note the stream's mode and destination. Creates its leases if they are missing."""

    async def join(self, stream: str, worker: str, seconds: float, circuit_error: str | None = None) -> None:
        """Register this worker as live for ``seconds``. ``circuit_error``: why it waits for its destination."""

    async def leave(self, stream: str, worker: str) -> None:
        """Remove this worker from the live workers."""

    async def poll(self, stream: str, worker: str, grants: Sequence[Grant] | None) -> Work:
        """Ask for the work of these shards (None: all) and the stream's workers, in one round trip."""
        ...

    async def reenter_due(self, stream: str, limit: int) -> int:
        """Make events pending whose instant has come; returns their number.

        A scheduled event enters at the end of its stream, in order of ``available_at``. A failed event without a key,
        or of a queue stream, returns to its place."""
        ...

    async def doze(self, stream: str, worker: str, asleep: bool) -> None:
        """Note that this worker sleeps and wants to be woken, or that it is awake."""
