"""The protocol that services are typed against."""

from typing import TYPE_CHECKING, Any, Protocol, Unpack

from pillarbox.event import Event
from pillarbox.outbox.fields import EventFields, OnDuplicate

if TYPE_CHECKING:
    from pillarbox.outbox.outbox import Outbox


class EventSink(Protocol):
    """Takes events, in a transaction that only its maker knows.

    A service that depends on it depends on no driver. It is what ``outbox.transaction`` gives, a :class:`UnitOfWork`,
    or :meth:`Outbox.sink` of a session or connection.
    """

    def add(
        self, type: str, payload: Any, *, on_duplicate: OnDuplicate = "raise", **fields: Unpack[EventFields]
    ) -> Event:
        """Add an event; it is committed with the transaction."""
        ...


class BoundOutbox:
    """An outbox with one handle of the caller's."""

    def __init__(self, outbox: "Outbox", tx: Any) -> None:
        self._outbox = outbox
        self._tx = tx

    def add(
        self, type: str, payload: Any, *, on_duplicate: OnDuplicate = "raise", **fields: Unpack[EventFields]
    ) -> Event:
        return self._outbox.add(self._tx, type, payload, on_duplicate=on_duplicate, **fields)
