"""Retry policies: functions from the number of attempts to the wait before the next one. Pure."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pillarbox.errors import ConfigError
from pillarbox.hints import hint

# From the number of attempts so far (1 and up) to the seconds until the next one.
Retry = Callable[[int], float]


def _check(**settings: float) -> None:
    for name, value in settings.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"retry {name} is {value}; use a number of seconds, 0 or more")


@dataclass(frozen=True, slots=True)
class Exponential:
    """A random time up to ``base_seconds * factor ** (attempts - 1)``, at most ``limit_seconds`` (full jitter)."""

    base_seconds: float = 1.0
    factor: float = 2.0
    limit_seconds: float = 300.0
    jitter: bool = True

    def __post_init__(self) -> None:
        _check(base_seconds=self.base_seconds, factor=self.factor, limit_seconds=self.limit_seconds)

    def __call__(self, attempts: int) -> float:
        try:
            longest = min(self.limit_seconds, self.base_seconds * self.factor ** (attempts - 1))
        except OverflowError:
            longest = self.limit_seconds
        return random.uniform(0, longest) if self.jitter else longest


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always ``seconds``."""

    seconds: float = 5.0

    def __post_init__(self) -> None:
        _check(seconds=self.seconds)

    def __call__(self, attempts: int) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Linear:
    """``step_seconds`` more after each attempt, at most ``limit_seconds``."""

    step_seconds: float = 5.0
    limit_seconds: float = 300.0

    def __post_init__(self) -> None:
        _check(step_seconds=self.step_seconds, limit_seconds=self.limit_seconds)

    def __call__(self, attempts: int) -> float:
        return min(self.limit_seconds, self.step_seconds * attempts)


_POLICIES: Final[dict[str, Any]] = {"exponential": Exponential, "fixed": Fixed, "linear": Linear}


def retry_policy(given: Retry | str, where: str) -> Retry:
    """The policy itself, or the one that a text like ``fixed:seconds=30`` names. ``where`` begins the error."""
    if not isinstance(given, str):
        if not callable(given):
            raise ConfigError(
                f"{where}: retry is {given!r}; pass Exponential(), Fixed(), Linear(), a text such as "
                "'fixed:seconds=30', or a function from the number of attempts to seconds"
            )
        return given
    kind, _, rest = given.partition(":")
    if kind not in _POLICIES:
        raise ConfigError(f"{where}: retry is {given!r}; {hint(kind, _POLICIES)}")
    known = _POLICIES[kind].__dataclass_fields__
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise ConfigError(f"{where}: retry {kind} has no {name!r}; {hint(name, known)}")
        try:
            options[name] = {"true": True, "false": False}[value] if name == "jitter" else float(value)
        except (KeyError, ValueError):
            wanted = "true or false" if name == "jitter" else "a number"
            raise ConfigError(f"{where}: retry {name} is {value!r}; use {wanted}") from None
    made: Retry = _POLICIES[kind](**options)
    return made
