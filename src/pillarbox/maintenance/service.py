"""The base of every maintenance service: an interval, one run that can be called by itself, start and stop."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from pillarbox.durations import Duration, seconds_of
from pillarbox.errors import StoreDown


class Service(ABC):
    """Runs ``run_once`` until it is stopped. A run that fails is logged and tried again.

    every: between two runs, a duration. logger: gets the log lines; default: that of the service's module."""

    name: str
    first_seconds = 0.0  # after the start
    about: Mapping[str, str] = MappingProxyType({})  # fields of a log line that tell services of one name apart

    def __init__(self, every: Duration, logger: logging.Logger | None = None) -> None:
        self.every_seconds = seconds_of(f"{self.name}: every", every, "1ms")
        self._stop = asyncio.Event()
        self._log = logger or logging.getLogger(type(self).__module__)

    @abstractmethod
    async def run_once(self) -> Any:
        """One run. Returns what it did."""

    async def run(self) -> None:
        await self._wait(min(self.first_seconds, self.every_seconds))
        while not self._stop.is_set():
            try:
                await self.run_once()
            except StoreDown as error:
                self._log.warning("%s: %s; trying again later", self._title, error, extra=self._failed)
            except Exception:
                self._log.exception("%s failed; trying again later", self._title, extra=self._failed)
            await self._wait(self.every_seconds)

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
