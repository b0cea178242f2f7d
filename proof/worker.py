"""One relay of a run, in a process of its own: the real one, with a trace around its store and its destination.

It is told what to serve by JSON, and by lines on standard input at which point to kill itself. The points are here and
not in the library, where nothing can switch them on.
"""

import asyncio
import faulthandler
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from uuid import UUID

from pillarbox import Event, Handlers, Reject
from pillarbox.errors import LeaseLost
from pillarbox.publisher import Outcome, Publisher, outage
from pillarbox.relay import Fixed, Relay, Stream
from pillarbox.store import Claim, Grant, KeyRun, Page, Settlement, Store
from pillarbox.urls import store_from_url
from proof.content import QUEUE, STREAM, fingerprint
from proof.history import Delivery, Log, Trace
from proof.planted import plant

POINTS: Final = (
    *("reading", "read", "before_send", "sent", "confirmed", "settling", "settled"),
    *("renewing", "taking", "pruning"),
)
_SOON_SECONDS: Final = 0.02


@dataclass(slots=True)
class Orders:
    """What a worker is told."""

    name: str
    folder: str
    store: str
    broker: dict[str, Any]
    lease_seconds: float = 4.0
    max_attempts: int = 3
    on_dead: str = "skip"
    slots: int = 4
    batch: int = 500
    prune_seconds: float = 5.0
    keep_seconds: float = 20.0
    planted: str | None = None


class Points:
    """Where this process sends itself a signal, once it is told to by a line such as ``SIGKILL confirmed``."""

    def __init__(self) -> None:
        self._armed: tuple[str, str] | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            number, _, point = line.strip().partition(" ")
            self._armed = (point, number) if point else None
        os.kill(os.getpid(), signal.SIGKILL)  # the harness is gone

    def at(self, point: str, after_seconds: float = 0.0) -> None:
        armed = self._armed
        if armed is None or armed[0] != point:
            return
        self._armed = None  # a process that stopped goes on, and must not stop again
        number = signal.Signals[armed[1]]
        if after_seconds:
            threading.Timer(after_seconds, os.kill, (os.getpid(), number)).start()
        else:
            os.kill(os.getpid(), number)

    def around(self, point: str) -> None:
        """Somewhere in the call that begins now."""
        self.at(point, random.uniform(0.001, _SOON_SECONDS))


class Held(NamedTuple):
    """By what right a worker has an event: the lease of its shard, or in a queue its own."""

    stream: str
    shard: int | None
    token: int


