"""What every maintenance service shares: an interval, one run that can be called by itself, start and stop."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from pillarbox.errors import ConfigError, StoreDown

log = logging.getLogger(__name__)


class Service(ABC):
    """Runs ``run_once`` every ``interval_seconds`` until it is stopped; what fails is logged and tried again."""

    name: str
    first_seconds = 0.0  # after the start
    about: Mapping[str, str] = MappingProxyType({})  # which one of several of its name, as fields of a log

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
                log.warning("%s: %s; trying again later", self._title, error, extra=self._failed)
            except Exception:
                log.exception("%s failed; trying again later", self._title, extra=self._failed)
            await self._wait(self.interval_seconds)

    @property
    def _title(self) -> str:
        return " ".join([self.name, *(f"'{value}'" for value in self.about.values())])

    @property
    def _failed(self) -> dict[str, str]:
        return {"action": f"{self.name}_failed", **self.about}

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    def stop(self) -> None:
        self._stop.set()
