"""The events of a SQLAlchemy session that wait for its flush."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from pillarbox.errors import NotInTransaction
from pillarbox.event import Event
from pillarbox.writing import Batch, Question


@dataclass(slots=True)
class _Entry:
    """One event, the transaction or savepoint that it belongs to, and the one that it was written in."""

    event: Event
    settings: Batch  # without events
    added_in: SessionTransaction
    written_in: SessionTransaction | None = None


def _current(session: Session) -> SessionTransaction:
    """The innermost savepoint, else the transaction."""
    transaction = session.get_nested_transaction() or session.get_transaction()
    if transaction is None:
        if not session.autobegin:
            raise NotInTransaction("this session has no transaction; open one with `with session.begin():`")
        transaction = session.begin()
    return transaction


class Buffer:
    """Writes events as one INSERT after the session's own changes, whose locks then give the events their order.

    A savepoint that rolls back takes with it the events that were added in it. Those that were added before it, and
    happened to be written in it, are written again.
    """

    def __init__(self) -> None:
        self._write: Callable[[Connection, Batch], None]
        self._entries: list[_Entry] = []
        self._committing: SessionTransaction | None = None
        self._committed: SessionTransaction | None = None
        self._flush: Literal["", "running", "done"] = ""

    @classmethod
    def of(cls, session: Session) -> "Buffer":
        """The one of this session."""
        # Not in session.info, which is the application's to clear.
        own = vars(session)
        if "_pillarbox" not in own:
            own["_pillarbox"] = cls()
        buffer: Buffer = own["_pillarbox"]
        return buffer

    def add(self, session: Session, batch: Batch, write: Callable[[Connection, Batch], None]) -> None:
        """Keep events until the flush."""
        transaction, settings = _current(session), batch._replace(events=())
        if not transaction.is_active:
            raise NotInTransaction(
                "this session's transaction has ended or failed and takes no more events; add them before its commit, "
                "or after session.rollback()"
            )
        self._write = write
        self._entries += [_Entry(each, settings, transaction) for each in batch.events]
        if self._committing is transaction and self._flush != "running":
            # By a hook that comes after ours: none of ours will come again.
            if not self._flush:
                session.flush()
            self._write_waiting(session)

    def holds(self, asked: Question) -> bool:
        """Whether an event waits here."""
        return any(entry.event.id == asked.id and entry.settings.names == asked.names for entry in self._entries)

    def flushing(self) -> None:
        self._flush = "running"

    def flushed(self, session: Session) -> None:
        self._write_waiting(session)

    def after_flushed(self, session: Session) -> None:
        self._flush = "done"
        self._write_waiting(session)

    def committing(self, session: Session) -> None:
        if any(entry.written_in is None for entry in self._entries):
            # The session flushes after this hook; its changes come first, so that their locks are held.
            session.flush()
            self._write_waiting(session)
        self._flush = ""
        self._committing = _current(session)

    def _write_waiting(self, session: Session) -> None:
        waiting = [entry for entry in self._entries if entry.written_in is None]
        if not waiting:
            return
        transaction, connection = _current(session), session.connection()
        for settings, group in groupby(waiting, lambda entry: entry.settings):
            entries = list(group)
            self._write(connection, settings._replace(events=[entry.event for entry in entries]))
            for entry in entries:
                entry.written_in = transaction

    def has_committed(self, session: Session) -> None:
        self._committed = session.get_nested_transaction() or session.get_transaction()

    def ended(self, transaction: SessionTransaction) -> None:
        self._flush = ""
        if self._committing is transaction:
            self._committing = None
        parent, committed = transaction.parent, self._committed is transaction
        if committed:
            self._committed = None
        if parent is None:
            self._entries.clear()
            return
        if not transaction.nested:
            return  # a part of a flush
        while not (parent.nested or parent.parent is None):
            parent = parent.parent
        if not committed:
            self._entries = [entry for entry in self._entries if entry.added_in is not transaction]
        for entry in self._entries:
            if entry.added_in is transaction:
                entry.added_in = parent
            if entry.written_in is transaction:
                entry.written_in = parent if committed else None


# Of every session, rather than of those that have events: a hook of the application's may be the first to add one, and
# a hook that is set while its like are running is not called.
@event.listens_for(Session, "before_flush")
def _before_flush(session: Session, _context: object, _instances: object) -> None:
    Buffer.of(session).flushing()


@event.listens_for(Session, "after_flush")
def _after_flush(session: Session, _context: object) -> None:
    Buffer.of(session).flushed(session)


@event.listens_for(Session, "after_flush_postexec")
def _after_flush_postexec(session: Session, _context: object) -> None:
    Buffer.of(session).after_flushed(session)


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    Buffer.of(session).committing(session)


@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    Buffer.of(session).has_committed(session)


@event.listens_for(Session, "after_transaction_end")
def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    Buffer.of(session).ended(transaction)
