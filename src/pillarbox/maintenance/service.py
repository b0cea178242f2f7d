"""What every maintenance service shares: an interval, one run that can be called by itself, start and stop."""

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

from pillarbox.errors import ConfigError, StoreDown

log = logging.getLogger(__name__)


class Service(ABC):
    """Runs ``run_once`` every ``interval_seconds`` until it is stopped; what fails is logged and tried again."""

    name: str
    first_seconds = 0.0  # after the start

    def __init__(self, interval_seconds: float) -> None:
        if interval_seconds <= 0:
            raise ConfigError(f"{self.name}: interval_seconds is {interval_seconds}; use a number above 0")
        self.interval_seconds = interval_seconds
        self._stop = asyncio.Event()

    @abstractmethod
    async def run_once(self) -> Any:
        """One run; what it did."""

    async def run(self) -> None:
        await self._wait(min(self.first_seconds, self.interval_seconds))
        while not self._stop.is_set():
            try:
                await self.run_once()
            except StoreDown as error:
                log.warning("%s: %s; trying again later", self.name, error, extra={"action": f"{self.name}_failed"})
            except Exception:
                log.exception("%s failed; trying again later", self.name, extra={"action": f"{self.name}_failed"})
            await self._wait(self.interval_seconds)

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    def stop(self) -> None:
        self._stop.set()
