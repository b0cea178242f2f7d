"""The contract of readers: counts, lists, the audit. Lists load no payloads."""

from collections.abc import Mapping, Sequence
from typing import Protocol
from uuid import UUID

from pillarbox.event import Status
from pillarbox.store.records import Audit, DeadLetter, Filter, Found


class Insights(Protocol):
    """Questions of operators and of the watch service."""

    async def unserved(self) -> Sequence[str]:
        """Streams with waiting events and no live worker."""
        ...

    async def count(self, stream: str) -> Mapping[Status, int]:
        """The events of a stream by status."""
        ...

    async def find(
        self, where: Filter, limit: int, newest_first: bool = True, after: UUID | None = None
    ) -> Sequence[Found]:
        """Events in order of their ids, only those behind ``after``. Ids that Pillarbox made are in order of time."""
        ...

    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        """Dead letters in order of seq, with a seq above ``after``. Those of consumers count by themselves."""
        ...

    async def find_by_id(self, id: UUID, consumer: str = "") -> Sequence[Found]:
        """The event with its payload and errors, once for each stream that has it; dead letters of relays too.

        consumer: only the dead letters of this consumer."""
        ...

    async def dead_letters(
        self, stream: str | None = None, limit: int = 100, consumer: str = ""
    ) -> Sequence[DeadLetter]:
        """Dead letters with payload and errors, in order of their deaths: of relays, or of one consumer."""
        ...

    async def audit(self, limit: int, stream: str | None = None, action: str | None = None) -> Sequence[Audit]:
        """The actions of operators, newest first; only those on this stream, or of this name, if given."""
        ...
