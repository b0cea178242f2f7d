"""Retry policies: functions from the number of attempts to the wait before the next one. Pure."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from pillarbox.errors import ConfigError

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
