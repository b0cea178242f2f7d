"""Filters and instants from the texts that a person types."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pillarbox.durations import is_duration, seconds_of
from pillarbox.errors import ConfigError
from pillarbox.event import Status
from pillarbox.hints import hint
from pillarbox.store import Filter

FIELDS: Final = ("stream", "key", "type", "tenant", "topic", "aggregate_type", "aggregate_id")


def filter_from(given: Mapping[str, str | None], prefix: str = "") -> Filter:
    """A filter from the texts of its fields; ``prefix`` comes before the name of a field in an error."""
    status = given.get("status")
    states = [each.value for each in Status]
    if status is not None and status not in states:
        raise ConfigError(f"{prefix}status is {status!r}; {hint(status, states)}")
    texts: dict[str, Any] = {name: given.get(name) for name in FIELDS}
    return Filter(
        **texts,
        status=None if status is None else Status(status),
        consumer=given.get("consumer") or "",
        since=instant(given.get("since"), f"{prefix}since"),
        until=instant(given.get("until"), f"{prefix}until"),
    )


def instant(text: str | None, what: str, *, ahead: bool = False) -> datetime | None:
    """An instant from ISO 8601 (without a zone: local time), or from a duration before now (``ahead``: after now)."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        pass
    except OverflowError:
        raise _too_far(text, what) from None
    if not is_duration(text):
        raise ConfigError(f"{what} is {text!r}; use an instant such as 2030-01-31T12:00:00Z, or a duration such as 2h")
    try:
        span = timedelta(seconds=seconds_of(what, text))
        return datetime.now(UTC) + (span if ahead else -span)
    except OverflowError:
        raise _too_far(text, what) from None


def _too_far(text: str, what: str) -> ConfigError:
    return ConfigError(f"{what} is {text!r}, which is outside the calendar; use the years 1 to 9999")
