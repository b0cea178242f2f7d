"""Remembers the events that a consumer has applied: the class that applications use."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from uuid import UUID

from pillarbox.drivers import Driver, driver_of
from pillarbox.drivers.awaiting import Chosen, YesOrNo
from pillarbox.drivers.contract import Build, Steps
from pillarbox.event import Event
from pillarbox.inbox.once import make_once
from pillarbox.inbox.work import Entry, Place, Version, build, first_of_each, in_order
from pillarbox.limits import check_name
from pillarbox.names import Names
from pillarbox.observe import Observer, Observers
from pillarbox.outbox import Transaction

Given = TypeVar("Given", bound=Event | UUID | str)
Handled = TypeVar("Handled")  # Event, list[Event], or the model of a payload
Result = TypeVar("Result")


class Inbox:
    """The events that one consumer has applied, in the database that has their effects.

    name: the consumer's; each name has its own events. prefix, schema: where the tables are, those of an outbox. It
    needs no relay and no events in that outbox. observers: learn how many events are new, and how many are copies.
    """

    def __init__(
        self, name: str, *, prefix: str = "outbox", schema: str | None = None, observers: Sequence[Observer] = ()
    ) -> None:
        check_name("consumer", name)
        self._place = Place(name, Names(prefix, schema))
        self._observers = Observers(observers)

    def record(self, tx: Any, event: Event | UUID | str) -> YesOrNo:
        """Whether the event is new. It counts as applied when the transaction of ``tx`` commits.

        Call it first in the transaction, and write the effects only if it is true. While another transaction applies a
        copy, this one waits for its end; MongoDB ends this one with a conflict.
        tx: as in :meth:`Outbox.add`; awaited on the same drivers, and on an AsyncSession. event: the event, its id or
        the text of it, or ``stable_id(source, id)`` for a message with another kind of id.
        """
        entry, driver = Entry.of(event), _driver(tx)
        steps: Build[bool] = build(driver, "record", self._place, entry, False)

        def record(driver: Driver) -> Steps[bool]:
            is_new = yield from steps(driver)
            self._observers.inbox_asked(self._place.consumer, int(is_new), int(not is_new))
            return is_new

        return YesOrNo(driver, record, "inbox.record")

    def record_all(self, tx: Any, events: Iterable[Given]) -> Chosen[Given]:
        """The events that are new, in their order; see :meth:`record`. One statement for up to 1,000 events."""
        given = [(event, Entry.of(event)) for event in events]
        driver = _driver(tx)
        steps: Build[set[UUID]] = build(driver, "record_all", self._place, in_order(entry for _, entry in given), False)

        def choose(driver: Driver) -> Steps[list[Given]]:
            chosen = first_of_each(given, (yield from steps(driver)))
            self._observers.inbox_asked(self._place.consumer, len(chosen), len(given) - len(chosen))
            return chosen

        return Chosen(driver, choose, "inbox.record_all")

    def newer(self, tx: Any, event: Event) -> YesOrNo:
        """Whether the event has a higher version than all that this consumer has seen of its aggregate.

        Of events with the same version, a higher id is newer. For events that carry the whole state of their aggregate,
        which may come in any order: an older one is skipped for ever. Await it as :meth:`record`.
        """
        version, driver = Version.of(event), _driver(tx)
        return YesOrNo(driver, build(driver, "newer", self._place, version), "inbox.newer")

    def forget(self, tx: Any, event: Event | UUID | str) -> YesOrNo:
        """Make the event new again, so that its next delivery is applied; false if it was new. Await it as
        :meth:`record`.
        """
        entry, driver = Entry.of(event), _driver(tx)
        return YesOrNo(driver, build(driver, "forget", self._place, entry), "inbox.forget")

    def once(self, handle: Any) -> Callable[[Callable[[Handled, Any], Result]], Callable[[Handled], Result]]:
        """Decorates a handler ``f(event, tx)`` so that it can be registered with ``@handlers.on(...)``, or
        ``f(events, tx)`` for ``@handlers.on_batch(...)``. In place of the event it may take the model of its payload.

        For each event it opens a transaction, records the event, calls the handler only if the event is new, and
        commits. A list of events has one transaction, and the handler gets those that are new. Write effects with
        ``tx``: others happen at least once. Returned values are dropped.

        handle: an engine, sessionmaker, pool or client, or a function that opens a connection or returns a pool. An
        async function needs one that is awaited, a plain function one that is not.
        A conflict with another transaction is tried again after 10 ms up to 1 s: without a limit while the event is
        recorded, and later 10 times. If the database is away, the handler raises :class:`Outage`.
        """
        return make_once(self._place, handle, self._observers)


def _driver(tx: Any) -> Driver:
    return driver_of(tx.connection if isinstance(tx, Transaction) else tx)
