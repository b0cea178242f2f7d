"""The block of ``Outbox.transaction``: it writes its events just before it commits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from pillarbox.errors import NotInTransaction
from pillarbox.event import Event
from pillarbox.outbox.fields import EventFields, OnDuplicate
from pillarbox.outbox.work import Write

if TYPE_CHECKING:
    from pillarbox.outbox.outbox import Outbox


class Transaction:
    """The transaction of an :meth:`Outbox.transaction` block. All other attributes are the connection's."""

    def __init__(self, outbox: "Outbox", connection: Any) -> None:
        self.connection = connection
        self.writes: list[Write] = []
        self.is_open = True
        self._outbox = outbox

    def add(
        self,
        type: str,
        payload: Any,
        *,
        on_duplicate: OnDuplicate = "raise",
        **fields: Unpack[EventFields],
    ) -> Event:
        """Add an event, which is written before the block commits."""
        return self._outbox.add(self, type, payload, on_duplicate=on_duplicate, **fields)

    def add_all(self, events: Sequence[Event], *, on_duplicate: OnDuplicate = "raise") -> None:
        """Add events, which are written before the block commits, in this order."""
        self._outbox.add_all(self, events, on_duplicate=on_duplicate)

    def buffer(self, write: Write) -> None:
        if not self.is_open:
            raise NotInTransaction("this outbox.transaction block has ended; add events inside of it")
        if not self.writes or self.writes[-1]._replace(events=()) != write._replace(events=()):
            self._events: list[Event] = []
            self.writes.append(write._replace(events=self._events))
        self._events.extend(write.events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)
