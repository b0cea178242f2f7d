"""The work that an inbox gives to its drivers."""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

from pillarbox.drivers.contract import Build, Driver, Feature
from pillarbox.errors import InvalidEvent
from pillarbox.event import Event
from pillarbox.names import Names

T = TypeVar("T")

MAX_ROWS: Final = 1000  # in one statement
INBOX: Final = Feature(
    "an event could count as handled though its effects were not committed",
    "pass a connection, or decorate a handler with @inbox.once(pool)",
    "pass a session that has one, or decorate a handler with @inbox.once(client)",
)


class Place(NamedTuple):
    """The rows of one consumer in the tables of an outbox."""

    consumer: str
    names: Names


class Entry(NamedTuple):
    """An event in the inbox."""

    id: UUID
    aggregate_id: str | None = None
    aggregate_version: int | None = None

    @classmethod
    def of(cls, value: Event | UUID | str) -> "Entry":
        if isinstance(value, Event):
            return cls(value.id, value.aggregate_id, value.aggregate_version)
        if isinstance(value, UUID):
            return cls(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return cls(UUID(value))
        raise InvalidEvent(
            "this is no event and no event's id; pass the event, a UUID or its text, or for a message with another "
            "kind of id stable_id(source, id)"
        )


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Each id once, because MySQL would not know a copy from its original; sorted, so that two transactions lock rows
    in the same order.
    """
    # By the number of the id, because UUIDs are hashed and compared in Python.
    once = {entry.id.int: entry for entry in reversed([*entries])}
    return [once[each] for each in sorted(once)]


def first_of_each(given: Iterable[tuple[T, Entry]], new: Iterable[UUID]) -> list[T]:
    """The first one of each new id, in the order in which they were given."""
    left, chosen = {each.int for each in new}, []
    for value, entry in given:
        number = entry.id.int
        if number in left:
            left.discard(number)
            chosen.append(value)
    return chosen


class Version(NamedTuple):
    """The version of an aggregate that an event brings."""

    aggregate_type: str | None
    aggregate_id: str
    number: int
    event_id: UUID

    @classmethod
    def of(cls, event: Event) -> "Version":
        if not isinstance(event, Event):
            raise InvalidEvent(f"inbox.newer was given a value of type {type(event).__name__}; pass the event")
        if event.aggregate_id is None or event.aggregate_version is None:
            lacks = "aggregate_id" if event.aggregate_id is None else "aggregate_version"
            raise InvalidEvent(
                f"event {event.id} has no {lacks}, so that inbox.newer cannot compare it; give it one where it is "
                "written, or use inbox.record"
            )
        return cls(event.aggregate_type, event.aggregate_id, event.aggregate_version, event.id)

    @property
    def digest(self) -> bytes:
        """The aggregate's key in the table. Never change it: an old version would count as new."""
        return hashlib.sha256(json.dumps([self.aggregate_type, self.aggregate_id]).encode()).digest()

    @property
    def name(self) -> str:
        """The aggregate for people who read the table."""
        return f"{self.aggregate_type or ''} {self.aggregate_id}".strip()


def build(driver: Driver, verb: str, *work: Any) -> Build[Any]:
    """The steps of one call, for the driver's family of databases."""
    return partial(_steps(driver.family, verb), *work)


@cache
def _steps(family: str, verb: str) -> Callable[..., Any]:
    steps: Callable[..., Any] = getattr(import_module(f"pillarbox.inbox.{family}"), verb)
    return steps
