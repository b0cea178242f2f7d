"""Sample: reads what waits in the outbox, for the gauges of a monitor."""

import logging
import time
from typing import Final

from pillarbox.durations import Duration
from pillarbox.errors import StoreDown
from pillarbox.maintenance.service import Service
from pillarbox.observe import Observers
from pillarbox.store import Gauges

# A sample may take one part in so many of the time.
_SHARE: Final = 20


class Sample(Service):
    """Asks the store for its gauges, and tells observers. If that takes long, it asks less often: at most 5 % of the
    time. every: between two samples."""

    name = "sample"

    def __init__(
        self,
        store: Gauges,
        observers: Observers,
        *,
        every: Duration = "15s",
        logger: logging.Logger | None = None,
    ) -> None:
        super().__init__(every, logger)
        self._store = store
        self._observers = observers
        self._least_seconds = self.every_seconds

    async def run_once(self) -> float:
        """Sample once. Returns the seconds that it took."""
        begun = time.monotonic()
        try:
            gauges = await self._store.gauges()
        except StoreDown as error:
            # The streams tell of it once. A monitor sees the age of the last sample.
            self._log.debug("no sample: %s", error, extra={"action": "sample_skipped"})
            return time.monotonic() - begun
        seconds = time.monotonic() - begun
        self.every_seconds = max(self._least_seconds, seconds * (_SHARE - 1))
        self._observers.sampled(gauges, seconds)
        return seconds