class TracedStore:
    """A store that writes down who read, settled, took and lost what."""

    def __init__(self, store: Store, log: Log, worker: str, points: Points) -> None:
        self._store = store
        self._log = log
        self._worker = worker
        self._points = points
        self._claims = count(1)
        self.held: dict[str, Held] = {}  # by event, of those that are under way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _note(self, kind: str, held: Grant | Held, ids: Sequence[str] = ()) -> None:
        self._log.write(Trace(time.monotonic(), self._worker, kind, held.stream, held.shard, held.token, ids))

    def note_each(self, kind: str, ids: Sequence[str], outcomes: Sequence[str] = ()) -> None:
        """One line for all events that are held by the same right."""
        now = time.monotonic()
        together: dict[Held, list[int]] = {}
        for place, event_id in enumerate(ids):
            together.setdefault(self.held[event_id], []).append(place)
        for held, places in together.items():
            told = [outcomes[place] for place in places] if outcomes else ()
            self._log.write(Trace(now, self._worker, kind, *held, [ids[place] for place in places], told))

    async def take(self, stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        self._points.around("taking")
        grants = await self._store.take(stream, worker, limit, seconds)
        for grant in grants:
            self._note("take", grant)
        return grants

    async def give(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            self._note("give", grant)
        await self._store.give(grants)

    async def renew(self, grants: Sequence[Grant], seconds: float) -> Collection[Grant]:
        self._points.around("renewing")
        held = await self._store.renew(grants, seconds)
        for grant in grants:
            self._note("renew" if grant in held else "lost", grant)
        return held

    async def read(self, grant: Grant, limit: int, max_bytes: int) -> Sequence[Event]:
        self._points.at("reading")
        self._note("read_begin", grant)
        events = await self._store.read(grant, limit, max_bytes)
        if events:
            self._read(grant, events)
            self._points.at("read")
        return events

    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        self._note("read_begin", grant)
        run = await self._store.read_due(grant, limit, max_bytes)
        if run is not None and run.events:
            self._read(grant, run.events)
        return run

    def _read(self, grant: Grant, events: Sequence[Event]) -> None:
        ids = _ids(events)
        for event_id in ids:
            self.held[event_id] = Held(grant.stream, grant.shard, grant.token)
        self._note("read", grant, ids)

    async def settle(self, grant: Grant, settlement: Settlement) -> Collection[str]:
        failures = [failure.event for failure in (*settlement.failed, *settlement.dead)]
        ids = _ids([*settlement.published, *failures, *settlement.held])
        self._note("settle", grant, ids)
        self._points.around("settling")
        try:
            aside = await self._store.settle(grant, settlement)
        except LeaseLost:
            self._note("refused", grant, ids)
            raise
        self._note("settled", grant, ids)
        self._points.at("settled")
        self._drop(ids)
        return aside

    def _drop(self, ids: Sequence[str]) -> None:
        for event_id in ids:
            self.held.pop(event_id, None)

    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        self._points.at("reading")
        # Several can be under way at once: each is a reading of its own.
        reading = Held(stream, -next(self._claims), 0)
        self._note("read_begin", reading)
        claims = await self._store.claim(stream, shard, worker, limit, seconds)
        for claim in claims:
            self.held[str(claim.event.id)] = Held(stream, None, claim.token)
        if claims:
            self._note("read", reading, _ids([claim.event for claim in claims]))
            self._points.at("read")
        return claims

    async def renew_claims(self, claims: Sequence[Claim], seconds: float) -> Collection[UUID]:
        self._points.around("renewing")
        held = await self._store.renew_claims(claims, seconds)
        for claim in claims:
            if claim.event.id not in held:
                self._note("lost", Held(claim.event.stream, None, claim.token), [str(claim.event.id)])
        return held

    async def settle_claims(self, claims: Sequence[Claim], settlement: Settlement, refund: Sequence[UUID] = ()) -> int:
        back = set(refund)
        ids = _ids([claim.event for claim in claims if claim.event.id not in back])
        # Once more, because an event that was lost and claimed again has another token by now.
        self.held.update((str(each.event.id), Held(each.event.stream, None, each.token)) for each in claims)
        self.note_each("settle", ids)
        self._points.around("settling")
        refused = await self._store.settle_claims(claims, settlement, refund)
        # Which of them, nobody is told.
        self.note_each("refused" if refused else "settled", ids)
        self._points.at("settled")
        self._drop(_ids([claim.event for claim in claims]))
        return refused

    async def prune_published(self, keep_seconds: float, limit: int, after: Any = None) -> Page:
        self._points.around("pruning")
        return await self._store.prune_published(keep_seconds, limit, after)


class TracedPublisher:
    """A publisher that writes down what it was given and what became of it."""

    def __init__(self, publisher: Publisher, store: TracedStore, points: Points) -> None:
        self._publisher = publisher
        self._store = store
        self._points = points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)

    async def publish(self, events: Sequence[Event]) -> Sequence[Outcome]:
        ids = _ids(events)
        self._points.at("before_send")
        self._store.note_each("publish", ids)
        self._points.around("sent")
        outcomes = await self._publisher.publish(events)
        results = [str(outcome.result) for outcome in outcomes]
        self._store.note_each("published", ids, results)
        self._points.at("confirmed")
        return outcomes


def _ids(events: Sequence[Event]) -> list[str]:
    return [str(event.id) for event in events]


class Door:
    """Handlers behind something that can be shut: while the file is there, their destination is away."""

    def __init__(self, handlers: Handlers, shut: Path) -> None:
        self._handlers = handlers
        self._shut = shut
        self.features = handlers.features
        self.description = handlers.description
        self.open = handlers.open
        self.close = handlers.close

    async def publish(self, events: Sequence[Event]) -> Sequence[Outcome]:
        if self._shut.exists():
            return [outage("the door is shut")] * len(events)
        return await self._handlers.publish(events)


def ledger(path: Path, seed: int) -> Handlers:
    """Handlers that write each event into one file, and fail as the event says."""
    log = Log(path)
    chance = random.Random(seed)
    handlers = Handlers()

    @handlers.on("proof.event")
    async def handle(event: Event) -> None:
        fate = event.headers.get("fate", "deliver")
        if fate == "reject":
            raise Reject("this one is never taken")
        if fate == "flaky" and event.attempts == 0:
            raise RuntimeError("not this time")
        await asyncio.sleep(chance.uniform(0.0, 0.002))
        sha256 = fingerprint(event.key, event.payload, event.headers["proof"])
        log.write(Delivery(str(event.id), event.key, sha256, [], time.monotonic()))

    return handlers


def _publisher(orders: Orders) -> Any:
    if orders.broker["kind"] == "handlers":
        handlers = ledger(Path(orders.broker["ledger"]), orders.broker["seed"])
        return Door(handlers.limited_to(orders.slots), Path(orders.broker["shut"]))
    from pillarbox.publishers.kafka import KafkaPublisher  # a relay without Kafka starts sooner

    return KafkaPublisher(
        servers=orders.broker["servers"],
        topic=orders.broker["topic"],
        strict_keys=orders.on_dead != "skip",
    )


def main() -> None:
    orders = Orders(**json.loads(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    log = Log(Path(orders.folder) / f"trace-{orders.name}.jsonl")
    points = Points()
    store = store_from_url(orders.store)
    traced = TracedStore(store, log, orders.name, points)

    publishers = [_publisher(orders), _publisher(orders)]
    plant(orders.planted, store, publishers[0])
    to, queue_to = (cast(Publisher, TracedPublisher(each, traced, points)) for each in publishers)
    limits: dict[str, Any] = {
        "retry": Fixed(0.3),
        "max_attempts": orders.max_attempts,
        "lease_seconds": orders.lease_seconds,
        "poll_limit_seconds": 0.5,
    }
    streams = [
        Stream(STREAM, to, slots=orders.slots, batch=orders.batch, on_dead=orders.on_dead, **limits),
        Stream(QUEUE, queue_to, mode="queue", **limits),
    ]
    relay = Relay(
        cast(Store, traced),
        streams,
        prune_seconds=orders.prune_seconds,
        keep_published_seconds=orders.keep_seconds,
        grace_seconds=10.0,
    )
    relay.name = orders.name  # unique to this start: the traces and the leases say the same
    log.write(Trace(time.monotonic(), orders.name, "start"))
    asyncio.run(_run(relay))
    log.write(Trace(time.monotonic(), orders.name, "stop"))


async def _run(relay: Relay) -> None:
    """With SIGUSR1 and SIGUSR2 it says where it stands: which is asked of those that do not end."""
    loop = asyncio.get_running_loop()
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def tasks(*_: Any) -> None:
        for task in asyncio.all_tasks(loop):
            task.print_stack(file=sys.stderr)

    signal.signal(signal.SIGUSR2, tasks)
    await relay.run()


def as_argument(orders: Orders) -> str:
    return json.dumps(asdict(orders))


if __name__ == "__main__":
    main()
