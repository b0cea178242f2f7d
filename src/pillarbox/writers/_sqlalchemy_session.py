"""The events of a SQLAlchemy session that wait for its flush."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

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

    def __init__(self, session: Session, write: Callable[[Connection, Batch], None]) -> None:
        self._write = write
        self._entries: list[_Entry] = []
        self._committed: SessionTransaction | None = None
        event.listen(session, "after_flush", self._flushed)
        event.listen(session, "before_commit", self._committing)
        event.listen(session, "after_commit", self._has_committed)
        event.listen(session, "after_transaction_end", self._ended)

    @classmethod
    def of(cls, session: Session, write: Callable[[Connection, Batch], None]) -> "Buffer":
        """The one of this session."""
        buffer = session.info.get(cls)
        if buffer is None:
            buffer = session.info[cls] = cls(session, write)
        return buffer

    def add(self, session: Session, batch: Batch) -> None:
        """Keep events until the flush."""
        transaction, settings = _current(session), batch._replace(events=())
        self._entries += [_Entry(each, settings, transaction) for each in batch.events]

    def holds(self, asked: Question) -> bool:
        """Whether an event waits here."""
        return any(entry.event.id == asked.id and entry.settings.names == asked.names for entry in self._entries)

    def _flushed(self, session: Session, _context: Any) -> None:
        self._write_waiting(session)

    def _committing(self, session: Session) -> None:
        # The session flushes after this hook; its changes come first, so that their locks are held.
        session.flush()
        self._write_waiting(session)

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

    def _has_committed(self, session: Session) -> None:
        self._committed = session.get_nested_transaction() or session.get_transaction()

    def _ended(self, _session: Session, transaction: SessionTransaction) -> None:
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
