"""What an answer of an endpoint, or the lack of one, says about the event and the endpoint. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Final, NamedTuple

_MOST_SECONDS: Final = 3600.0
_TOO_LARGE: Final = {413: "body is", 431: "headers are"}
_TOO_MANY: Final = 429
_GONE: Final = 410
# The answers to a client that is not allowed to send anything.
_REFUSED: Final = frozenset({401, 403, 407})
# What a gateway says while the server behind it is away.
_AWAY: Final = frozenset({502, 503, 504})


class Fault(Enum):
    """What stands in the way."""

    NONE = auto()
    EVENT = auto()  # no retry can help
    ENDPOINT = auto()  # no event has a chance now
    FORBIDDEN = auto()  # the rules for customers' addresses
    GONE = auto()  # the endpoint wants no events any more
    AWAY = auto()  # most likely the endpoint: the event is not charged
    EITHER = auto()


class Verdict(NamedTuple):
    """after_seconds: the pause that the endpoint asked for."""

    fault: Fault
    error: str = ""
    after_seconds: float | None = None


DELIVERED: Final = Verdict(Fault.NONE)


def verdict_of(name: str, status: int, headers: Mapping[str, str]) -> Verdict:
    """The verdict on an answer. Nothing of its text is used: it may quote the payload."""
    if 200 <= status < 300:
        return DELIVERED
    if status in _TOO_LARGE:
        part = _TOO_LARGE[status]
        return Verdict(
            Fault.EVENT,
            f"{name} answered {status}: the {part} too large; store the content elsewhere and send a reference",
        )
    if status == _GONE:
        return Verdict(Fault.GONE, f"{name} answered 410: it wants no events any more; remove the endpoint")
    if 300 <= status < 400:
        return Verdict(
            Fault.ENDPOINT,
            f"{name} answered {status}, a redirect, which is not followed; write the address to which it leads",
        )
    after = seconds_to_wait(headers.get("Retry-After", ""))
    if after is not None or status == _TOO_MANY:
        return Verdict(Fault.ENDPOINT, f"{name} answered {status} and asks for a pause", after)
    if status in _REFUSED:
        return Verdict(
            Fault.ENDPOINT, f"{name} answered {status}: it refuses this client; correct its secret or its login"
        )
    if status in _AWAY:
        return Verdict(Fault.AWAY, f"{name} answered {status}: its server is away")
    return Verdict(Fault.EITHER, f"{name} answered {status}; see its log")


def seconds_to_wait(text: str, now: datetime | None = None) -> float | None:
    """The seconds of a Retry-After header, at most an hour; None: it has none that can be read."""
    text = text.strip()
    if text.isascii() and text.isdecimal():
        return min(float(text[:10]), _MOST_SECONDS)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return min(max(0.0, (until - (now or datetime.now(UTC))).total_seconds()), _MOST_SECONDS)
