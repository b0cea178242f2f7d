"""Follows SQLAlchemy's mapped classes: the session that an aggregate is in writes its events with its data.

A draft goes into the session's buffer (``drivers/_sqlalchemy_session.py``), in one order with ``outbox.add`` and owned
by the savepoint that is open. Before the flush the buffer calls ``_prepare``; after it, the event gets the id and the
version of the aggregate. So a root without a change of its own, whose children changed, gets a new version too.
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import JSON, Column, LargeBinary, Text, event, inspect, select
from sqlalchemy.orm import InstanceState, Mapper, Session, object_session
from sqlalchemy.orm.attributes import flag_modified

from pillarbox.aggregates.aggregate import DRAFTS, RECORDER, Aggregate, Draft, completed, keep, late_event, stale, take
from pillarbox.errors import ConfigError, InvalidEvent
from pillarbox.event import Event
from pillarbox.outbox import Outbox

_columns_of: "WeakKeyDictionary[Mapper[Any], list[str]]" = WeakKeyDictionary()


def follow(outbox: Outbox, base: type) -> None:
    """Have this outbox take the events of the class and its subclasses; the last call decides."""
    if not isinstance(base, type):
        raise ConfigError(f"follow was given a {type(base).__name__}; pass the base class of your mapped classes")
    setattr(base, RECORDER, Follower(outbox))


class Follower:
    """The recorder of mapped classes."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def record(self, aggregate: Aggregate, draft: Draft) -> None:
        session = object_session(aggregate)
        if session is None:
            keep(aggregate, draft)
            return
        late = late_event(self._outbox, aggregate, draft)
        late.root, late.prepare, late.complete = aggregate, _prepare, partial(_completed, aggregate)
        self._outbox.add_all(session, [late])


@event.listens_for(Session, "after_attach")
def _after_attach(session: Session, instance: Any) -> None:
    if DRAFTS in instance.__dict__ and isinstance(recorder := getattr(instance, RECORDER, None), Follower):
        for draft in take(instance):
            recorder.record(instance, draft)


def _prepare(session: Session, aggregate: Aggregate) -> bool:
    """Give the root a new version with the flush, or lock its row: transactions of one root must wait for each other.

    Whether the events have to wait for the flush.
    """
    state: InstanceState[Any] = inspect(aggregate)
    if state.pending or aggregate in session.deleted:
        return True
    if state.transient or state.deleted or state.was_deleted:
        return False
    mapper = state.mapper
    columns = _plain_columns(mapper)
    if state.persistent and mapper.version_id_col is not None and columns:
        name = next((each for each in columns if each in state.dict), columns[0])
        getattr(aggregate, name)  # an attribute that is not loaded cannot be flagged
        flag_modified(aggregate, name)
        return True
    if state.persistent and any(state.attrs[attribute.key].history.has_changes() for attribute in mapper.column_attrs):
        return True  # its UPDATE locks the row
    # Not flagged: without a version to compare, the UPDATE could overwrite the change of another transaction.
    own = zip(mapper.primary_key, state.identity or (), strict=True)
    lock = select(*mapper.primary_key).where(*(column == value for column, value in own)).with_for_update()
    with session.no_autoflush:
        if session.execute(lock, bind_arguments={"mapper": mapper}).first() is None:
            raise stale(aggregate)
    return False


def _plain_columns(mapper: Mapper[Any]) -> list[str]:
    """The attributes whose column can be written again as it is, small ones first."""
    if mapper not in _columns_of:
        plain = []
        for attribute in mapper.column_attrs:
            column = attribute.columns[0]
            if not isinstance(column, Column) or column.primary_key or column is mapper.version_id_col:
                continue
            is_made = column.computed is not None or column.identity is not None
            if not (is_made or column.foreign_keys or column.onupdate or column.server_onupdate):
                plain.append((isinstance(column.type, LargeBinary | Text | JSON), attribute.key))
        _columns_of[mapper] = [key for _, key in sorted(plain)]
    return _columns_of[mapper]


def _completed(aggregate: Aggregate, draft: Event) -> Event:
    state: InstanceState[Any] = inspect(aggregate)
    if state.transient:
        raise InvalidEvent(
            f"{type(aggregate).__name__} has left its session before it was saved, and its event {draft.type} waits; "
            "add it again, or roll back"
        )
    column = state.mapper.version_id_col
    if column is None:
        return completed(aggregate, draft)
    return completed(aggregate, draft, getattr(aggregate, state.mapper.get_property_by_column(column).key))
