"""Our side in its own process: the real relay, with observers that measure it."""

import asyncio
import os
import signal
import sys
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.handled import Handled
from benchmarks.hooks import CONCURRENCY, SECRET, to_endpoints
from benchmarks.load import add_more
from pillarbox.bench.clocks import DrainObserver, PublishObserver
from pillarbox.observe import Observer
from pillarbox.observe.prometheus import Prometheus
from pillarbox.publisher import Publisher
from pillarbox.publishers.handlers import Handlers
from pillarbox.publishers.http import HttpPublisher
from pillarbox.publishers.kafka import KafkaPublisher
from pillarbox.publishers.nats import NatsPublisher
from pillarbox.publishers.pulsar import PulsarPublisher
from pillarbox.publishers.rabbitmq import RabbitMQPublisher
from pillarbox.publishers.redis import RedisPublisher
from pillarbox.relay import Relay, Stream
from pillarbox.store import Store
from pillarbox.urls import store_from_url


def _store(settings: dict[str, Any]) -> Store:
    return store_from_url(settings["url"], prefix=settings["prefix"])


def _kafka(settings: dict[str, Any]) -> Publisher:
    delivery = settings.get("delivery", "at-least-once")
    servers, topic = settings["servers"], settings["topic"]
    return KafkaPublisher(servers=servers, topic=topic, producers=settings["slots"], delivery=delivery)


def _rabbitmq(settings: dict[str, Any]) -> Publisher:
    return RabbitMQPublisher(settings["servers"], queue=settings["topic"], connections=settings["slots"])


def _nats(settings: dict[str, Any]) -> Publisher:
    return NatsPublisher(settings["servers"], subject=settings["topic"], connections=settings["slots"])


def _redis(settings: dict[str, Any]) -> Publisher:
    return RedisPublisher(settings["servers"], stream=settings["topic"], connections=settings["slots"])


def _pulsar(settings: dict[str, Any]) -> Publisher:
    return PulsarPublisher(servers=settings["servers"], topic=settings["topic"], producers=settings["slots"])


def _http(settings: dict[str, Any]) -> Publisher:
    url = settings["servers"] + settings["topic"]
    if "endpoints" in settings:
        return to_endpoints(url, settings["endpoints"], hangs=settings["hangs"])
    return HttpPublisher(url, secret=SECRET, concurrency=CONCURRENCY)


def _publisher(settings: dict[str, Any], handled: Handled) -> Publisher:
    match settings.get("to", "kafka"):
        case "handlers":
            return _handlers(handled)
        case "pulsar":
            return _pulsar(settings)
        case "nats":
            return _nats(settings)
        case "redis":
            return _redis(settings)
        case "http":
            return _http(settings)
        case "rabbitmq":
            return _rabbitmq(settings)
    return _kafka(settings)


def _handlers(handled: Handled) -> Publisher:
    found = Handlers()
    found.on("*")(handled.handle)
    return found


def _keep_seconds(settings: dict[str, Any]) -> float:
    return 86_400.0 if settings["keep"] else 0.0


async def _ended(service: asyncio.Task[None]) -> None:
    """End the relay like a service, with SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)
    await service


async def drain(settings: dict[str, Any]) -> dict[str, Any]:
    """Publish a backlog and report how fast. ``refills``: how often to load as many events again and drain them."""
    clock, refills = Clock(settings["events"]), settings.get("refills", 0)
    handled = Handled()
    publisher = _publisher(settings, handled)
    stream = Stream("default", to=publisher, slots=settings["slots"], batch=settings["batch"])
    observers: list[Observer] = [DrainObserver(clock)]
    if settings.get("metrics"):
        observers.append(Prometheus(registry=CollectorRegistry()))
    relay = Relay(_store(settings), [stream], observers=observers, keep_published=_keep_seconds(settings))
    service = asyncio.create_task(relay.run())
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
    """Run until told to stop. Reports when each event was acknowledged, unless ``note`` is false."""
    delivery = settings.get("delivery", "at-least-once")
    kafka = KafkaPublisher(servers=settings["servers"], topic=settings["topic"], delivery=delivery)
    observer = PublishObserver(_complain)
    observer.keeps_instants = True
    observers = [observer] if settings.get("note", True) else []
    # The harness stops this process while it loads a backlog, and the leases have to outlast that.
    stream = Stream("default", to=kafka, lease=settings.get("lease", "15s"))
    keep = _keep_seconds({"keep": True, **settings})
    relay = Relay(_store(settings), [stream], observers=observers, keep_published=keep)
    async with relay:
        await relay.drain()
        answer({"ready": True})
        await asyncio.to_thread(sys.stdin.read)
    return {"acknowledged_at": {str(event_id): at for event_id, at in observer.acknowledged.items()}}


def main() -> None:
    settings = settings_from_parent()
    answer(asyncio.run(drain(settings) if "events" in settings else serve(settings)))


if __name__ == "__main__":
    main()
