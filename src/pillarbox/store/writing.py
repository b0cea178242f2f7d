"""The contract for writing through a store: used by the reconciler, the command line and tests."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from pillarbox.event import Event


class Writing(Protocol):
    """Adds events. Applications write with their own connection instead, through an Outbox."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """A transaction of the database, for ``add``."""
        ...

    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        """Write events, in ``tx`` or in a transaction of its own. Raises DuplicateEvent."""
