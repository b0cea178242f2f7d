"""Whose fault a refused address is, and how long its events wait."""

import time
from collections.abc import Callable
from typing import Final

from pillarbox.publisher import Outcome, outage, retry
from pillarbox.publishers._link import Link

# The wait of an event whose own address is refused: as long as it has been refused, within these bounds.
WAIT_SECONDS: Final = (1.0, 30.0)
MOST_NAMES: Final = 10_000


class Refusals:
    """Of the default address: an outage. Of an event's own: it waits, uncharged. Shared by all connections."""

    def __init__(self, default: str, waiting: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self.default = default
        self.waiting = waiting
        self._clock = clock
        self._since: dict[str, float] = {}

    def accepted(self, address: str) -> None:
        """A message for this address was confirmed."""
        if self._since:
            self._since.pop(address, None)

    def without_address(self, reason: str) -> Outcome:
        """Of an event that has no address."""
        self.waiting.waits("", reason)
        return retry(reason, charged=False, after_seconds=WAIT_SECONDS[1])

    def refused(self, address: str, reason: str) -> Outcome:
        """No message for this address can be stored now."""
        if address == self.default:
            return outage(reason)
        if len(self._since) >= MOST_NAMES:  # addresses come from events, so there can be any number of them
            self._since.clear()
        now = self._clock()
        shortest, longest = WAIT_SECONDS
        seconds = min(longest, max(shortest, now - self._since.setdefault(address, now)))
        self.waiting.waits(address, reason)
        # Someone can mend the address, so the event is not to blame. If no address is good, the server is.
        return retry(reason, charged=False, after_seconds=seconds, ambiguous=True)
