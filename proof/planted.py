"""Bugs to be caught: each is a fault that a relay could have, switched on in one worker by its name."""

from collections.abc import Callable
from typing import Any, Final

PLANTED: Final[dict[str, Callable[[Any, Any], None]]] = {}


def plant(name: str | None, store: Any, publisher: Any) -> None:
    """Change this store and this publisher so that they have the bug."""
    if name is not None:
        PLANTED[name](store, publisher)
