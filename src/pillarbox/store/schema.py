"""The contract for making, migrating and removing an outbox."""

from collections.abc import Sequence
from typing import Protocol


class Schema(Protocol):
    """The tables or collections of one outbox."""

    @property
    def newest_version(self) -> int:
        """The schema version of this release."""
        ...

    async def migrate(self, *, aggregate_index: bool = False) -> Sequence[str]:
        """Bring the schema to this release's version; returns the names of the steps that were run.

        aggregate_index: also index events by (aggregate_id, aggregate_version), for an application's own queries."""
        ...

    def script(self, after: int = 0, *, aggregate_index: bool = False) -> str:
        """The migrations above version ``after`` as a script, to be run with another tool."""
        ...

    async def remove(self) -> bool:
        """Drop this outbox with all its events. False: there was none. Stop its relays and writers first."""
        ...

    async def prefixes(self) -> Sequence[str]:
        """The prefixes of all outboxes in the same schema or database."""
        ...

    async def identity(self) -> str:
        """The name of this outbox for destinations that keep its progress. Made at the first call, and kept."""
        ...

    async def set_identity(self, identity: str) -> None:
        """Give the outbox another identity, and forget what was settled under the old one. Raises StoreError while a
        worker owns a shard."""
        ...

    async def server_version(self) -> str:
        """The version of the database server, in its own words."""
        ...
