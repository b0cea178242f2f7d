"""Durations as people write them: ``"500ms"``, ``"15s"``, ``"24h"``, ``"7d"``, or a number of seconds. Pure."""

import re
from typing import Any, Final, TypeAlias

from pillarbox.errors import ConfigError

# A text with a unit, or a number of seconds.
Duration: TypeAlias = str | float

LONGEST: Final = "36500d"  # databases still count with it
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_TEXT: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(ms|s|m|h|d)?")
_REMEDY: Final = 'use a duration such as "500ms", "15s", "10m", "24h" or "7d", or a number of seconds'


def seconds_of(setting: str, value: Duration, least: Duration = 0, most: Duration = LONGEST) -> float:
    """The seconds of a duration.

    Raises ConfigError if it is no duration or not within ``least`` and ``most``; ``setting`` names it there. A number
    without a unit is a number of seconds, also as text: a flag and a variable cannot say it in another way.
    """
    seconds = _seconds(value)
    if seconds is None:
        raise ConfigError(f"{setting} is {_shown(value)}; {_REMEDY}")
    if not _bound(least) <= seconds <= _bound(most):
        raise ConfigError(f"{setting} is {_shown(value)}; use {least} to {most}")
    return seconds


def is_duration(text: str) -> bool:
    """Whether the text is a duration with a unit."""
    found = _TEXT.fullmatch(text)
    return found is not None and found[2] is not None


def _seconds(value: Any) -> float | None:
    if isinstance(value, str):
        found = _TEXT.fullmatch(value)
        return None if found is None else float(found[1]) * _UNITS[found[2] or "s"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e15 < value < 1e15:
        return None
    return float(value)


def _bound(value: Duration) -> float:
    seconds = _seconds(value)
    assert seconds is not None
    return seconds


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:40]}...")
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**15):
        return repr(value)
    return "a number of more than 15 digits" if isinstance(value, int) else f"of type {type(value).__name__}"
