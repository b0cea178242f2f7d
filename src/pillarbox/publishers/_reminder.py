"""How often a warning is repeated."""

import math
import time
from collections.abc import Callable
from typing import Final

_AGAIN_SECONDS: Final = 60.0
# Names come from events, so there can be any number of them.
MOST_NAMES: Final = 1000


class Reminder:
    """Says whether a warning about a name is due: at once, and then at most once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._warned: dict[str, float] = {}

    def is_due(self, name: str) -> bool:
        """Whether to warn now. Counts as a warning if so."""
        now = self._clock()
        if now < self._warned.get(name, -math.inf) + _AGAIN_SECONDS:
            return False
        if len(self._warned) >= MOST_NAMES:
            self._warned.clear()
        self._warned[name] = now
        return True
