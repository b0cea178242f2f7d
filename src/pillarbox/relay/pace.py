"""The pace of a worker: when it asks again, the size of a batch, the wait for a database. Pure."""

import logging
import math
import random
from dataclasses import dataclass, field
from typing import Final

log = logging.getLogger(__name__)

# A worker that looks in vain spends at most this share of the time on it: a twentieth. An answer with events is worth
# more: they may be the first of several. A look costs more than its answer takes, so there is a least wait.
_IN_VAIN: Final = 20
_IN_VAIN_SECONDS: Final = 0.007
_WITH_EVENTS: Final = 5
_WITH_EVENTS_SECONDS: Final = 0.001
# Who is told of an event looks at once, but not so soon after its last look: then frequent events share a turn.
_BETWEEN_SECONDS: Final = 0.002
# A poll asks for more than a look, and what it alone finds is less urgent: how often in the longest wait at rest.
_POLL_SHARE: Final = 100
_POLLS: Final = 4
_GROWTH: Final = 1.5
# A stream without events for so long is at rest.
REST_AFTER_SECONDS: Final = 1.0
# Events a second. A wake-up costs the database and its writers something for each event, so many events are polled for.
DOZE_BELOW: Final = 250
WAKE_ABOVE: Final = 500
# So many polls in a row that find events of which nobody told: wake-ups do not arrive, so the worker asks by itself.
_DOUBTFUL: Final = 3


@dataclass(slots=True)
class Rate:
    """How often something happens in a second, of late."""

    _count: float = 0.0
    _at: float = 0.0

    def add(self, now: float, count: int) -> None:
        self._count, self._at = self.now(now) + count, now

    def now(self, now: float) -> float:
        return self._count * math.exp(self._at - now)


@dataclass(slots=True)
class Pace:
    """When the worker of one stream asks its store again. A poll asks for everything; a look asks for new events only.

    told: the store wakes this worker, which need not look by itself.
    woken: the store has told of events, and nobody has looked since.
    awaited: somebody waits for a poll that finds nothing to do.
    """

    poll_seconds: float
    limit_seconds: float
    told: bool = False
    woken: bool = False
    awaited: bool = False
    poll_at: float = 0.0
    look_at: float = math.inf
    _worked_at: float = -math.inf
    _look_from: float = -math.inf
    _interval: float = 0.0
    _untold: int = 0
    _events: Rate = field(default_factory=Rate)
    _wakes: Rate = field(default_factory=Rate)

    # An ask begins before its question is sent, and what happens after that leads to the next one.
    def begin_poll(self) -> None:
        self.poll_at = math.inf
        self.begin_look()

    def begin_look(self) -> None:
        self.look_at, self.woken = math.inf, False

    def polled(
        self, now: float, seconds: float, *, found: bool, ready: bool, urgent: bool = False, pause: float = 0.0
    ) -> None:
        """Note a poll that took so many seconds. found: there is work; ready: there are new events. urgent: something
        waits that only a poll finds. pause: for so long another poll makes no sense."""
        if found:
            self._worked_at = now
        self._untold += ready and self.told
        often = self.poll_seconds if urgent else max(self.poll_seconds, self.limit_seconds / _POLLS)
        rare = min(self.limit_seconds, max(often, _POLL_SHARE * seconds))
        self._interval = rare if self._is_active(now) else min(self.limit_seconds, _GROWTH * max(rare, self._interval))
        self.poll_at = min(self.poll_at, now + max(pause, _drifting(self._interval)))
        self._look_again(now, seconds, found=found, pause=pause)

    def looked(self, now: float, seconds: float, events: int, *, more: bool = False) -> None:
        """Note a look that took so many seconds and found so many events. more: the store has told of others since."""
        if events:
            self._worked_at = now
            self._events.add(now, events)
        self._look_from = now + _BETWEEN_SECONDS
        if more:
            self.look_at = min(self.look_at, self._look_from)
        self._look_again(now, seconds, found=events > 0)

    def _look_again(self, now: float, seconds: float, *, found: bool, pause: float = 0.0) -> None:
        is_told = self.told and self._untold < _DOUBTFUL
        if self._is_active(now) and not is_told:
            least, factor = (_WITH_EVENTS_SECONDS, _WITH_EVENTS) if found else (_IN_VAIN_SECONDS, _IN_VAIN)
            wait = max(least, factor * seconds)
            self.look_at = min(self.look_at, now + max(pause, _drifting(min(wait, self.poll_seconds))))

    def _is_active(self, now: float) -> bool:
        return now - self._worked_at < REST_AFTER_SECONDS

    def wake(self, now: float) -> None:
        """Look as soon as a look may be: the store tells of new events."""
        self._untold = 0
        self._wakes.add(now, 1)
        self.look_at, self.woken = max(now, self._look_from), True

    def hurry(self) -> None:
        """Poll at once."""
        self.poll_at = 0.0

    @property
    def next_at(self) -> float:
        return min(self.poll_at, self.look_at)

    def may_doze(self, now: float) -> bool:
        """Whether events are so rare that a wake-up for each is cheaper than asking."""
        return max(self._events.now(now), self._wakes.now(now)) < DOZE_BELOW

    def must_wake(self, now: float) -> bool:
        """Whether events are so frequent that wake-ups cost too much."""
        return max(self._events.now(now), self._wakes.now(now)) > WAKE_ABOVE


def _drifting(seconds: float) -> float:
    """About so long: workers that started together must not ask together."""
    return seconds * random.uniform(0.9, 1.1)


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
