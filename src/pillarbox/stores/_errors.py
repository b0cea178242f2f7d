"""The errors of an event, as stores keep them."""

from datetime import UTC, datetime
from typing import Any, Final

from pillarbox.store import CRASHES_ALONE

MOST_ATTEMPTS: Final = 2**31 - 1  # a column holds no more; the count stops there


def keepable(error: str) -> str:
    """An error's text without characters that databases refuse: NUL and lone surrogates."""
    return error.encode("utf-8", "replace").decode().replace("\0", "?")


def error_entry(error: str, attempts: int) -> dict[str, Any]:
    """One entry of an event's error history."""
    return {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "attempts": attempts, "error": error}


CRASHED = "its worker died, or held it for too long"
DEAD_OF_CRASHES = (
    f"its worker died, or held it for too long, {CRASHES_ALONE} times while this event ran alone; it may have been "
    "delivered"
)
