"""The mix-in that records events, and the events of an aggregate."""

from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, Unpack

from pillarbox.errors import ConfigError, InvalidEvent, StaleAggregate
from pillarbox.event import Event
from pillarbox.limits import check
from pillarbox.outbox.fields import DraftFields, text_of
from pillarbox.outbox.routes import ROUTED_LATER
from pillarbox.outbox.work import Late

if TYPE_CHECKING:
    from pillarbox.outbox import Outbox

# The tenant of the events of aggregates, if neither the event nor the unit of work names one.
current_tenant: Final[ContextVar[str | None]] = ContextVar("pillarbox_tenant", default=None)
# Names in an instance's __dict__, which __slots__, dataclasses and SQLAlchemy leave alone.
RECORDER: Final = "_pillarbox_recorder"
DRAFTS: Final = "_pillarbox_drafts"


class Draft(NamedTuple):
    """An event that an aggregate recorded, before an outbox is known."""

    type: str
    payload: Any
    fields: DraftFields


class Recorder(Protocol):
    """Takes the drafts of aggregates: a unit of work for those that it tracks, a follower for mapped classes."""

    def record(self, aggregate: "Aggregate", draft: Draft) -> None: ...


class Aggregate:
    """A mix-in for classes that record their own events.

    Set ``aggregate_type`` on the class. The id is the attribute or property ``aggregate_id``, else ``id``; an attribute
    ``version`` with a whole number becomes the events' ``aggregate_version``. There is no ``__init__`` to call.

    The events are written by the unit of work that tracks the object, or by the session that it is in if its class is
    followed (:meth:`Outbox.follow`). Until there is one they wait in the object: without one they are never written.
    """

    aggregate_type: ClassVar[str]

    def add_event(self, type: str, payload: Any, **fields: Unpack[DraftFields]) -> None:
        """Record an event; ``fields`` are those of :meth:`Outbox.event`. Its key is the aggregate's id by default."""
        type_of(self)
        draft = Draft(type, payload, fields)
        recorder: Recorder | None = getattr(self, RECORDER, None)
        if recorder is None:
            keep(self, draft)
        else:
            recorder.record(self, draft)


def keep(aggregate: Aggregate, draft: Draft) -> None:
    """Let a draft wait in its aggregate, until there is a recorder."""
    vars(aggregate).setdefault(DRAFTS, []).append(draft)


def take(aggregate: object) -> list[Draft]:
    """The drafts that wait in an aggregate, or in an object that is none. They wait no longer."""
    drafts: list[Draft] = getattr(aggregate, "__dict__", {}).pop(DRAFTS, [])
    return drafts


def type_of(aggregate: Aggregate) -> str:
    name = getattr(aggregate, "aggregate_type", None)
    if not isinstance(name, str) or not name:
        kind = type(aggregate).__name__
        raise ConfigError(f"{kind} has no aggregate_type; set it on the class: aggregate_type = {kind.lower()!r}")
    return name


def late_event(outbox: "Outbox", aggregate: Aggregate, draft: Draft, tenant: str | None = None) -> Late:
    """The draft as an event, checked now; the aggregate's id and version are read when it is written."""
    fields = with_tenant(draft.fields, tenant)
    if fields.get("stream") is None:
        fields = {**fields, "stream": ROUTED_LATER}
    event = outbox.event(draft.type, draft.payload, aggregate_type=type_of(aggregate), **fields)
    return Late.of(event, partial(completed, aggregate))


def with_tenant(fields: Any, tenant: str | None) -> Any:
    """The fields with a tenant: their own, else this one, else that of the context."""
    tenant = tenant or current_tenant.get()
    return {"tenant": tenant, **fields} if tenant else fields


def completed(aggregate: Aggregate, event: Event, version: Any = None) -> Event:
    """The event with the aggregate's id and version, as they are now. version: instead of the attribute's."""
    own_id = text_of("aggregate_id", getattr(aggregate, "aggregate_id", getattr(aggregate, "id", None)))
    if own_id is None:
        raise InvalidEvent(
            f"{type(aggregate).__name__} has no id for its event {event.type}; set it before the unit of work ends, "
            "or name another attribute by a property aggregate_id"
        )
    if version is None:
        version = getattr(aggregate, "version", None)
    event = event._replace(
        aggregate_id=own_id,
        aggregate_version=version if type(version) is int else None,
        key=own_id if event.key is None else event.key,
    )
    check(event)
    return event


def check_saved(affected: int | str, aggregate: object) -> None:
    """Raise StaleAggregate unless an UPDATE or DELETE with ``WHERE ... AND version = ...`` has met its row.

    affected: the number of rows or documents, or asyncpg's answer, such as ``"UPDATE 1"``.
    """
    if int(str(affected).rpartition(" ")[2]) < 1:
        raise stale(aggregate)


def stale(aggregate: object) -> StaleAggregate:
    return StaleAggregate(
        f"this {type(aggregate).__name__} was changed or deleted by another transaction since it was loaded; "
        "run the unit of work again, as UnitOfWork.run does"
    )
