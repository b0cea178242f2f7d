"""Hints for unknown names."""

import difflib
from collections.abc import Iterable


def hint(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """``did you mean 'x'?``; without a similar name ``otherwise``, or the list of known names."""
    names = list(known)
    similar = difflib.get_close_matches(name, names, 1)
    if similar:
        return f"did you mean {similar[0]!r}?"
    return otherwise or f"use one of: {', '.join(names)}"
