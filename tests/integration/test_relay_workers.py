"""Several workers: fair shares, clean hand-over, and no disorder when one of them loses its leases."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from uuid import UUID

import pytest

from pillarbox.batch import Batch, Part
from pillarbox.conformance.store_setup import read, settle
from pillarbox.errors import StoreDown
from pillarbox.event import Mode, Status
from pillarbox.publisher import Outcome, PublisherFeatures, retry
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Relay, destination
from pillarbox.store import Grant, Settlement, Store
from pillarbox.stores.sql import SqlStore
from tests.integration.relays import (
    LEASE,
    STREAM,
    Gate,
    Outbox,
    Shared,
    SqlOutbox,
    attempts,
    by_key,
    copies,
    cut,
    eventually,
    first_deliveries,
    in_order,
    key_of,
    lease_in_doubt,
    mixed,
    numbered,
    owners,
    relay,
    settled,
    sharing,
    stream,
    until,
    worker_of,
)

pytestmark = pytest.mark.asyncio


def noted_reads(store: Store) -> set[int]:
    """Collects the shards from which this store reads events from now on."""
    shards: set[int] = set()
    real_read = store.read

    async def read(grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        parts = await real_read(grants, limit, max_bytes)
        shards.update(part.shard for part in parts if part.shard is not None)
        return parts

    store.read = read  # type: ignore[method-assign]
    return shards


@pytest.mark.parametrize(("workers", "shares"), [(2, [2, 2]), (3, [2, 1, 1]), (5, [1, 1, 1, 1])])
async def test_workers_share_the_shards_fairly(outbox: Outbox, store: Store, workers: int, shares: list[int]) -> None:
    to = MemoryPublisher()
    relays = [relay(outbox(), stream(to)) for _ in range(workers)]
    keys = [f"key-{n}" for n in range(12)]
    async with AsyncExitStack() as stack:
        for each in relays:
            await stack.enter_async_context(each)
        await eventually(
            lambda: owners(store), lambda found: None not in found and sorted(found.values()) == sorted(shares)
        )
        await store.add(mixed(keys, 10))
        await to.wait_for(120)
        await settled(store, {Status.PUBLISHED: 120})
    assert by_key(to.deliveries) == in_order(keys, 10)
    assert await owners(store) == {None: 4}


async def test_workers_come_and_go_without_a_copy(outbox: Outbox, store: Store) -> None:
    to = Shared()
    keys = [f"key-{n}" for n in range(12)]
    written = 0

    async def write() -> None:
        nonlocal written
        await store.add(mixed(keys, 5, first=written + 1))
        written += 5

    first, second, third = (relay(outbox(), stream(to, batch=3)) for _ in range(3))
    await write()
    async with first:
        await write()
        async with second:
            await eventually(lambda: owners(store), sharing([first, second], [2, 2]))
            await write()
            await third.start()
            await eventually(lambda: owners(store), sharing([first, second, third], [2, 1, 1]))
            await write()
            await third.stop()
            await write()
        await eventually(lambda: owners(store), sharing([first], [4]))
        await write()
        await to.wait_for(12 * written)
        await settled(store, {Status.PUBLISHED: 12 * written})
    assert by_key(to.deliveries) == in_order(keys, written)
    await store.join(STREAM, "heir", 60)
    assert [grant.crashes for grant in await store.take(STREAM, "heir", 4, 60)] == [0] * 4


async def test_a_worker_that_comes_while_there_is_much_to_do_gets_its_share(sql: SqlOutbox, store: Store) -> None:
    """A worker is added because the others have too much to do: it must not wait until they have nothing."""
    old, new = Gate(), MemoryPublisher()
    keys = [key_of(shard) for shard in range(4)]
    await store.add(mixed(keys, 400))
    busy, helper = relay(sql(), stream(old, batch=1)), relay(sql(), stream(new))
    async with busy:
        await until(lambda: old.calls == 4)
        async with helper:

            async def go_on() -> list[object]:
                old.let(4)
                return list(new.deliveries)

            await eventually(go_on)
            assert len(old.deliveries) < 1000
            old.let(10_000)
            await until(lambda: len(old.deliveries) + len(new.deliveries) >= 1600)
    assert copies([*old.deliveries, *new.deliveries]) == 0


async def test_a_stop_during_work_makes_no_copy(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher(features=PublisherFeatures(calls=4))
    keys = [key_of(shard) for shard in range(4)]
    await store.add(mixed(keys, 100))
    to.hold()
    running = relay(outbox(), stream(to, batch=10))
    await running.start()
    await to.wait_until_held(4)
    stopping = asyncio.create_task(running.stop())
    await asyncio.sleep(0)
    to.release()
    await stopping
    before = len(to.deliveries)
    assert 0 < before < 400
    assert await owners(store) == {None: 4}
    async with relay(outbox(), stream(to)):
        await to.wait_for(400)
        await settled(store, {Status.PUBLISHED: 400})
    assert by_key(to.deliveries) == in_order(keys, 100)


class Counting(MemoryPublisher):
    """Counts its calls."""

    calls = 0

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        self.calls += 1
        return await super().publish(batch)


async def test_a_turn_that_waits_for_the_destination_does_not_call_it_once_it_is_closed(
    sqlite: SqlOutbox, store: Store
) -> None:
    to, own = Counting(features=PublisherFeatures(calls=1)), sqlite()
    read = noted_reads(own)
    keys = [key_of(0), key_of(1)]
    await store.add(mixed(keys, 2))
    to.hold()
    running = relay(own, stream(to, slots=2), grace=0.05)
    await running.start()
    await to.wait_until_held()
    await until(lambda: read == {0, 1})
    await running.stop()
    assert to.calls == 1
    to.release()
    async with relay(sqlite(), stream(to)):
        await to.wait_for(4)
    assert by_key(to.deliveries) == in_order(keys, 2)


async def test_half_as_many_large_calls_run_at_once(sqlite: SqlOutbox, store: Store) -> None:
    to, own = MemoryPublisher(features=PublisherFeatures(calls=4, first_batch=1000)), sqlite()
    read = noted_reads(own)
    keys = [key_of(shard) for shard in range(4)]
    await store.add(mixed(keys, 600))
    to.hold()
    async with relay(own, stream(to)):
        await until(lambda: read == {0, 1, 2, 3})
        await to.wait_until_held(2)
        assert to._waiting == 2
        to.release()
        await to.wait_for(2400)
    assert by_key(to.deliveries) == in_order(keys, 600)


async def test_a_stop_takes_back_what_hangs(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    await store.add(numbered("k", 5))
    to.hold()
    running = relay(outbox(), stream(to), grace=0.05)
    await running.start()
    await to.wait_until_held()
    await running.stop()
    assert not to.deliveries
    to.release()
    async with relay(outbox(), stream(to)):
        await to.wait_for(5)
        await settled(store, {Status.PUBLISHED: 5})
    assert by_key(to.deliveries) == in_order(["k"], 5)
    assert set(await attempts(store)) == {1}, "nothing was charged"


@pytest.mark.parametrize(("noted", "left"), [("nothing", 2), ("settled", 2), ("waiting", 3)])
async def test_an_owner_whose_suspect_is_settled_did_not_die_of_it(
    outbox: Outbox, store: Store, noted: str, left: int
) -> None:
    (event,) = numbered(key_of(0), 1)
    await store.add([event])
    grant = await taken_by(store, "ghost-1", "ghost-2", "ghost-3")
    if noted != "nothing":
        await store.note_suspect(grant, event.id)
    if noted == "settled":
        await settle(store, Settlement(grant, published=await read(store, grant, 10, 10**6)))
    await store.pause(STREAM, "test")
    async with relay(outbox(), stream(MemoryPublisher(), lease=60)):
        await eventually(lambda: owners(store), lambda found: list(found.values()) == [4] and "ghost" not in str(found))
    (heir, *_) = await store.take(STREAM, "heir", 4, 60)
    assert (heir.shard, heir.crashes) == (0, left)


async def test_a_cautious_owner_settles_what_was_published_beside_a_failure(
    outbox: Outbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = key_of(0), key_of(0)
    await store.add([*numbered(good, 3), *numbered(bad, 1)])
    await taken_by(store, "ghost-1", "ghost-2")
    mine, to = outbox(), MemoryPublisher()
    to.fail_next(retry("not this time"), key=bad)
    note, refused = mine.note_suspect, 0

    async def note_suspect(grant: Grant, event_id: UUID | None, alone: int = 0) -> None:
        nonlocal refused
        if event_id is None and not refused:
            refused += 1
            raise StoreDown("away for a moment")
        await note(grant, event_id, alone)

    monkeypatch.setattr(mine, "note_suspect", note_suspect)
    async with relay(mine, stream(to, lease=60)):
        await settled(store, {Status.PUBLISHED: 4})
    assert refused == 1
    assert copies(to.deliveries) == 0


async def taken_by(store: Store, *workers: str) -> Grant:
    """The last worker's grant of shard 0. Each worker took it when the lease of the one before had run out."""
    grants: list[Grant] = []
    await store.announce(STREAM, Mode.ORDERED, "memory")
    for number, worker in enumerate(workers, 1):
        await store.join(STREAM, worker, 0.1)
        while len(grants) < number:
            grants += [grant for grant in await store.take(STREAM, worker, 4, 0.1) if grant.shard == 0]
            await asyncio.sleep(0.02)
    return grants[-1]


