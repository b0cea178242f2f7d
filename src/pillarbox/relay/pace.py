"""The pace of a worker: the wait before the next poll, the size of a batch, the wait for a database. Pure."""

import logging
import random
from dataclasses import dataclass, field
from typing import Final

log = logging.getLogger(__name__)

# Right after work the next poll comes soon. The wait grows while nothing comes, so that an event waits about half as
# long as the pause before it.
_SOONEST_SECONDS: Final = 0.001
_GROWTH: Final = 1.5
DOZE_AFTER_SECONDS: Final = 1.0


@dataclass(slots=True)
class Pace:
    """The wait between two polls of one stream."""

    idle_seconds: float
    limit_seconds: float
    waited: float = 0.0  # since the last work
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
    """The most events that a turn reads. It grows while turns are quick and full, and shrinks while they are slow, so
    that a stop never waits for long."""

    limit: int
    first: int = 500
    quick_seconds: float = 0.5  # twice the size is still far from slow; after half of this time, four times the size
    slow_seconds: float = 2.0
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = min(self.limit, self.first)

    def turned(self, events: int, seconds: float) -> None:
        if seconds > self.slow_seconds:
            self.size = max(1, self.size // 2)
        elif events >= self.size and seconds < self.quick_seconds:
            self.size = min(self.limit, self.size * (4 if seconds < self.quick_seconds / 2 else 2))


@dataclass(slots=True)
class Patience:
    """The wait for a database that is away. It grows each time, and is logged once."""

    stream: str
    store: str
    first_seconds: float = 0.1
    limit_seconds: float = 5.0
    logger: logging.Logger | None = None
    _next: float = 0.0

    def after(self, error: Exception) -> float:
        if not self._next:
            (self.logger or log).warning(
                "stream '%s': %s; trying again until it answers",
                self.stream,
                error,
                extra={"action": "store_down", "stream": self.stream},
            )
        self._next = min(self.limit_seconds, self._next * 2 or self.first_seconds)
        return self._next

    def reset(self) -> None:
        if self._next:
            (self.logger or log).warning(
                "stream '%s': %s answers again",
                self.stream,
                self.store,
                extra={"action": "store_up", "stream": self.stream},
            )
        self._next = 0.0
