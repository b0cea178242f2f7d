"""The measurements: writing, draining a backlog, and how soon an event is at its destination."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from pillarbox.bench.clocks import Clock, Nowhere, TimedStore, Witness
from pillarbox.bench.figures import Figures, Scale
from pillarbox.bench.own_outbox import BenchFailed, Make, own_outbox
from pillarbox.errors import DestinationDown
from pillarbox.event import Event, Mode
from pillarbox.outbox import Outbox
from pillarbox.publisher import Publisher
from pillarbox.relay import Relay, Stream
from pillarbox.relay.supervisor import publisher_of, seldom_collecting
from pillarbox.relay.worker import close
from pillarbox.store import Store

TYPE: Final = "pillarbox.bench"
_KEYS: Final = 1000
_PATIENCE_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.2
_CLOSE_SECONDS: Final = 10.0
_GRACE_SECONDS: Final = 2.0
_WARM_SECONDS: Final = 0.5
# Of the floor, which is handed over in parts that fit into memory.
_PART_BYTES: Final = 32_000_000
_EVENT_BYTES: Final = 1000  # about, of an event without its payload

OnProgress = Callable[[str, int], None]


def no_progress(doing: str, done: int) -> None:
    """Nobody looks."""


async def measure(
    make: Make,
    stream: Stream,
    scale: Scale,
    *,
    keep_published_seconds: float = 86_400.0,
    on_progress: OnProgress = no_progress,
) -> tuple[Figures, dict[str, str]]:
    """The figures, and what they were measured on. The events arrive at the destination of the stream.

    make: a store on the outbox of a prefix. stream: to ``Nowhere()``, which has no floor, measures the database alone.
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
        bench = _Bench(writer, store, replace(stream, to=publisher), scale, events, keep_published_seconds)
        return await bench.run(on_progress), about


class Events:
    """Makes events of one size; what is in them no destination can compress."""

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
    except DestinationDown as error:
        raise BenchFailed(str(error).removesuffix("; the relay tries again")) from error


async def _probe(publisher: Publisher, events: Events) -> None:
    """One event, before anything is made: most that can be wrong with a destination is wrong from the start."""
    await _open(publisher)
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            (outcome,) = await publisher.publish(events(1))
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
    """One run on an outbox that is there."""

    def __init__(
        self, writer: Store, store: Store, stream: Stream, scale: Scale, events: Events, keep_seconds: float
    ) -> None:
        self._writer = writer
        self._store = store
        self._scale = scale
        self._events = events
        self._keep_seconds = keep_seconds
        self._publisher = cast(Publisher, stream.to)
        self._has_floor = not isinstance(self._publisher, Nowhere)
        self._witness = Witness(self._publisher, self._refused)
        self._stream = replace(stream, to=self._witness)
        calls = self._publisher.features.calls
        # The most that the relay calls at once.
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
            with seldom_collecting():
                await self._over.wait()
        finally:
            self._over.set()
            watching.cancel()
            if not measuring.done():
                # Once only: it is then busy with stopping its relay.
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
        # A driver can lose the cancellation that it was given.
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
        """Events per second. Making them belongs to it, as it does in an application."""
        self._begin(doing)
        begun = time.monotonic()
        for start in range(0, events, batch):
            some = self._events(min(batch, events - start))
            await self._writer.add(some)
            self._count(len(some))
        return events / (time.monotonic() - begun)

    def _relay(self, store: Any) -> Relay:
        return Relay(
            cast(Store, store),
            [self._stream],
            name="bench",
            keep_published_seconds=self._keep_seconds,
            grace_seconds=_GRACE_SECONDS,
        )

    async def _drain(self) -> None:
        events, clock = self._scale.events, Clock(self._scale.events)
        self._begin("draining", lambda: clock.settled)
        self._witness.sizes.clear()
        async with self._relay(TimedStore(self._store, clock)):
            await clock.done.wait()
        self._figures.drain.append(events / clock.seconds)
        self._figures.cpu_us_per_event.append(1e6 * clock.cpu_seconds / events)
        if self._has_floor:
            self._figures.drain_floor.append(await self._hand_over(list(self._witness.sizes)))

    async def _hand_over(self, sizes: Sequence[int]) -> float:
        """Events per second, straight to the destination: the relay's batches, as many at once as it serves."""
        self._begin("handing over without a database")
        seconds = 0.0
        await _open(self._witness)
        try:
            for part in self._parts(sizes):
                batches = iter([self._events(size) for size in part])
                begun = time.monotonic()
                await asyncio.gather(*(self._hand(batches) for _ in range(self._calls)))
                seconds += time.monotonic() - begun
        finally:
            await close(self._witness, _CLOSE_SECONDS)
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
            await self._witness.publish(batch)
            self._count(len(batch))

    async def _latency(self) -> None:
        witness, figures = self._witness, self._figures
        witness.keeps_instants = True
        self._begin("writing at an even pace")
        async with self._relay(self._store) as relay:
            await relay.drain()
            await self._pace(min(_WARM_SECONDS, self._scale.seconds), self._write_one)
            begun = time.monotonic()
            written = await self._pace(self._scale.seconds, self._write_one)
            figures.rate.append(len(written) / max(time.monotonic() - begun, self._scale.seconds))
            self._begin("waiting for the last", lambda: len(witness.acknowledged))
            await relay.drain()
        figures.write_seconds += [committed - begun for _, begun, committed in written]
        # The relay can be done before its writer, in the same process, has its turn to look at the clock.
        figures.acknowledge_seconds += [
            max(0.0, witness.acknowledged[event.id] - committed) for event, _, committed in written
        ]
        witness.keeps_instants = False
        witness.acknowledged.clear()
        if self._has_floor:
            await self._latency_floor()

    async def _latency_floor(self) -> None:
        self._begin("handing over one by one")
        await _open(self._witness)
        try:
            await self._pace(min(_WARM_SECONDS, self._scale.seconds), self._hand_one)
            handed = await self._pace(self._scale.seconds, self._hand_one)
        finally:
            await close(self._witness, _CLOSE_SECONDS)
        self._figures.floor_seconds += [ended - begun for _, begun, ended in handed]

    async def _pace(self, seconds: float, send: Callable[[Event], Any]) -> list[tuple[Event, float, float]]:
        """Each event with the instants before and after it was sent; those that are late follow at once, and those that
        are not sent when the time is over are left out."""
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
        await self._witness.publish([event])
