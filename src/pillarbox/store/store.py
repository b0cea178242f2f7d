"""A store: all contracts on one outbox."""

from collections.abc import Callable
from typing import Protocol

from pillarbox.store.consumers import Consumers
from pillarbox.store.examined import Examined
from pillarbox.store.gauges import Gauges
from pillarbox.store.insights import Insights
from pillarbox.store.operator import Operator
from pillarbox.store.ordered import Ordered
from pillarbox.store.queue import Queue
from pillarbox.store.records import Features
from pillarbox.store.retention import Retention
from pillarbox.store.schema import Schema
from pillarbox.store.writing import Writing


class Store(Ordered, Queue, Consumers, Retention, Operator, Insights, Gauges, Examined, Writing, Schema, Protocol):
    """One outbox in one database."""

    @property
    def features(self) -> Features: ...

    @property
    def description(self) -> str:
        """The place of the outbox, in a few words and without secrets."""
        ...

    @property
    def shards(self) -> int:
        """The number of shards of each stream, known once the store is open."""
        ...

    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        """Connect and check the schema. ``on_wake(stream)`` is called when events may have arrived.

        Several relays of one process may open the same store; each open needs a close."""
        ...

    async def close(self) -> None: ...
