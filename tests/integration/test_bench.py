"""The bench on every database, and failures in the middle of it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pillarbox.batch import Batch
from pillarbox.bench import BenchFailed, Nowhere, Scale, clean, measure, measuring, remains
from pillarbox.errors import StoreDown
from pillarbox.event import Event, Mode
from pillarbox.publisher import Outcome, outage, rejected
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Stream
from pillarbox.store import Store
from tests.integration.relays import Outbox, SqlOutbox, until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]
SMALL = Scale(events=200, rounds=1, seconds=0.3)
NOWHERE = Stream("orders", Nowhere())


class After(MemoryPublisher):
    """A destination that does something else after so many events."""

    def __init__(self, events: int, then: Callable[[Sequence[Event]], Any]) -> None:
        super().__init__()
        self._events = events
        self._then = then

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        if len(self.deliveries) < self._events:
            return await super().publish(batch)
        outcomes: Sequence[Outcome] = await self._then(batch)
        return outcomes


def maker(outbox: Outbox) -> Callable[[str], Store]:
    return lambda prefix: outbox(prefix=prefix)


async def migrated(outbox: Outbox) -> Callable[[str], Store]:
    """Makes the user's own outbox; the bench must leave it alone."""
    store = outbox()
    await store.migrate()
    await store.close()
    return maker(outbox)


@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_every_database_is_measured_and_left_as_it_was(outbox: Outbox, mode: str) -> None:
    make = await migrated(outbox)
    to = MemoryPublisher()
    figures, about = await measure(make, Stream("orders", to, mode=Mode(mode)), SMALL)
    found = figures.as_dict()
    assert found["drain"]["ratio"]["rounds"]
    assert found["latency"]["commit_to_acknowledgement_ms"].keys() == {"p50", "p95", "p99"}
    assert about["server"][0].isdigit()
    assert {event.type for event in to.deliveries} == {"pillarbox.bench"}
    assert {len(event.payload) for event in to.deliveries} == {250}
    assert await remains(make) == []


async def test_a_floor_that_does_not_fit_into_memory_is_measured_in_parts(
    sqlite: SqlOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_PART_BYTES", 50_000)
    to = MemoryPublisher()
    figures, _ = await measure(await migrated(sqlite), Stream("orders", to, batch=16), SMALL)
    assert figures.drain_floor[0] > 0
    assert len({event.id for event in to.deliveries}) == len(to.deliveries) > 2 * SMALL.events


@pytest.mark.parametrize(
    ("outcome", "said"), [(rejected("too red"), "too red"), (outage("gone fishing"), "gone fishing")]
)
async def test_a_destination_that_fails_on_the_way_ends_it(sqlite: SqlOutbox, outcome: Outcome, said: str) -> None:
    make = await migrated(sqlite)

    async def refuse(events: Sequence[Event]) -> Sequence[Outcome]:
        return [outcome] * len(events)

    with pytest.raises(BenchFailed, match=f"memory did not take an event of the bench: {said}"):
        await measure(make, Stream("orders", After(50, refuse)), SMALL)
    assert await remains(make) == []


async def test_a_destination_that_hangs_ends_it(sqlite: SqlOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    make = await migrated(sqlite)
    monkeypatch.setattr(measuring, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(measuring, "_GRACE_SECONDS", 0.1)
    to = MemoryPublisher()
    monkeypatch.setattr(to, "open", _held_when_open_again(to))
    with pytest.raises(BenchFailed, match=r"draining: nothing moved for 1 s; see whether sqlite .* are well"):
        await measure(make, Stream("orders", to), SMALL)
    assert await remains(make) == []


def _held_when_open_again(to: MemoryPublisher) -> Callable[[], Any]:
    is_first, real_open = True, to.open

    async def opened() -> None:
        nonlocal is_first
        if not is_first:
            to.hold()
        is_first = False
        await real_open()

    return opened


async def test_a_destination_that_takes_nothing_is_reported_before_anything_is_made(
    sqlite: SqlOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_PATIENCE_SECONDS", 0.1)
    to = MemoryPublisher()
    to.hold()
    with pytest.raises(BenchFailed, match="memory did not acknowledge an event"):
        await measure(maker(sqlite), Stream("orders", to), SMALL)


async def test_an_outbox_that_cannot_be_removed_is_named(sqlite: SqlOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    make = await migrated(sqlite)

    def stubborn(prefix: str) -> Store:
        store = make(prefix)

        async def remove() -> bool:
            raise StoreDown("sqlite is away")

        monkeypatch.setattr(store, "remove", remove)
        return store

    with pytest.raises(BenchFailed, match=r"'bench_\w{8}' is left in .* \(sqlite is away\); .*--clean") as caught:
        await measure(stubborn, NOWHERE, SMALL)
    (left,) = await remains(make)
    assert left in str(caught.value)
    assert await clean(make, [left]) == [left]
    assert await clean(make, [left]) == []


async def test_an_interrupted_removal_says_what_is_left(sqlite: SqlOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    make = await migrated(sqlite)
    removing = asyncio.Event()

    def slow(prefix: str) -> Store:
        store = make(prefix)

        async def remove() -> bool:
            removing.set()
            await asyncio.Event().wait()
            return True

        monkeypatch.setattr(store, "remove", remove)
        return store

    seen: list[str] = []
    scale = Scale(events=100_000)
    running = asyncio.create_task(measure(slow, NOWHERE, scale, on_progress=lambda doing, done: seen.append(doing)))
    await until(lambda: seen)
    running.cancel()
    await removing.wait()
    running.cancel()
    with pytest.raises(BenchFailed, match=r"is left in .* \(interrupted\)"):
        await running
    assert await clean(make, await remains(make))


@pytest.mark.parametrize("size", [16, 17, 250, 100_000])
async def test_payloads_have_the_size_that_was_asked_for(size: int) -> None:
    events = measuring.Events("default", size)(50)
    assert {len(event.payload) for event in events} == {size}
    assert len({event.id for event in events}) == 50
