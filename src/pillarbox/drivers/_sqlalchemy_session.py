"""Hooks of SQLAlchemy's sessions, and the buffer of items that wait for a session's flush."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any, Literal, TypeAlias

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from pillarbox.errors import NotInTransaction

Write: TypeAlias = Callable[[Connection, Any, Sequence[Any]], None]


@dataclass(slots=True)
class _Entry:
    """One item, the transaction or savepoint that it belongs to, and the one that it was written in."""

    item: Any
    group: Any  # equal groups in a row are written together
    added_in: SessionTransaction
    is_ready: bool  # False: it has to be prepared first
    written_in: SessionTransaction | None = None


def current(session: Session) -> SessionTransaction:
    """The innermost savepoint, else the transaction."""
    transaction = session.get_nested_transaction() or session.get_transaction()
    if transaction is None:
        if not session.autobegin:
            raise NotInTransaction("this session has no transaction; open one with `with session.begin():`")
        transaction = session.begin()
    return transaction


class Buffer:
    """Writes items together after the session's own changes: the locks of those changes give events their order.

    A savepoint that rolls back drops the items that were added in it. Items that were added before it, but written in
    it, are written again.

    An item may have a function ``prepare(session, item.root)`` that changes the root before the flush, and says whether
    the item has to wait for that flush.
    """

    def __init__(self) -> None:
        self._write: Write
        self._entries: list[_Entry] = []
        self._committing: SessionTransaction | None = None
        self._committed: SessionTransaction | None = None
        self._checked: SessionTransaction | None = None
        self._flush: Literal["", "running", "done"] = ""

    @classmethod
    def of(cls, session: Session) -> "Buffer":
        """The buffer of this session."""
        # Not in session.info: the application may clear it.
        own = vars(session)
        if "_pillarbox" not in own:
            own["_pillarbox"] = cls()
        buffer: Buffer = own["_pillarbox"]
        return buffer

    def add(self, session: Session, items: Sequence[Any], group: Any, write: Write, check: Callable[[], None]) -> None:
        """Keep items until the flush. ``check`` refuses a session that commits by itself, once in each transaction."""
        transaction = current(session)
        if not transaction.is_active:
            raise NotInTransaction(
                "this session's transaction has ended or failed and takes no more events; add them before its commit, "
                "or after session.rollback()"
            )
        root = session.get_transaction()
        if self._checked is not root:
            check()
            self._checked = root
        self._write = write
        self._entries += [_Entry(item, group, transaction, _is_plain(item)) for item in items]
        if self._committing is transaction and self._flush != "running":
            # A hook that runs after ours added them, and ours will not run again.
            self._prepare(session)
            if not self._flush:
                session.flush()
            self._write_waiting(session)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The items that were added since the transaction began, each with its group."""
        return ((entry.item, entry.group) for entry in self._entries)

    def flushing(self, session: Session) -> None:
        self._flush = "running"
        if self._entries:
            self._prepare(session, is_flushing=True)

    def flushed(self, session: Session) -> None:
        if self._entries:
            self._write_waiting(session)

    def after_flushed(self, session: Session) -> None:
        self._flush = "done"
        # Items of hooks that ran after ours. If they need another flush, the session is dirty, and its commit flushes.
        if self._entries:
            self._prepare(session)
            self._write_waiting(session)

    def committing(self, session: Session) -> None:
        if any(entry.written_in is None for entry in self._entries):
            # The session flushes after this hook; its changes come first, so that their locks are held.
            self._prepare(session)
            session.flush()
            self._write_waiting(session)
        self._flush = ""
        self._committing = current(session)

    def _prepare(self, session: Session, *, is_flushing: bool = False) -> None:
        waits: dict[int, bool] = {}  # each root once
        for entry in [each for each in self._entries if not each.is_ready]:
            root = entry.item.root
            if id(root) not in waits:
                waits[id(root)] = entry.item.prepare(session, root)
            entry.is_ready = is_flushing or not waits[id(root)]

    def _write_waiting(self, session: Session) -> None:
        waiting = list(
            takewhile(lambda entry: entry.is_ready, (entry for entry in self._entries if entry.written_in is None))
        )
        if not waiting:
            return
        transaction, connection = current(session), session.connection()
        for group, some in groupby(waiting, lambda entry: entry.group):
            entries = list(some)
            self._write(connection, group, [entry.item for entry in entries])
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
            self._checked = None
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
            if entry.written_in is None:
                entry.is_ready = _is_plain(entry.item)


def _is_plain(item: Any) -> bool:
    return getattr(item, "prepare", None) is None


# Set on every session, not only on those with events: a hook of the application may add the first event, and SQLAlchemy
# does not call a hook that is set while hooks of the same kind run.
@event.listens_for(Session, "before_flush")
def _before_flush(session: Session, _context: object, _instances: object) -> None:
    Buffer.of(session).flushing(session)


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
