"""The circuit of one destination. Pure: the caller passes the time."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pillarbox.relay.subject import Subject

log = logging.getLogger(__name__)


class Circuit(StrEnum):
    """Whether a destination is tried."""

    CLOSED = "closed"  # it works
    OPEN = "open"  # it is down: nothing is sent
    HALF_OPEN = "half_open"  # one probe is under way


@dataclass(slots=True)
class Breaker:
    """Opens when the destination is down, lets a single probe through after a wait, and closes when a probe
    succeeds."""

    subject: Subject
    destination: str
    first_seconds: float = 1.0
    limit_seconds: float = 5.0
    on_change: Callable[[str, Circuit], None] = lambda stream, state: None
    logger: logging.Logger | None = None
    state: Circuit = Circuit.CLOSED
    error: str | None = None  # why it is not closed
    _wait: float = 0.0
    _until: float = 0.0

    def allows(self, now: float) -> bool:
        """Whether something may be sent. The first caller after the wait is the probe."""
        if self.state is Circuit.OPEN and now >= self._until:
            self._change(Circuit.HALF_OPEN)
            return True
        return self.state is Circuit.CLOSED

    @property
    def probing(self) -> bool:
        return self.state is Circuit.HALF_OPEN

    def failed(self, now: float, error: str, after_seconds: float = 0.0) -> None:
        """Note that the destination is down. ``after_seconds``: the wait that it asked for."""
        if self.state is Circuit.OPEN:
            # A call that was under way when the circuit opened: the wait does not grow.
            self._until = max(self._until, now + after_seconds)
            return
        if self.state is Circuit.CLOSED:
            self._wait = self.first_seconds
            (self.logger or log).warning(
                "%s: %s is down (%s); waiting for it, no event is charged",
                self.subject,
                self.destination,
                error,
                extra=self.subject.fields("circuit_opened"),
            )
        else:
            self._wait = min(self.limit_seconds, self._wait * 2)
        self._until = now + max(self._wait, after_seconds)
        self.error = error
        self._change(Circuit.OPEN)

    def succeeded(self) -> None:
        if self.state is Circuit.CLOSED:
            return
        (self.logger or log).warning(
            "%s: %s is back",
            self.subject,
            self.destination,
            extra=self.subject.fields("circuit_closed"),
        )
        self.error = None
        self._change(Circuit.CLOSED)

    def inconclusive(self) -> None:
        """Note that the probe ended without a result: the next one may start at once."""
        if self.state is Circuit.HALF_OPEN:
            self._change(Circuit.OPEN)

    def seconds_left(self, now: float) -> float:
        """Seconds until the next probe."""
        return max(0.0, self._until - now) if self.state is Circuit.OPEN else 0.0

    def pause_seconds(self, now: float) -> float:
        """Seconds until the next poll: until the probe, but at most ``limit_seconds``.

        A worker still has to see that it owns too many shards, or that its stream is paused."""
        return min(self.limit_seconds, self.seconds_left(now))

    def _change(self, state: Circuit) -> None:
        self.state = state
        self.on_change(self.subject.name, state)
