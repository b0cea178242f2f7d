"""A destination in memory, for tests: it keeps deliveries, and fails on request."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pillarbox.batch import Batch
from pillarbox.durations import Duration, seconds_of
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Publisher, PublisherFeatures, Result, outage
from pillarbox.tasks import PerLoop


@dataclass(slots=True)
class _Failure:
    outcome: Outcome
    key: str | None
    type: str | None
    times: int

    def matches(self, event: Event) -> bool:
        return self.key in (None, event.key) and self.type in (None, event.type)


class MemoryPublisher(Publisher):
    """Collects events in ``deliveries``, in the order of publication; they stay after ``close``."""

    def __init__(self, *, features: PublisherFeatures | None = None) -> None:
        self.deliveries: list[Event] = []
        self._features = features or PublisherFeatures()
        self._failures: list[_Failure] = []
        self._down: str | None = None
        self._session: object | None = None
        self._free = asyncio.Event()
        self._free.set()
        self._held_back = False
        self._waiting = 0
        self._changed = PerLoop(asyncio.Condition)

    @property
    def features(self) -> PublisherFeatures:
        return self._features

    @property
    def description(self) -> str:
        return "memory"

    def fail_next(self, outcome: Outcome, *, key: str | None = None, type: str | None = None, times: int = 1) -> None:
        """Give the next ``times`` events this outcome; with a key or a type, the next ones that have it."""
        if outcome.result is Result.PUBLISHED:
            raise ValueError("fail_next() takes a failure: retry(...), rejected(...), outage(...) or UNTRIED")
        if times < 1:
            raise ValueError(f"times={times}: give 1 or more")
        self._failures.append(_Failure(outcome, key, type, times))

    def down(self, error: str = "down() was called on the memory publisher") -> None:
        """Answer every event with an outage until ``up``."""
        self._down = error

    def up(self) -> None:
        self._down = None

    def hold(self) -> None:
        """Make calls of ``publish`` wait at their start until ``release``."""
        self._held_back = True
        self._free.clear()

    def release(self) -> None:
        self._held_back = False
        self._free.set()

    async def wait_for(self, count: int, *, timeout: Duration = "10s") -> list[Event]:
        """All deliveries, once there are at least ``count``; TimeoutError after ``timeout``."""
        seconds = seconds_of("timeout", timeout)
        try:
            async with asyncio.timeout(seconds), self._changed():
                await self._changed().wait_for(lambda: len(self.deliveries) >= count)
        except TimeoutError:
            raise TimeoutError(f"{len(self.deliveries)} of {count} deliveries after {seconds:g} s") from None
        return list(self.deliveries)

    async def wait_until_held(self, calls: int = 1, *, timeout: Duration = "10s") -> None:
        """Return when at least ``calls`` calls of ``publish`` wait for ``release``."""
        seconds = seconds_of("timeout", timeout)
        try:
            async with asyncio.timeout(seconds), self._changed():
                await self._changed().wait_for(lambda: self._waiting >= calls)
        except TimeoutError:
            raise TimeoutError(f"{self._waiting} of {calls} calls wait after {seconds:g} s") from None

    async def open(self) -> None:
        if self._session is None:
            self._session = object()
            self._free = asyncio.Event()  # a new one, because this may be another event loop
        if not self._held_back:
            self._free.set()

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        session = self._session
        if session is None:
            return [outage("the memory publisher is not open; call open() first")] * len(batch)
        if not self._free.is_set():
            await self._wait_for_release()
            if self._session is not session:
                return [UNTRIED] * len(batch)
        outcomes: list[Outcome] = []
        failed_keys: set[str] = set()
        for event in batch:
            outcome = UNTRIED if event.key in failed_keys else self._deliver(event)
            if outcome.result is not Result.PUBLISHED and event.key is not None:
                failed_keys.add(event.key)
            outcomes.append(outcome)
        async with self._changed():
            self._changed().notify_all()
        return outcomes

    async def close(self) -> None:
        self._session = None
        self._free.set()

    async def _wait_for_release(self) -> None:
        self._waiting += 1
        try:
            async with self._changed():
                self._changed().notify_all()
            await self._free.wait()
        finally:
            self._waiting -= 1

    def _deliver(self, event: Event) -> Outcome:
        if self._down is not None:
            return outage(self._down)
        for failure in self._failures:
            if failure.matches(event):
                failure.times -= 1
                if not failure.times:
                    self._failures.remove(failure)
                return failure.outcome
        self.deliveries.append(event)
        return PUBLISHED
