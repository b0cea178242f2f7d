"""Writes down what a relay's page of metrics says, a few times a second."""

import asyncio
import time
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pillarbox.observe.prometheus import Prometheus
from proof.history import Log, Scrape

_EVERY_SECONDS: Final = 0.25
_ACCEPT: Final = "application/openmetrics-text; version=1.0.0"


class Scraper:
    """Reads the page in the relay's own event loop, between two hooks: its counters then have one instant."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.observer = Prometheus(registry=CollectorRegistry())
        self._log = Log(folder / f"scrape-{worker}.jsonl")
        self._worker = worker

    async def run(self) -> None:
        while True:
            self.scrape()
            await asyncio.sleep(_EVERY_SECONDS)

    def scrape(self) -> None:
        at, (_, page) = time.monotonic(), self.observer.page(_ACCEPT)
        families: Any = text_string_to_metric_families(page.decode())  # type: ignore[no-untyped-call]
        counters = {
            " ".join([sample.name, *(value for _, value in sorted(sample.labels.items()))]): sample.value
            for family in families
            if family.type == "counter"
            for sample in family.samples
        }
        self._log.write(Scrape(at, self._worker, counters))
