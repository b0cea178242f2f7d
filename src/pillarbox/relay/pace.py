"""How long to wait before looking again, how much to read at once, whether a destination may be tried. Pure."""

import logging
import random
from dataclasses import dataclass, field
from typing import Final

log = logging.getLogger(__name__)

# Right after work the next look comes soon; waiting grows with the time that nothing came, so that an event waits for
# about half as long as the pause before it, whatever the rate.
_SOONEST_SECONDS: Final = 0.001
_GROWTH: Final = 1.5
DOZE_AFTER_SECONDS: Final = 1.0


@dataclass(slots=True)
class Pace:
    """The waiting between two polls of one stream."""

    idle_seconds: float
    limit_seconds: float
    waited: float = 0.0  # since there was work
    _next: float = _SOONEST_SECONDS

    def worked(self) -> None:
        self.waited = 0.0
        self._next = _SOONEST_SECONDS

    def wait(self) -> float:
        """Seconds until the next poll."""
        seconds = self._next
        limit = self.idle_seconds if self.waited < DOZE_AFTER_SECONDS else self.limit_seconds
        self._next = min(self._next * _GROWTH, limit)
        self.waited += seconds
        # Workers that started together must not poll together.
        return seconds * random.uniform(0.9, 1.1)

    @property
    def drowsy(self) -> bool:
        """Whether it is time to ask for a wake-up."""
        return self.waited >= DOZE_AFTER_SECONDS


@dataclass(slots=True)
class BatchSize:
    """Grows while turns are quick and full, shrinks while they are slow, so that a stop never waits for long."""

    limit: int
    first: int = 500
    quick_seconds: float = 0.5  # then one of twice its size is far from slow, and in half of that one of four times
    slow_seconds: float = 2.0
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = min(self.limit, self.first)

    def turned(self, events: int, seconds: float) -> None:
        if seconds > self.slow_seconds:
            self.size = max(1, self.size // 2)
        elif events >= self.size and seconds < self.quick_seconds:
            self.size = min(self.limit, self.size * (4 if seconds < self.quick_seconds / 2 else 2))


# The most that a shard reads at once after none, one, two and more owners died with it.
_CAUTIOUS: Final = (1000, 125, 15, 1)


@dataclass(slots=True)
class Caution:
    """How much at once is read of a shard that owners died with.

    If one of its events killed an owner that read n at once, it is among the next n: once so many are settled, more are
    read at once again.
    """

    deaths: int
    _settled: int = 0  # since the limit was last raised

    def __post_init__(self) -> None:
        self.deaths = max(0, min(self.deaths, len(_CAUTIOUS) - 1))

    @property
    def limit(self) -> int | None:
        """None: there is none."""
        return _CAUTIOUS[self.deaths] if self.deaths else None

    def settled(self, events: int) -> bool:
        """Whether there is a death less to be careful about, which the database should know."""
        before = self.deaths
        self._settled += events
        while self.deaths and self._settled >= _CAUTIOUS[self.deaths - 1]:
            self._settled -= _CAUTIOUS[self.deaths - 1]
            self.deaths -= 1
        return self.deaths < before


@dataclass(slots=True)
class Patience:
    """The waiting for a database that is away: longer each time, said once."""

    stream: str
    store: str
    first_seconds: float = 0.1
    limit_seconds: float = 5.0
    _next: float = 0.0

    def after(self, error: Exception) -> float:
        if not self._next:
            log.warning(
                "stream '%s': %s; trying again until it answers",
                self.stream,
                error,
                extra={"action": "store_down", "stream": self.stream},
            )
        self._next = min(self.limit_seconds, self._next * 2 or self.first_seconds)
        return self._next

    def reset(self) -> None:
        if self._next:
            log.info(
                "stream '%s': %s answers again",
                self.stream,
                self.store,
                extra={"action": "store_up", "stream": self.stream},
            )
        self._next = 0.0