class Wedged(MemoryPublisher):
    """Its calls never end, and neither does its close: like a client library in a deadlock."""

    async def close(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_a_stop_leaves_behind_what_never_ends_and_another_takes_over(
    outbox: Outbox, store: Store, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(destination, "CLOSE_SECONDS", 0.1)
    wedged, to = Wedged(), MemoryPublisher()
    await store.add(numbered("k", 5))
    wedged.hold()
    running = relay(outbox(), stream(wedged, mode=mode, lease=LEASE), grace=0.05)
    await running.start()
    await wedged.wait_until_held()
    await asyncio.wait_for(running.stop(), 30)
    assert "left_behind" in {getattr(record, "action", None) for record in caplog.records}
    async with relay(outbox(), stream(to, mode=mode, lease=LEASE)):
        await to.wait_for(5)
        await settled(store, {Status.PUBLISHED: 5})
    assert not wedged.deliveries
    assert mode == "queue" or by_key(to.deliveries) == in_order(["k"], 5)


async def test_a_worker_that_is_cut_off_is_taken_over_and_changes_nothing_when_it_comes_back(
    outbox: Outbox, store: Store
) -> None:
    gone, heir = MemoryPublisher(features=PublisherFeatures(calls=4)), MemoryPublisher()
    keys = [key_of(shard) for shard in range(4)]
    await store.add(mixed(keys, 5))
    lost = outbox()
    gone.hold()
    victim = relay(lost, stream(gone, lease=LEASE))
    await victim.start()
    await gone.wait_until_held(4)
    with pytest.MonkeyPatch.context() as patch:
        cut(lost, patch)
        other = relay(outbox(), stream(heir))
        async with other:
            await heir.wait_for(20)
            await store.add(mixed(keys, 5, first=6))
            await heir.wait_for(40)
            await settled(store, {Status.PUBLISHED: 40})
            gone.release()
            await gone.wait_for(20)
            patch.undo()
            # The late settle is refused, and the worker is one of two again.
            await eventually(lambda: owners(store), sharing([victim, other], [2, 2]))
            await store.add(mixed(keys, 5, first=11))
            await until(lambda: len(heir.deliveries) + len(gone.deliveries) == 80)
            await settled(store, {Status.PUBLISHED: 60})
        await victim.stop()
    assert first_deliveries(heir.deliveries[:40]) == in_order(keys, 10)
    assert copies([*gone.deliveries, *heir.deliveries]) == 20, "what it had in flight, once"
    assert set(await attempts(store)) == {1}


async def test_nothing_is_published_when_the_lease_is_in_doubt(outbox: Outbox, store: Store) -> None:
    """A worker that cannot renew stops publishing before anyone can take over, also when it can still read."""
    to = MemoryPublisher()
    own = outbox()

    async def no_renewal(*_: object) -> object:
        raise StoreDown("the renewal does not get through")

    with pytest.MonkeyPatch.context() as patch:
        running = relay(own, stream(to, lease=LEASE))
        async with running:
            await store.add(numbered("k", 1))
            await to.wait_for(1)
            patch.setattr(own, "renew", no_renewal)
            await lease_in_doubt(running)
            await store.add(numbered("k", 3, first=2))
            # Read again and again, and never sent.
            await eventually(lambda: store.poll(STREAM, "onlooker", []), lambda work: work.free == 4)
            assert by_key(to.deliveries) == {"k": [1]}
            patch.undo()
            await to.wait_for(4)
    assert by_key(to.deliveries) == in_order(["k"], 4)


async def test_a_turn_checks_its_lease_after_it_waited_for_the_destination(sqlite: SqlOutbox, store: Store) -> None:
    to = MemoryPublisher(features=PublisherFeatures(calls=1))
    own, keys = sqlite(), [key_of(0), key_of(1)]
    read = noted_reads(own)

    async def no_renewal(*_: object) -> object:
        raise StoreDown("the renewal does not get through")

    await store.add(mixed(keys, 2))
    to.hold()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "renew", no_renewal)
        running = relay(own, stream(to, slots=2, lease=LEASE))
        async with running:
            await to.wait_until_held(1)
            await until(lambda: read == {0, 1})
            await lease_in_doubt(running)
            assert to._waiting == 1, "the other one has read, and has not called"
            to.release()
            await to.wait_for(2)
            await eventually(lambda: store.poll(STREAM, "onlooker", []), lambda work: work.free == 4)
            assert len(by_key(to.deliveries)) == 1, "only what was on its way"
            patch.undo()
            await to.wait_for(4)
    assert first_deliveries(to.deliveries) == in_order(keys, 2)


async def test_a_take_whose_second_half_fails_leaves_no_shard_without_owner(
    outbox: Outbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leases are granted, and the database goes away before the worker knows its keys."""
    own = outbox()
    held_keys = own.held_keys
    calls = 0

    async def once_down(grant: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise StoreDown("gone for a moment")
        return await held_keys(grant)  # type: ignore[arg-type]

    monkeypatch.setattr(own, "held_keys", once_down)
    to = MemoryPublisher()
    keys = [key_of(shard) for shard in range(4)]
    await store.add(mixed(keys, 2))
    async with relay(own, stream(to, lease=60)):
        await to.wait_for(8)
    assert by_key(to.deliveries) == in_order(keys, 2)


async def test_two_relays_of_one_process_can_share_a_store(sqlite: SqlOutbox, store: SqlStore) -> None:
    shared = sqlite()
    to = Shared()
    first, second = relay(shared, stream(to)), relay(shared, stream(to))
    async with first:
        async with second:
            await eventually(lambda: owners(store), sharing([first, second], [2, 2]))
        await store.add(numbered("k", 3))
        await to.wait_for(3)
    assert by_key(to.deliveries) == in_order(["k"], 3)


async def test_each_shard_has_one_owner_at_any_time(outbox: Outbox, store: Store) -> None:
    relays: list[Relay] = [relay(outbox(), stream(MemoryPublisher())) for _ in range(3)]
    async with AsyncExitStack() as stack:
        for each in relays:
            await stack.enter_async_context(each)
        await eventually(lambda: owners(store), sharing(relays, [2, 1, 1]))

        def held() -> list[int]:
            return sorted(shard for each in relays for shard in worker_of(each).ownership.shards)

        # The database knows first; the workers hear of it with the answer.
        await until(lambda: held() == [0, 1, 2, 3])
