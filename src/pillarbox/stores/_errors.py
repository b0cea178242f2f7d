"""The errors of an event, as stores keep them."""

from pillarbox.limits import MOST_ATTEMPTS as MOST_ATTEMPTS
from pillarbox.store import CRASHES_ALONE
from pillarbox.store.records import error_entry as error_entry


def keepable(error: str) -> str:
    """An error's text without characters that databases refuse: NUL and lone surrogates."""
    return error.encode("utf-8", "replace").decode().replace("\0", "?")


CRASHED = "its worker died, or held it for too long"
DEAD_OF_CRASHES = (
    f"its worker died, or held it for too long, {CRASHES_ALONE} times while this event ran alone; it may have been "
    "delivered"
)
