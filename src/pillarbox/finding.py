"""What a check of an installation found."""

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """How well it is."""

    OK = "ok"
    WARNING = "warning"  # it works, and an operator should know
    FAILED = "failed"  # something does not work, or a promise is broken


class Finding(NamedTuple):
    """The result of one check. ``check`` is a stable word for programs."""

    check: str
    state: State
    sentence: str
    remedy: str | None = None  # what to do; none: nothing


def ok(check: str, sentence: str) -> Finding:
    return Finding(check, State.OK, sentence)


def warning(check: str, sentence: str, remedy: str) -> Finding:
    return Finding(check, State.WARNING, sentence, remedy)


def failed(check: str, sentence: str, remedy: str) -> Finding:
    return Finding(check, State.FAILED, sentence, remedy)
