"""Our side, in a process of its own: the real relay, with a clock around the store and the publisher."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any, cast

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.handled import Handled
from benchmarks.load import add_more
from pillarbox.event import Event
from pillarbox.publisher import Outcome, Publisher, PublisherFeatures
from pillarbox.publishers.handlers import Handlers
from pillarbox.publishers.kafka import KafkaPublisher
from pillarbox.relay import Relay, Stream
from pillarbox.store import Grant, Settlement, Store
from pillarbox.urls import store_from_url


class TimedStore:
    """A store that tells the clock of its reads and settles."""

    def __init__(self, store: Store, clock: Clock) -> None:
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


class NotingPublisher:
    """A publisher that notes when each event was acknowledged."""

    def __init__(self, publisher: KafkaPublisher) -> None:
        self._publisher = publisher
        self.acknowledged_at: dict[str, float] = {}

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
        now = time.monotonic()
        for event in events:
            self.acknowledged_at[str(event.id)] = now
        return outcomes

    async def close(self) -> None:
        await self._publisher.close()


def _store(settings: dict[str, Any]) -> Store:
    return store_from_url(settings["url"], prefix=settings["prefix"])


def _kafka(settings: dict[str, Any]) -> Publisher:
    return KafkaPublisher(servers=settings["servers"], topic=settings["topic"], slots=settings["slots"])


def _handlers(handled: Handled) -> Publisher:
    found = Handlers()
    found.on("*")(handled.handle)
    return found


def _keep_seconds(settings: dict[str, Any]) -> float:
    return 86_400.0 if settings["keep"] else 0.0


async def drain(settings: dict[str, Any]) -> dict[str, Any]:
    """Publish a backlog; the answer is how fast. ``refills``: how often to load as much again and drain it."""
    clock, refills = Clock(settings["events"]), settings.get("refills", 0)
    store = cast(Store, TimedStore(_store(settings), clock))
    handled = Handled()
    publisher = _handlers(handled) if settings.get("to") == "handlers" else _kafka(settings)
    stream = Stream("default", to=publisher, slots=settings["slots"], batch=settings["batch"])
    # As a service, which ends with SIGTERM.
    service = asyncio.create_task(Relay(store, [stream], keep_published_seconds=_keep_seconds(settings)).run())
    await clock.done.wait()
    for _ in range(refills):
        clock.again()
        await add_more(settings["url"], settings["prefix"], settings["events"])
        await clock.done.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await service
    return {**clock.report(refills + 1), **({"handled": handled.count} if handled.count else {})}


async def serve(settings: dict[str, Any]) -> dict[str, Any]:
    """Run until told to stop; the answer is when each event was acknowledged, unless ``note`` is false."""
    kafka = KafkaPublisher(servers=settings["servers"], topic=settings["topic"])
    noting = NotingPublisher(kafka)
    relay = Relay(_store(settings), [Stream("default", to=noting if settings.get("note", True) else kafka)])
    async with relay:
        await relay.drain()
        answer({"ready": True})
        await asyncio.to_thread(sys.stdin.read)
    return {"acknowledged_at": noting.acknowledged_at}


def main() -> None:
    settings = settings_from_parent()
    answer(asyncio.run(drain(settings) if "events" in settings else serve(settings)))


if __name__ == "__main__":
    main()
