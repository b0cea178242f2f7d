"""For tests of applications: capture events, deliver them, and check that a handler applies an event once."""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pillarbox.batch import Batch
from pillarbox.drivers.contract import settled
from pillarbox.errors import ConfigError
from pillarbox.event import Event
from pillarbox.inbox.once import once_of
from pillarbox.outbox.blocks import Capture
from pillarbox.publisher import PUBLISHED, Limits, Outcome, Publisher, PublisherFeatures, Result
from pillarbox.publishers._calls import make_handler
from pillarbox.publishers.handlers import Handlers
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay.assignment import Assignment
from pillarbox.sources.memory import MemorySource, MemoryTopic
from pillarbox.stores.memory import MemoryStore

__all__ = [
    "Failed",
    "MemoryPublisher",
    "MemorySource",
    "MemoryStore",
    "MemoryTopic",
    "Sent",
    "assert_applied_once",
    "capture",
    "deliver",
]


class Failed(NamedTuple):
    """An attempt that failed."""

    event: Event
    error: str


class Sent(list[Event]):
    """The events that a relay has published in a test, in order; ``failed`` has the attempts that failed."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[Failed] = []

    def instead_of(self, job: Assignment) -> Assignment:
        """The work on a stream with these events as its destination. Handlers run, a broker is left alone."""
        inner = job.publisher if isinstance(job.stream.to, Handlers) else None
        return replace(job, publisher=_Recorder(self, inner))


class _Recorder(Publisher):
    """Notes what is published. inner: None: nothing else happens."""

    def __init__(self, sent: Sent, inner: Publisher | None) -> None:
        self._sent, self._inner = sent, inner

    @property
    def features(self) -> PublisherFeatures:
        return PublisherFeatures() if self._inner is None else self._inner.features

    @property
    def description(self) -> str:
        return "a test" if self._inner is None else self._inner.description

    async def open(self) -> None:
        if self._inner is not None:
            await self._inner.open()

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = [PUBLISHED] * len(batch)
        if self._inner is not None:
            outcomes = await self._inner.publish(batch)
        for event, outcome in zip(batch, outcomes, strict=True):
            if outcome.result is Result.PUBLISHED:
                self._sent.append(event)
            elif outcome.error:
                self._sent.failed.append(Failed(event, outcome.error))
        return outcomes

    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()


def capture(*, write: bool = True) -> Capture:
    """``with capture() as events:`` collects what any outbox of this process adds, as :meth:`Outbox.capture` does for
    one."""
    return Capture(None, write)


async def deliver(to: Handlers | Callable[[Any], Any], events: Event | Iterable[Event], *, copies: int = 1) -> None:
    """Call handlers with events, as a relay or a consumer would, without a database. Errors of a handler pass.

    to: handlers, or one function, with or without decorators. copies: how often all events come, one delivery after the
    other, as after a crash. Plain functions run in a thread.
    """
    if copies < 1:
        raise ConfigError(f"copies={copies}: give 1 or more")
    given = [events] if isinstance(events, Event) else list(events)
    for _ in range(copies):
        for event in given:
            await _call(to, event)


async def _call(to: Handlers | Callable[[Any], Any], event: Event) -> None:
    handler = to.handler_of(event) if isinstance(to, Handlers) else make_handler(to, None, Limits())
    if handler is None:
        raise ConfigError(f"no handler is registered for event type {event.type!r}; register one, or correct the type")
    while handler is not None:
        if handler.is_async:
            await handler.call(event)
        else:
            returned = await asyncio.to_thread(handler.call, event)
            if inspect.isawaitable(returned):
                await returned
        handler = handler.then


async def assert_applied_once(
    handler: Callable[[Any], Any], event: Event, *, effects: Callable[[], Any] | None = None
) -> None:
    """Assert that a handler with ``@inbox.once(...)`` applies an event once: after an attempt that fails at its end,
    and with copies, also at the same time.

    effects: a function, plain or async, that returns what the handler changes, for example the rows of a table. They
    must be as before after the failed attempt, changed after the first delivery, and not changed by copies.
    """
    once = once_of(handler)
    if once is None:
        raise ConfigError(
            "assert_applied_once was given a handler without @inbox.once(...), which applies each copy; decorate it, "
            "or test it with deliver()"
        )

    async def state() -> Any:
        return None if effects is None else await settled(effects())

    with once.watched() as watch:
        before = await state()
        watch.fails = True
        try:
            await _call(handler, event)
        except watch.Failure:
            pass
        else:
            raise AssertionError(f"{watch.name} was not called: its inbox has event {event.id} already")
        assert await state() == before, f"{watch.name} has effects outside of its transaction: a rollback leaves them"
        watch.fails = False
        watch.calls = 0
        await _call(handler, event)
        assert watch.calls == 1, f"{watch.name} was called {watch.calls} times for a new event"
        after = await state()
        assert effects is None or after != before, f"{watch.name} has no effect that effects() shows"
        await asyncio.gather(*(_call(handler, event) for _ in range(3)))
        assert watch.calls == 1, f"{watch.name} was called again for a copy"
        assert await state() == after, "copies of the event have changed the effects"
