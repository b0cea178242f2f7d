"""The measurements: writing, draining a backlog, and latency to the destination."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from pillarbox.batch import Batch
from pillarbox.bench.clocks import Clock, DrainObserver, Nowhere, PublishObserver
from pillarbox.bench.figures import Figures, Scale
from pillarbox.bench.own_outbox import BenchFailed, Make, own_outbox
from pillarbox.durations import Duration
from pillarbox.errors import Outage
from pillarbox.event import Event, Mode
from pillarbox.observe import Observer, Observers, observed_publisher
from pillarbox.outbox import Outbox
from pillarbox.publisher import Publisher
from pillarbox.relay import Relay, Stream
from pillarbox.relay.destination import close, publisher_of
from pillarbox.relay.process import relaxed_gc
from pillarbox.store import Store

TYPE: Final = "pillarbox.bench"
_KEYS: Final = 1000
_PATIENCE_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.2
_CLOSE_SECONDS: Final = 10.0
_GRACE_SECONDS: Final = 2.0
_WARM_SECONDS: Final = 0.5
# The floor is measured in parts that fit into memory.
_PART_BYTES: Final = 32_000_000
_EVENT_BYTES: Final = 1000  # approximate size of an event without its payload

OnProgress = Callable[[str, int], None]


def no_progress(doing: str, done: int) -> None:
    """Show nothing."""


async def measure(
    make: Make,
    stream: Stream,
    scale: Scale,
    *,
    keep_published: Duration = "24h",
    on_progress: OnProgress = no_progress,
) -> tuple[Figures, dict[str, str]]:
    """The figures, and a description of the store, its server and the destination. The events reach the destination.

    make: a store on the outbox of a prefix. stream: with ``Nowhere()`` as destination only the database is measured.
    """
    publisher = publisher_of(stream)
    events = Events(stream.name, scale.bytes)
    await _probe(publisher, events)
    async with own_outbox(make) as (writer, store):
        about = {
            "store": store.description,
            "server": await store.server_version(),
            "destination": publisher.description,
        }
        bench = _Bench(writer, store, replace(stream, to=publisher), scale, events, keep_published)
        return await bench.run(on_progress), about


class Events:
    """Makes events of one size. Their content cannot be compressed."""

    def __init__(self, stream: str, size: int) -> None:
        self._outbox = Outbox(payload_limit=max(size, 1))
        self._stream = stream
        self._numbers = itertools.count()
        self._length = max(0, size - len('{"bench": ""}'))
        self._text = secrets.token_hex(self._length + 1)

    def __call__(self, count: int) -> list[Event]:
        made = []
        for number in itertools.islice(self._numbers, count):
            start = number % (self._length + 1)
            payload = f'{{"bench": "{self._text[start : start + self._length]}"}}'
            key = f"bench-{number % _KEYS}"
            made.append(
                self._outbox.event(TYPE, payload, key=key, stream=self._stream, content_type="application/json")
            )
        return made


async def _open(publisher: Publisher) -> None:
    try:
        await publisher.open()
    except Outage as error:
        raise BenchFailed(str(error).removesuffix("; the relay tries again")) from error


async def _probe(publisher: Publisher, events: Events) -> None:
    """Publish one event before anything is made: most errors of a destination show at once."""
    await _open(publisher)
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            (outcome,) = await publisher.publish(Batch.of(events(1)))
    except TimeoutError:
        raise BenchFailed(
            f"{publisher.description} did not acknowledge an event in {_PATIENCE_SECONDS:.0f} s; see whether it is well"
        ) from None
    finally:
        await close(publisher, _CLOSE_SECONDS)
    if outcome.error is not None:
        raise _refused(publisher, outcome.error)


def _refused(publisher: Publisher, error: str) -> BenchFailed:
    return BenchFailed(f"{publisher.description} did not take an event of the bench: {error}")


class _Bench:
    """One bench on an existing outbox."""

    def __init__(
        self, writer: Store, store: Store, stream: Stream, scale: Scale, events: Events, keep_published: Duration
    ) -> None:
        self._writer = writer
        self._store = store
        self._scale = scale
        self._events = events
        self._keep_published = keep_published
        self._publisher = cast(Publisher, stream.to)
        self._has_floor = not isinstance(self._publisher, Nowhere)
        self._observer = PublishObserver(self._refused)
        self._direct = observed_publisher(
            self._publisher, Observers([self._observer])
        )  # for the floors, without a relay
        self._stream = stream
        calls = self._publisher.features.calls
        # The most calls that the relay makes at once.
        self._calls = stream.concurrency if stream.mode is Mode.QUEUE else min(stream.slots or calls, calls)
        self._figures = Figures(scale)
        self._round = ""
        self._doing = "starting"
        self._done = 0
        self._so_far: Callable[[], int] = lambda: self._done
        self._over = asyncio.Event()
        self._error: BenchFailed | None = None

    async def run(self, on_progress: OnProgress) -> Figures:
        measuring = asyncio.create_task(self._rounds(), name="pillarbox-bench")
        measuring.add_done_callback(lambda _: self._over.set())
        watching = asyncio.create_task(self._watch(on_progress), name="pillarbox-bench-watch")
        try:
            with relaxed_gc():
                await self._over.wait()
        finally:
            self._over.set()
            watching.cancel()
            if not measuring.done():
                # Cancel it only once: it is then stopping its relay.
                measuring.cancel()
                await asyncio.wait([measuring])
            came_of_it = None if measuring.cancelled() else measuring.exception()
        if self._error is not None:
            raise self._error from came_of_it
        return measuring.result()

    def _fail(self, error: BenchFailed) -> None:
        self._error = self._error or error
        self._over.set()

    def _refused(self, error: str) -> None:
        self._fail(_refused(self._publisher, error))

    async def _watch(self, on_progress: OnProgress) -> None:
        seen, since = ("", 0), time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            sight = self._doing, self._so_far()
            on_progress(*sight)
            if sight != seen:
                seen, since = sight, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_SECONDS:
                where = f"{self._store.description} and {self._publisher.description}"
                still = f"{self._doing}: nothing moved for {_PATIENCE_SECONDS:.0f} s"
                self._fail(BenchFailed(f"{still}; see whether {where} are well"))

    def _begin(self, doing: str, so_far: Callable[[], int] | None = None) -> None:
        self._doing = f"{self._round}{doing}"
        self._done = 0
        self._so_far = so_far or (lambda: self._done)

    def _count(self, events: int) -> None:
        # A driver can swallow a cancellation.
        if self._over.is_set():
            raise asyncio.CancelledError
        self._done += events

    async def _rounds(self) -> Figures:
        scale, figures = self._scale, self._figures
        for number in range(1, scale.rounds + 1):
            self._round = f"round {number} of {scale.rounds}, "
            singles, batch = scale.single_writes, scale.write_batch
            figures.write_single.append(await self._write("writing one by one", singles, 1))
            figures.write_batch.append(await self._write("writing in batches", scale.events - singles, batch))
            await self._drain()
            await self._latency()
        return figures

    async def _write(self, doing: str, events: int, batch: int) -> float:
        """Events per second, including the time to make them, as in an application."""
        self._begin(doing)
        begun = time.monotonic()
        for start in range(0, events, batch):
            some = self._events(min(batch, events - start))
            await self._writer.add(some)
            self._count(len(some))
        return events / (time.monotonic() - begun)

    def _relay(self, *observers: Observer) -> Relay:
        return Relay(
            self._store,
            [self._stream],
            observers=[self._observer, *observers],
            name="bench",
            keep_published=self._keep_published,
            grace=_GRACE_SECONDS,
        )

    async def _drain(self) -> None:
        events, clock = self._scale.events, Clock(self._scale.events)
        self._begin("draining", lambda: clock.settled)
        self._observer.sizes.clear()
        async with self._relay(DrainObserver(clock)):
            await clock.done.wait()
        self._figures.drain.append(events / clock.seconds)
        self._figures.cpu_us_per_event.append(1e6 * clock.cpu_seconds / events)
        if self._has_floor:
            self._figures.drain_floor.append(await self._hand_over(list(self._observer.sizes)))

    async def _hand_over(self, sizes: Sequence[int]) -> float:
        """Events per second straight to the destination, in the relay's batches and with as many calls at once."""
        self._begin("handing over without a database")
        seconds = 0.0
        await _open(self._direct)
        try:
            for part in self._parts(sizes):
                batches = iter([self._events(size) for size in part])
                begun = time.monotonic()
                await asyncio.gather(*(self._hand(batches) for _ in range(self._calls)))
                seconds += time.monotonic() - begun
        finally:
            await close(self._direct, _CLOSE_SECONDS)
        return sum(sizes) / seconds

    def _parts(self, sizes: Sequence[int]) -> Iterator[Sequence[int]]:
        limit = _PART_BYTES // (_EVENT_BYTES + self._scale.bytes)
        part: list[int] = []
        for size in sizes:
            if part and sum(part) + size > limit:
                yield part
                part = []
            part.append(size)
        yield part

    async def _hand(self, batches: Iterator[Sequence[Event]]) -> None:
        for batch in batches:
            await self._direct.publish(Batch.of(batch))
            self._count(len(batch))

    async def _latency(self) -> None:
        observer, figures = self._observer, self._figures
        observer.keeps_instants = True
        self._begin("writing at an even pace")
        async with self._relay() as relay:
            await relay.drain()
            await self._pace(min(_WARM_SECONDS, self._scale.seconds), self._write_one)
            begun = time.monotonic()
            written = await self._pace(self._scale.seconds, self._write_one)
            figures.rate.append(len(written) / max(time.monotonic() - begun, self._scale.seconds))
            self._begin("waiting for the last", lambda: len(observer.acknowledged))
            await relay.drain()
        figures.write_seconds += [committed - begun for _, begun, committed in written]
        # In one process the relay can be done before the writer looks at the clock.
        figures.acknowledge_seconds += [
            max(0.0, observer.acknowledged[event.id] - committed) for event, _, committed in written
        ]
        observer.keeps_instants = False
        observer.acknowledged.clear()
        if self._has_floor:
            await self._latency_floor()

    async def _latency_floor(self) -> None:
        self._begin("handing over one by one")
        await _open(self._direct)
        try:
            await self._pace(min(_WARM_SECONDS, self._scale.seconds), self._hand_one)
            handed = await self._pace(self._scale.seconds, self._hand_one)
        finally:
            await close(self._direct, _CLOSE_SECONDS)
        self._figures.floor_seconds += [ended - begun for _, begun, ended in handed]

    async def _pace(self, seconds: float, send: Callable[[Event], Any]) -> list[tuple[Event, float, float]]:
        """Each event with the instants before and after it was sent. Late events follow at once; when the time is over,
        the rest is left out."""
        sent: list[tuple[Event, float, float]] = []
        start = time.monotonic()
        for number in range(max(1, round(self._scale.rate * seconds))):
            if sent and time.monotonic() - start > seconds:
                break
            (event,) = self._events(1)
            await asyncio.sleep(max(0.0, start + number / self._scale.rate - time.monotonic()))
            begun = time.monotonic()
            await send(event)
            sent.append((event, begun, time.monotonic()))
            self._count(1)
        return sent

    async def _write_one(self, event: Event) -> None:
        await self._writer.add([event])

    async def _hand_one(self, event: Event) -> None:
        await self._direct.publish(Batch.of([event]))
