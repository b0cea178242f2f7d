"""Our side, in a process of its own: the real relay, with a clock around the store and the publisher."""

import asyncio
import os
import signal
import sys
from typing import Any, cast

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.handled import Handled
from benchmarks.load import add_more
from pillarbox.bench.clocks import TimedStore, Witness
from pillarbox.publisher import Publisher
from pillarbox.publishers.handlers import Handlers
from pillarbox.publishers.kafka import KafkaPublisher
from pillarbox.relay import Relay, Stream
from pillarbox.store import Store
from pillarbox.urls import store_from_url


def _store(settings: dict[str, Any]) -> Store:
    return store_from_url(settings["url"], prefix=settings["prefix"])


def _kafka(settings: dict[str, Any]) -> Publisher:
    return KafkaPublisher(servers=settings["servers"], topic=settings["topic"], producers=settings["slots"])


def _handlers(handled: Handled) -> Publisher:
    found = Handlers()
    found.on("*")(handled.handle)
    return found


def _keep_seconds(settings: dict[str, Any]) -> float:
    return 86_400.0 if settings["keep"] else 0.0


async def _ended(service: asyncio.Task[None]) -> None:
    """As a service ends."""
    os.kill(os.getpid(), signal.SIGTERM)
    await service


async def drain(settings: dict[str, Any]) -> dict[str, Any]:
    """Publish a backlog; the answer is how fast. ``refills``: how often to load as much again and drain it."""
    clock, refills = Clock(settings["events"]), settings.get("refills", 0)
    store = cast(Store, TimedStore(_store(settings), clock))
    handled = Handled()
    publisher = _handlers(handled) if settings.get("to") == "handlers" else _kafka(settings)
    stream = Stream("default", to=publisher, slots=settings["slots"], batch=settings["batch"])
    service = asyncio.create_task(Relay(store, [stream], keep_published_seconds=_keep_seconds(settings)).run())
    await clock.done.wait()
    for _ in range(refills):
        clock.again()
        await add_more(settings["url"], settings["prefix"], settings["events"])
        await clock.done.wait()
    await _ended(service)
    return {**clock.report(refills + 1), **({"handled": handled.count} if handled.count else {})}


def _complain(error: str) -> None:
    print(f"not published: {error}", file=sys.stderr)


async def serve(settings: dict[str, Any]) -> dict[str, Any]:
    """Run until told to stop; the answer is when each event was acknowledged, unless ``note`` is false."""
    kafka = KafkaPublisher(servers=settings["servers"], topic=settings["topic"])
    witness = Witness(kafka, _complain)
    witness.keeps_instants = True
    relay = Relay(_store(settings), [Stream("default", to=witness if settings.get("note", True) else kafka)])
    service = asyncio.create_task(relay.run())
    await relay.drain()
    answer({"ready": True})
    await asyncio.to_thread(sys.stdin.read)
    await _ended(service)
    return {"acknowledged_at": {str(event_id): at for event_id, at in witness.acknowledged.items()}}


def main() -> None:
    settings = settings_from_parent()
    answer(asyncio.run(drain(settings) if "events" in settings else serve(settings)))


if __name__ == "__main__":
    main()
