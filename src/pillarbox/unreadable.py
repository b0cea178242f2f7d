"""Events whose row or document cannot be read, because somebody wrote it past the outbox. Pure."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import NoneType
from typing import Any, Final, TypeVar
from uuid import UUID

from pillarbox.event import NO_HEADERS, Event, Status

Headers = TypeVar("Headers", bound=Mapping[str, str])

# The errors of code that meets a value it does not expect.
CANNOT_READ: Final = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
_REMEDY: Final = "not written by Pillarbox; mend the row, or discard the event"
NO_REASON: Final = f"it cannot be read: {_REMEDY}"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# The types of a field, and the value that takes the place of one that cannot be read.
_TEXT: Final = ((str,), "")
_OPTIONAL_TEXT: Final = ((str, NoneType), None)
_EXPECTED: Final[Mapping[str, tuple[tuple[type, ...], Any]]] = {
    "id": ((UUID,), UUID(int=0)),
    "seq": ((int,), 0),
    **dict.fromkeys(("tenant", "topic", "type", "content_type", "stream"), _TEXT),
    **dict.fromkeys(("aggregate_type", "aggregate_id", "key", "routing_key", "schema_id"), _OPTIONAL_TEXT),
    "schema_version": _OPTIONAL_TEXT,
    "aggregate_version": ((int, NoneType), None),
    "payload": ((bytes,), b""),
    "created_at": ((datetime,), _EPOCH),
    "attempts": ((int,), 0),
    "max_attempts": ((int, NoneType), None),
    "occurred_at": ((datetime, NoneType), None),
    "headers": ((dict, NoneType), None),
    "status": ((Status,), Status.PENDING),
    "available_at": ((datetime, NoneType), None),
}


def check_headers(headers: Headers) -> Headers:
    """The headers, if they map text to text. Else an error of CANNOT_READ; a loop over the items would take longer."""
    "".join([*headers, *headers.values()]).encode()
    return headers


def read_partly(cells: Mapping[str, Any], decode: Mapping[str, Callable[[Any], Any]]) -> tuple[Event, str]:
    """The event of these cells, by field, and a sentence about those that cannot be read; empty: all could be.

    An id that cannot be read stays as it is: it still finds the row."""
    decode = {"status": Status, **decode}
    fields: dict[str, Any] = {}
    wrong = []
    for name, (types, instead) in _EXPECTED.items():
        value = cells.get(name)
        try:
            if value is not None and name in decode:
                value = decode[name](value)
            if name == "headers" and value is not None:
                check_headers(value)
            if not isinstance(value, types) or isinstance(value, bool):
                raise TypeError(name)
        except CANNOT_READ:
            wrong.append(name)
            value = value if name == "id" and value is not None else instead
        fields[name] = value
    fields["occurred_at"] = fields["occurred_at"] or fields["created_at"]
    fields["headers"] = NO_HEADERS if fields["headers"] is None else fields["headers"]
    columns = " and ".join(wrong)
    return Event(**fields), f"its {columns} cannot be read: {_REMEDY}" if wrong else ""
