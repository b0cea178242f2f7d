"""The deadline of a stop: everything that the stop does shares it."""

import time
from enum import IntEnum


class Step(IntEnum):
    """The steps of a stop, one after the other."""

    FINISH = 0  # running calls go on
    CLOSE = 1  # the publisher closes, which ends the calls that still run
    SETTLE = 2  # what ended is settled, and leases are given back
    LEAVE = 3  # the store closes


# Each step ends at this part of the time: of 20 s after 14, 17, 19 and 20 s.
_PARTS = (0.7, 0.85, 0.95, 1.0)
# With a short time the later steps still have so many seconds: giving back saves the next worker the wait for a lease.
_LEAST_SECONDS = (0.0, 1.0, 2.0, 1.0)


class Deadline:
    """Starts when it is made. It ends after ``seconds``, if these are 20 or more, or up to 4 seconds later."""

    def __init__(self, seconds: float) -> None:
        begun = end = time.monotonic()
        self._ends = []
        for part, least in zip(_PARTS, _LEAST_SECONDS, strict=True):
            end = max(begun + seconds * part, end + least)
            self._ends.append(end)

    def left(self, step: Step) -> float:
        """Seconds until the end of this step."""
        return max(0.0, self._ends[step] - time.monotonic())
