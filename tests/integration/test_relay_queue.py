"""Queue streams: single events, leased one by one."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.conformance.store_setup import refs
from pillarbox.errors import StoreDown
from pillarbox.event import Event, Status
from pillarbox.publisher import PUBLISHED, Outcome, rejected, retry
from pillarbox.publishers.handlers import Handlers
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Fixed, Stream
from pillarbox.store import Claim, ClaimResults, Filter, Store
from pillarbox.stores.sql import SqlStore
from tests.integration.relays import (
    LEASE,
    STREAM,
    WAIT,
    CircuitState,
    Outbox,
    SqlOutbox,
    attempts,
    copies,
    counts,
    eventually,
    mixed,
    move,
    numbered,
    relay,
    settled,
    stream,
    until,
)

pytestmark = pytest.mark.asyncio


def queue(to: object, **settings: Any) -> Stream:
    return stream(to, STREAM, **{"mode": "queue", **settings})


def jobs(count: int, **fields: object) -> list[Event]:
    return [make_event(key=None, stream=STREAM, **fields) for _ in range(count)]  # type: ignore[arg-type]


async def test_every_event_is_published_once(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    await store.add(jobs(100))
    async with relay(outbox(), queue(to)), relay(outbox(), queue(to)):
        await store.add(jobs(100))
        await to.wait_for(200)
        await settled(store, {Status.PUBLISHED: 200})
    assert copies(to.deliveries) == 0
    assert set(await attempts(store)) == {1}


async def test_as_many_run_at_once_as_the_setting_says(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.hold()
    await store.add(jobs(20))
    async with relay(outbox(), queue(to, concurrency=3)):
        await to.wait_until_held(3)
        await settled(store, {Status.PROCESSING: 3, Status.PENDING: 17})
        to.release()
        await to.wait_for(20)


async def test_a_slow_event_does_not_hold_the_others(sql: SqlOutbox, store: Store) -> None:
    handlers = Handlers()
    free, done = asyncio.Event(), []

    @handlers.on("slow")
    async def slow(event: Event) -> None:
        await free.wait()
        done.append(event)

    @handlers.on("quick")
    async def quick(event: Event) -> None:
        done.append(event)

    await store.add([*jobs(1, type="slow"), *jobs(30, type="quick")])
    async with relay(sql(), queue(handlers, concurrency=2)):
        await until(lambda: len(done) == 30)
        free.set()
        await until(lambda: len(done) == 31)
        await settled(store, {Status.PUBLISHED: 31})


async def test_a_failed_event_is_retried_and_dies_of_its_last_attempt(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy"), type="mends", times=2)
    to.fail_next(retry("broken"), type="breaks", times=3)
    to.fail_next(rejected("bad"), type="bad")
    await store.add([*jobs(1, type="mends"), *jobs(1, type="breaks"), *jobs(1, type="bad"), *jobs(5)])
    async with relay(outbox(), queue(to, max_attempts=3)):
        await settled(store, {Status.PUBLISHED: 6, Status.DEAD: 2})
    letters = {letter.event.type: letter for letter in await store.dead_letters()}
    assert (letters["breaks"].event.attempts, len(letters["breaks"].errors)) == (3, 3)
    assert (letters["bad"].event.attempts, len(letters["bad"].errors)) == (1, 1)
    assert [event.attempts for event in to.deliveries if event.type == "mends"] == [3]


async def test_a_retry_waits_for_its_time(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy"), type="later")
    await store.add([*jobs(1, type="later"), *jobs(3)])
    async with relay(outbox(), queue(to, retry=Fixed(3600.0))):
        await settled(store, {Status.PUBLISHED: 3, Status.FAILED: 1})
        await move(store, "event", "next_attempt_at", 0.0, status="failed")
        await to.wait_for(4)


async def test_a_dead_letter_can_be_replayed(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(rejected("bad"))
    await store.add(jobs(1))
    async with relay(outbox(), queue(to)):
        await settled(store, {Status.DEAD: 1})
        await store.replay(refs(*(letter.event for letter in await store.dead_letters())), "olga")
        await to.wait_for(1)
        await settled(store, {Status.PUBLISHED: 1})


async def test_a_stop_gives_back_what_hangs_uncharged(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.hold()
    await store.add(jobs(5))
    running = relay(outbox(), queue(to, concurrency=3), grace=0.05)
    await running.start()
    await to.wait_until_held(3)
    await running.stop()
    assert await counts(store) == {Status.PENDING: 5}
    assert set(await attempts(store)) == {0}
    to.release()
    async with relay(outbox(), queue(to)):
        await to.wait_for(5)
        await settled(store, {Status.PUBLISHED: 5})
    assert copies(to.deliveries) == 0


async def test_a_stop_lets_what_runs_end(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.hold()
    await store.add(jobs(5))
    running = relay(outbox(), queue(to, concurrency=3))
    await running.start()
    await to.wait_until_held(3)
    stopping = asyncio.create_task(running.stop())
    await asyncio.sleep(0)
    to.release()
    await stopping
    assert await counts(store) == {Status.PENDING: 2, Status.PUBLISHED: 3}


async def test_an_outage_charges_nothing(sql: SqlOutbox, store: Store) -> None:
    to = MemoryPublisher()
    to.down()
    await store.add(jobs(10))
    circuit = CircuitState()
    async with relay(sql(), queue(to, max_attempts=1), observers=[circuit]):
        await until(lambda: circuit.state == "open")
        await settled(store, {Status.PENDING: 10})
        assert set(await attempts(store)) == {0}
        to.up()
        await to.wait_for(10)
        await settled(store, {Status.PUBLISHED: 10})
    assert copies(to.deliveries) == 0


@pytest.mark.parametrize("trouble", ["stolen", "down"])
async def test_the_circuit_recovers_when_its_probe_finds_nothing(
    sqlite: SqlOutbox, store: SqlStore, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """The event of the probe is taken by another worker, or the database is away just then."""
    own = sqlite()
    claim, spoilt = own.claim, 0
    to = MemoryPublisher()
    circuit = CircuitState()

    async def spoil(*arguments: object) -> object:
        nonlocal spoilt
        if circuit.state == "half_open" and not spoilt:
            spoilt += 1
            if trouble == "down":
                raise StoreDown("gone for a moment")
            return []
        return await claim(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(own, "claim", spoil)
    to.down()
    async with relay(own, queue(to), observers=[circuit]):
        await store.add(jobs(3))
        await until(lambda: circuit.state == "open")
        await settled(store, {Status.PENDING: 3})
        to.up()
        await to.wait_for(3)
    assert spoilt == 1


async def test_work_of_a_dead_worker_is_rescued(outbox: Outbox, store: Store) -> None:
    events = jobs(3)
    await store.add(events)
    await store.join(STREAM, "dead", LEASE)
    claimed: list[Claim] = []
    for shard in range(4):
        claimed += await store.claim(STREAM, shard, "dead", 10, -1.0)
    assert len(claimed) == 3
    to = MemoryPublisher()
    async with relay(outbox(), queue(to)):
        await to.wait_for(3)
        await settled(store, {Status.PUBLISHED: 3})
    assert [event.attempts for event in to.deliveries] == [1, 1, 1], "a crash in company is not charged"
    late = await store.settle_claims(claimed, ClaimResults(published=[claim.event for claim in claimed]))
    assert late == 3, "the dead worker's tokens are stale"


class Alone(MemoryPublisher):
    """Notes how many other events run beside a suspect."""

    def __init__(self) -> None:
        super().__init__()
        self.running: set[object] = set()
        self.company: list[int] = []

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        (event,) = batch
        self.running.add(event.id)
        if event.type == "suspect":
            self.company.append(len(self.running) - 1)
        await asyncio.sleep(0)
        self.running.discard(event.id)
        return await super().publish(batch)


async def test_suspects_run_alone(outbox: Outbox, store: Store) -> None:
    await store.add(jobs(4, type="suspect"))
    for shard in range(4):
        await store.claim(STREAM, shard, "dead", 10, -1.0)
    assert (await store.rescue(STREAM, 600, 100)).retried == 4
    await store.add(jobs(40))
    to = Alone()
    async with relay(outbox(), queue(to)):
        await to.wait_for(44)
    assert to.company == [0, 0, 0, 0]


async def test_a_suspect_that_was_given_back_is_still_a_suspect(outbox: Outbox, store: Store) -> None:
    """It never ran alone to its end, so a crash beside other events must not be charged to it."""
    (event,) = jobs(1)
    await store.add([event])
    for shard in range(4):
        await store.claim(STREAM, shard, "dead", 10, -1.0)
    await store.rescue(STREAM, 600, 100)
    (claim,) = await store.claim(STREAM, None, "ann", 1, 60.0)
    await store.settle_claims([claim], ClaimResults(refund=[event]))  # ann was stopped
    again = [each for shard in range(4) for each in await store.claim(STREAM, shard, "bob", 10, -1.0)]
    if again:  # perhaps beside other events
        await store.rescue(STREAM, 600, 100)
        (claim,) = await store.claim(STREAM, None, "cid", 1, 60.0)
        assert claim.event.attempts == 1
    else:
        assert await store.claim(STREAM, None, "cid", 1, 60.0)


async def test_a_stale_claim_is_refused_after_a_replay_too(outbox: Outbox, store: Store) -> None:
    (event,) = jobs(1)
    await store.add([event])

    async def claim(worker: str, seconds: float = 60.0) -> list[Claim]:
        return [each for shard in range(4) for each in await store.claim(STREAM, shard, worker, 10, seconds)]

    (stale,) = await claim("ann", -1.0)
    await store.rescue(STREAM, 600, 100)
    for dead in (0, 0, 1):
        await store.claim(STREAM, None, "bob", 1, -1.0)
        assert (await store.rescue(STREAM, 600, 100)).dead == dead
    await store.replay(refs(event), "olga")
    (fresh,) = await claim("cid")
    refused = await store.settle_claims([stale], ClaimResults(published=[event]))
    assert refused == 1, "ann's token is older than the replay"
    assert await counts(store) == {Status.PROCESSING: 1}
    assert fresh


class Hanging(MemoryPublisher):
    """Never returns for a ``hang`` until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.hung = 0
        self._closed = asyncio.Event()

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        if batch[0].type == "hang":
            self.hung += 1
            await self._closed.wait()
            return [PUBLISHED]
        return await super().publish(batch)

    async def close(self) -> None:
        self._closed.set()
        await super().close()


