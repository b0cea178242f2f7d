"""Clocks around the store and the destination of a relay."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol
from uuid import UUID

from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, Outcome, Publisher, PublisherFeatures
from pillarbox.store import Claim, Grant, Settlement, Store


class Clock:
    """One drain: from its first read to the settle of its last event."""

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


class DrainClock(Protocol):
    """What a timed store tells."""

    def begin(self) -> None: ...
    def settle(self, events: int) -> None: ...


class TimedStore:
    """A store that tells a clock of what a relay reads and settles."""

    def __init__(self, store: Store, clock: DrainClock) -> None:
        self._store = store
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def read(self, grant: Grant, limit: int, max_bytes: int) -> Sequence[Event]:
        self._clock.begin()
        return await self._store.read(grant, limit, max_bytes)

    async def settle(self, grant: Grant, settlement: Settlement) -> Collection[str]:
        aside = await self._store.settle(grant, settlement)
        self._clock.settle(len(settlement.published))
        return aside

    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        self._clock.begin()
        return await self._store.claim(stream, shard, worker, limit, seconds)

    async def settle_claims(self, claims: Sequence[Claim], settlement: Settlement, refund: Sequence[UUID] = ()) -> int:
        refused = await self._store.settle_claims(claims, settlement, refund)
        self._clock.settle(len(settlement.published))
        return refused


class Witness:
    """A destination that notes what it was given and when it was done; the first error is told."""

    def __init__(self, publisher: Publisher, on_error: Callable[[str], None]) -> None:
        self.sizes: list[int] = []  # of the batches
        self.acknowledged: dict[UUID, float] = {}
        self.keeps_instants = False
        self._publisher = publisher
        self._on_error = on_error

    @property
    def features(self) -> PublisherFeatures:
        return self._publisher.features

    @property
    def description(self) -> str:
        return self._publisher.description

    async def open(self) -> None:
        await self._publisher.open()

    async def publish(self, events: Sequence[Event]) -> Sequence[Outcome]:
        outcomes = await self._publisher.publish(events)
        if self.keeps_instants:
            self.acknowledged.update(dict.fromkeys([event.id for event in events], time.monotonic()))
        self.sizes.append(len(events))
        if outcomes.count(PUBLISHED) != len(events):
            error = next((outcome.error for outcome in outcomes if outcome.error), None)
            if error is not None:
                self._on_error(error)
        return outcomes

    async def close(self) -> None:
        await self._publisher.close()


class Nowhere:
    """A destination that takes everything at once, so that the database alone is measured."""

    features = PublisherFeatures()
    description = "memory"

    async def open(self) -> None:
        """Nothing to connect to."""

    async def publish(self, events: Sequence[Event]) -> Sequence[Outcome]:
        return [PUBLISHED] * len(events)

    async def close(self) -> None:
        """Nothing to let go of."""
