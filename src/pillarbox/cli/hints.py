"""Unknown names: what was meant, or what there is."""

import difflib
from collections.abc import Iterable

from pillarbox.errors import PillarboxError


class NotFound(PillarboxError):
    """What was asked for is not there."""


def hint(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """``did you mean 'x'?``, or else what can be done."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1)
    if close:
        return f"did you mean {close[0]!r}?"
    return otherwise or f"use one of: {', '.join(names)}"
