"""The circuit of one destination: an outage is not poison. Pure, but for the clock that is passed in."""

import logging
from dataclasses import dataclass
from enum import StrEnum

log = logging.getLogger(__name__)


class Circuit(StrEnum):
    """Whether a destination is tried."""

    CLOSED = "closed"  # it works
    OPEN = "open"  # it is down: nothing is sent
    HALF_OPEN = "half_open"  # one probe is under way


@dataclass(slots=True)
class Breaker:
    """Opens when the destination is down, lets a single probe through after a while, closes when one succeeds."""

    stream: str
    destination: str
    first_seconds: float = 1.0
    limit_seconds: float = 5.0
    state: Circuit = Circuit.CLOSED
    _wait: float = 0.0
    _until: float = 0.0

    def allows(self, now: float) -> bool:
        """Whether something may be sent; asking after the wait is over makes it the probe."""
        if self.state is Circuit.OPEN and now >= self._until:
            self.state = Circuit.HALF_OPEN
            return True
        return self.state is Circuit.CLOSED

    @property
    def probing(self) -> bool:
        return self.state is Circuit.HALF_OPEN

    def failed(self, now: float, error: str) -> None:
        if self.state is Circuit.OPEN:
            return  # by a call that was under way when it opened
        if self.state is Circuit.CLOSED:
            self._wait = self.first_seconds
            log.warning(
                "stream '%s': %s is down (%s); waiting for it, no event is charged",
                self.stream,
                self.destination,
                error,
                extra={"action": "circuit_opened", "stream": self.stream},
            )
        else:
            self._wait = min(self.limit_seconds, self._wait * 2)
        self.state = Circuit.OPEN
        self._until = now + self._wait

    def succeeded(self) -> None:
        if self.state is not Circuit.CLOSED:
            log.info(
                "stream '%s': %s is back",
                self.stream,
                self.destination,
                extra={"action": "circuit_closed", "stream": self.stream},
            )
        self.state = Circuit.CLOSED

    def untold(self) -> None:
        """The probe ended without telling anything: the next one may go at once."""
        if self.state is Circuit.HALF_OPEN:
            self.state = Circuit.OPEN

    def seconds_left(self, now: float) -> float:
        return max(0.0, self._until - now) if self.state is Circuit.OPEN else 0.0
