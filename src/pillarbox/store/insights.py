"""The contract of readers: status, lists, the audit. Lists load no payloads."""

from collections.abc import Mapping, Sequence
from typing import Protocol
from uuid import UUID

from pillarbox.event import Status
from pillarbox.store.records import Audit, DeadLetter, Filter, Found, StreamStatus


class Insights(Protocol):
    """Questions of operators and of the watch service."""

    async def streams(self) -> Sequence[StreamStatus]:
        """Every stream that has events or was ever served or paused, sorted by name. Reads the whole outbox."""
        ...

    async def unserved(self) -> Sequence[str]:
        """Streams with waiting events and no live worker."""
        ...

    async def count(self, stream: str) -> Mapping[Status, int]:
        """The events of a stream by status."""
        ...

    async def find(self, where: Filter, limit: int, newest_first: bool = True) -> Sequence[Found]:
        """Events in order of their ids. Ids that Pillarbox made are in order of time."""
        ...

    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        """Dead letters in order of seq, with a seq above ``after``."""
        ...

    async def find_by_id(self, id: UUID) -> Sequence[Found]:
        """The event with its payload and errors, once for each stream that has it; dead letters too."""
        ...

    async def dead_letters(self, stream: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        """Dead letters with payload and errors, in order of their deaths."""
        ...

    async def audit(self, limit: int) -> Sequence[Audit]:
        """The actions of operators, newest first."""
        ...