async def test_an_event_that_hangs_does_not_hold_the_stream(sql: SqlOutbox, store: Store) -> None:
    """After a while its worker loses it. That worker has places left and must go on with the other events."""
    to = Hanging()
    await store.add(jobs(1, type="hang"))
    async with relay(sql(), queue(to, concurrency=4, stuck=0.3, lease=LEASE), grace=0.1):
        await until(lambda: to.hung == 1)
        await eventually(lambda: store.find(Filter(), 1), lambda found: found[0].last_error is not None)
        await store.add(jobs(20))
        await to.wait_for(20, timeout=WAIT)


async def test_an_event_that_always_hangs_dies(outbox: Outbox, store: Store) -> None:
    handlers = Handlers(timeout=0.05)

    @handlers.on("hang")
    async def hang(event: Event) -> None:
        await asyncio.Event().wait()

    await store.add(jobs(1, type="hang"))
    async with relay(outbox(), queue(handlers, max_attempts=2)):
        await settled(store, {Status.DEAD: 1})
    (letter,) = await store.dead_letters()
    assert "did not finish within 0.05 s" in letter.error


async def test_keys_mean_nothing_to_a_queue(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy"), key="k")
    await store.add([*numbered("k", 5), *mixed(["a", "b"], 5)])
    async with relay(outbox(), queue(to, retry=Fixed(3600.0))):
        await settled(store, {Status.PUBLISHED: 14, Status.FAILED: 1})


async def test_maintenance_runs_after_a_second_start_too(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    again = relay(outbox(), queue(to))
    async with again:
        await store.add(jobs(1))
        await to.wait_for(1)
        await settled(store, {Status.PUBLISHED: 1})
    await store.add(jobs(1))
    for shard in range(4):
        await store.claim(STREAM, shard, "dead", 10, -1.0)
    async with again:
        await to.wait_for(2)
