"""The dead letters of consumers, as stores keep them."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from pillarbox.event import Event
from pillarbox.limits import LEAST_VERSION, MOST_ATTEMPTS, MOST_VERSION, NAME_LIMITS
from pillarbox.store import ConsumerReport, ConsumerStatus, Failure
from pillarbox.stores._errors import error_entry, keepable

_FORGOTTEN_SECONDS: Final = 86_400.0  # a process that was not seen for so long is of no interest
_MOST_TEXT: Final = 16_000  # of a history, after which it stops growing
_FIRST, _LAST = datetime(1000, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, tzinfo=UTC)


def storable(event: Event) -> Event:
    """The event with fields that every database can keep. One of a foreign producer was never checked."""
    fields: dict[str, Any] = {
        name: keepable(value)[: NAME_LIMITS[name]]
        for name in Event._fields
        if name in NAME_LIMITS and (value := getattr(event, name)) is not None
    }
    fields |= {
        name: min(max(value, _FIRST), _LAST)
        for name in ("created_at", "occurred_at", "available_at")
        if (value := getattr(event, name)) is not None
    }
    if event.aggregate_version is not None and not LEAST_VERSION <= event.aggregate_version <= MOST_VERSION:
        fields["aggregate_version"] = None  # another number would be another version
    if event.max_attempts is not None:
        fields["max_attempts"] = min(max(event.max_attempts, 1), MOST_ATTEMPTS)
    headers = {keepable(name): keepable(value) for name, value in event.headers.items()}
    return event._replace(**fields, headers=headers)


def entries(failure: Failure, earlier: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The new entries of an event's error history, oldest first."""
    before = [{**entry, "error": keepable(str(entry.get("error", "")))} for entry in earlier]
    return [*before, error_entry(keepable(failure.error), failure.attempts)]


def longer(history: str | None, added: Sequence[Mapping[str, Any]]) -> str:
    """A history as JSON lines, with more entries. A long one stops growing: its oldest errors help most."""
    text = history or ""
    for entry in added:
        if len(text) <= _MOST_TEXT:
            text += json.dumps(entry, ensure_ascii=False, default=str) + "\n"
    return text


def statuses(
    now: datetime, rows: Sequence[tuple[str, str, datetime, datetime, ConsumerReport]]
) -> list[ConsumerStatus]:
    """Processes of consumers from their rows: consumer, name, when it was seen, until when that counts, report."""
    found = []
    for consumer, name, seen_at, seen_until, report in rows:
        is_live, seconds = seen_until > now, max(0.0, (now - seen_at).total_seconds())
        if is_live or seconds < _FORGOTTEN_SECONDS:
            found.append(ConsumerStatus(consumer, name, is_live, seconds, report))
    return found
