"""The base of every maintenance service: an interval, one run that can be called by itself, start and stop."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from pillarbox.errors import ConfigError, StoreDown


class Service(ABC):
    """Runs ``run_once`` every ``interval_seconds`` until it is stopped. A run that fails is logged and tried again.

    logger: gets the log lines; default: that of the service's module."""

    name: str
    first_seconds = 0.0  # after the start
    about: Mapping[str, str] = MappingProxyType({})  # fields of a log line that tell services of one name apart

    def __init__(self, interval_seconds: float, logger: logging.Logger | None = None) -> None:
        if not interval_seconds > 0:
            raise ConfigError(f"{self.name}: interval_seconds is {interval_seconds}; use a number above 0")
        self.interval_seconds = interval_seconds
        self._stop = asyncio.Event()
        self._log = logger or logging.getLogger(type(self).__module__)

    @abstractmethod
    async def run_once(self) -> Any:
        """One run. Returns what it did."""

    async def run(self) -> None:
        await self._wait(min(self.first_seconds, self.interval_seconds))
        while not self._stop.is_set():
            try:
                await self.run_once()
            except StoreDown as error:
                self._log.warning("%s: %s; trying again later", self._title, error, extra=self._failed)
            except Exception:
                self._log.exception("%s failed; trying again later", self._title, extra=self._failed)
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
