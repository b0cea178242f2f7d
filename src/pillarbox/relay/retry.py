"""Retry policies: functions from the number of attempts to the wait before the next one. Pure."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from pillarbox.durations import Duration, seconds_of
from pillarbox.errors import ConfigError
from pillarbox.hints import hint

# From the number of attempts so far (1 and up) to the seconds until the next one.
Retry = Callable[[int], float]


def _set_seconds(policy: object, *settings: str) -> None:
    for name in settings:
        object.__setattr__(policy, f"{name}_seconds", seconds_of(f"retry {name}", getattr(policy, name)))


@dataclass(frozen=True, slots=True)
class Exponential:
    """A random time up to ``base * factor ** (attempts - 1)``, at most ``limit`` (full jitter).

    base, limit: durations such as ``"1s"`` or a number of seconds. jitter: False waits for the whole time.
    """

    base: Duration = "1s"
    factor: float = 2.0
    limit: Duration = "10m"
    jitter: bool = True
    base_seconds: float = field(init=False, repr=False)
    limit_seconds: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _set_seconds(self, "base", "limit")
        factor: Any = self.factor
        if not isinstance(factor, int | float) or not 0 <= factor <= 1_000_000:
            raise ConfigError(f"retry factor is {self.factor!r}; use a number from 0 to 1000000")
        if not isinstance(self.jitter, bool):
            raise ConfigError(f"retry jitter is {self.jitter!r}; use true or false")

    def __call__(self, attempts: int) -> float:
        try:
            longest = min(self.limit_seconds, self.base_seconds * self.factor ** (attempts - 1))
        except OverflowError:
            longest = self.limit_seconds
        return random.uniform(0, longest) if self.jitter else longest


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always ``wait``, a duration such as ``"30s"`` or a number of seconds."""

    wait: Duration = "5s"
    wait_seconds: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _set_seconds(self, "wait")

    def __call__(self, attempts: int) -> float:
        return self.wait_seconds


@dataclass(frozen=True, slots=True)
class Linear:
    """``step`` more after each attempt, at most ``limit``: durations such as ``"5s"`` or a number of seconds."""

    step: Duration = "5s"
    limit: Duration = "5m"
    step_seconds: float = field(init=False, repr=False)
    limit_seconds: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _set_seconds(self, "step", "limit")

    def __call__(self, attempts: int) -> float:
        return min(self.limit_seconds, self.step_seconds * attempts)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Schedule:
    """The waits after the first attempt, the second and so on; the last one repeats: ``Schedule("5s", "5m", "30m")``.

    waits: durations such as ``"5s"`` or numbers of seconds.
    """

    waits: tuple[Duration, ...]
    waits_seconds: tuple[float, ...]

    def __init__(self, *waits: Duration) -> None:
        if not waits:
            raise ConfigError('a retry schedule needs a wait; write Schedule("5s", "5m"), or "schedule:5s,5m"')
        object.__setattr__(self, "waits", waits)
        object.__setattr__(self, "waits_seconds", tuple(seconds_of("retry schedule", wait) for wait in waits))

    def __repr__(self) -> str:
        return f"Schedule({', '.join(map(repr, self.waits))})"

    def __call__(self, attempts: int) -> float:
        return self.waits_seconds[min(attempts, len(self.waits_seconds)) - 1]


_POLICIES: Final[Mapping[str, Any]] = {
    "exponential": Exponential,
    "fixed": Fixed,
    "linear": Linear,
    "schedule": Schedule,
}
_WORDS: Final = {"true": True, "false": False}


def retry_of(value: Retry | str) -> Retry:
    """A policy from a text: ``exponential``, ``fixed:30s``, ``linear:step=5s,limit=5m`` or ``schedule:5s,5m,30m``. A
    policy stays as it is."""
    if not isinstance(value, str):
        if not callable(value):
            raise ConfigError(
                f'retry is of type {type(value).__name__}; pass a policy such as Fixed("30s"), or "fixed:30s"'
            )
        return value
    kind, _, rest = value.partition(":")
    if kind not in _POLICIES:
        raise ConfigError(f"retry is {value!r}; {hint(kind, _POLICIES)}")
    if kind == "schedule":
        return Schedule(*rest.split(",")) if rest else Schedule()
    known = [each.name for each in fields(_POLICIES[kind]) if each.init]
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, equals, text = part.partition("=")
        if not equals:
            # The first setting needs no name, as in Fixed("30s").
            name, text = known[0], part
        if name not in known:
            raise ConfigError(f"retry is {value!r}: {kind} has no {name!r}; {hint(name, known)}")
        if name in given:
            raise ConfigError(f"retry is {value!r}, which has two values for {name!r}; leave out one of them")
        given[name] = _read(name, text)
    policy: Retry = _POLICIES[kind](**given)
    return policy


def _read(name: str, text: str) -> Any:
    if name == "jitter":
        return _WORDS.get(text, text)
    if name != "factor":
        return text
    try:
        return float(text)
    except ValueError:
        return text
