"""The work that an outbox gives to its drivers, and the errors of that work."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from pillarbox.drivers.contract import Driver
from pillarbox.errors import DuplicateEvent, SchemaError
from pillarbox.event import Event
from pillarbox.names import Names
from pillarbox.sql.dialects import ErrorKind


class Late(Event):
    """An event whose last fields are known when it is written: the flush gives an aggregate its id and version."""

    complete: Callable[[Event], Event]
    # On SQLAlchemy's sessions: the aggregate, and a function of session and aggregate that runs before the flush.
    root: Any = None
    prepare: Callable[[Any, Any], bool] | None = None
    is_captured: bool = False

    @classmethod
    def of(cls, event: Event, complete: Callable[[Event], Event]) -> "Late":
        late = tuple.__new__(cls, event)
        late.complete = complete
        return late

    def completed(self) -> Event:
        return self.complete(tuple.__new__(Event, self))


class Write(NamedTuple):
    """Events to write into one outbox, in this order."""

    events: Sequence[Event]
    names: Names
    ignore_duplicates: bool = False
    lock_keys: bool = False  # writers of one key wait for each other until they commit
    transactions: bool = True  # False: may be written without one, if the driver allows it


class Question(NamedTuple):
    """Whether an outbox knows an event."""

    id: UUID
    stream: str | None  # None: in any stream
    names: Names

    def is_in(self, driver: Driver) -> bool:
        """Whether the event waits for the flush of the caller's session."""
        return any(
            isinstance(write, Write)
            and write.names == self.names
            and event.id == self.id
            and self.stream in (None, event.stream)
            for event, write in driver.deferred()
        )


def duplicate(events: Sequence[Event]) -> DuplicateEvent:
    """The error for a duplicate among these events."""
    which = f"event {events[0].id}" if len(events) == 1 else f"one of these {len(events)} events"
    return DuplicateEvent(
        f"{which} is in the outbox already; give another id, leave it out, or pass on_duplicate='ignore'"
    )


def no_tables(names: Names, remedy: str = Driver.tables_remedy) -> SchemaError:
    return SchemaError(f"this database has no outbox '{names.prefix}' yet; {remedy}")


def explain(driver: Driver, error: Exception, names: Names, events: Sequence[Event] = ()) -> None:
    """Replace known errors of the driver by ours."""
    kind = driver.classify(error)
    if kind is ErrorKind.DUPLICATE and events:
        raise duplicate(events) from error
    if kind is ErrorKind.NO_TABLE:
        raise no_tables(names, driver.tables_remedy) from error
