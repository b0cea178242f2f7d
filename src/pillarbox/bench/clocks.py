"""Observers that measure a relay, and a destination that costs nothing."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol
from uuid import UUID

from pillarbox.batch import Batch
from pillarbox.observe import Observer
from pillarbox.publisher import PUBLISHED, Outcome, Publisher
from pillarbox.store import Claim, ClaimResults, Grant, Settlement


class DrainClock(Protocol):
    """Measures a drain: from its first read to the settle of its last event."""

    def begin(self) -> None: ...
    def settle(self, events: int) -> None: ...


class Clock:
    """The clock of one drain of ``events`` events."""

    def __init__(self, events: int) -> None:
        self.settled = 0
        self.seconds = self.cpu_seconds = 0.0
        self.done = asyncio.Event()
        self._events = events
        self._begun: tuple[float, float] | None = None

    def begin(self) -> None:
        if self._begun is None:
            self._begun = time.monotonic(), time.process_time()

    def settle(self, events: int) -> None:
        self.settled += events
        if self.settled >= self._events and self._begun is not None and not self.done.is_set():
            begun, cpu_before = self._begun
            self.seconds, self.cpu_seconds = time.monotonic() - begun, time.process_time() - cpu_before
            self.done.set()


class DrainObserver(Observer):
    """Starts a clock at the first read and counts settled events on it."""

    def __init__(self, clock: DrainClock) -> None:
        self._clock = clock

    def before_read(self, grants: Sequence[Grant]) -> None:
        self._clock.begin()

    def after_settle(self, settlements: Sequence[Settlement], lost: Sequence[Settlement], seconds: float) -> None:
        self._clock.settle(_published(settlements) - _published(lost))

    def before_claim(self, stream: str) -> None:
        self._clock.begin()

    def after_settle_claims(self, claims: Sequence[Claim], results: ClaimResults, refused: int, seconds: float) -> None:
        self._clock.settle(len(results.published))


def _published(settlements: Sequence[Settlement]) -> int:
    return sum(len(settlement.published) for settlement in settlements)


class PublishObserver(Observer):
    """Notes the sizes of batches and when events were acknowledged; ``on_error`` is called with errors."""

    def __init__(self, on_error: Callable[[str], None]) -> None:
        self.sizes: list[int] = []
        self.acknowledged: dict[UUID, float] = {}
        self.keeps_instants = False
        self._on_error = on_error

    def after_publish(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
        if self.keeps_instants:
            self.acknowledged.update(dict.fromkeys([event.id for event in batch], time.monotonic()))
        self.sizes.append(len(batch))
        if outcomes.count(PUBLISHED) != len(batch):
            error = next((outcome.error for outcome in outcomes if outcome.error), None)
            if error is not None:
                self._on_error(error)


class Nowhere(Publisher):
    """A destination that takes everything at once, so that only the database is measured."""

    description = "memory"

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [PUBLISHED] * len(batch)
