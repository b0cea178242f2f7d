"""A relay without faults publishes every event, once and in order."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pillarbox.event import Status
from pillarbox.publisher import PublisherFeatures
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.store import Store, Work
from pillarbox.stores.sql import SqlStore
from tests.integration.relays import (
    SHARDS,
    STREAM,
    WAIT,
    Gate,
    Outbox,
    SqlOutbox,
    by_key,
    copies,
    counts,
    eventually,
    in_order,
    key_of,
    mixed,
    numbered,
    owners,
    relay,
    settled,
    stream,
    until,
    worker_of,
)

pytestmark = pytest.mark.asyncio


async def test_everything_is_published_once_and_in_order(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    keys = [f"key-{n}" for n in range(20)]
    await store.add(mixed(keys, 10))
    async with relay(outbox(), stream(to, batch=16)):
        for first in range(11, 31, 5):
            await store.add(mixed(keys, 5, first=first))
        await to.wait_for(600)
        await settled(store, {Status.PUBLISHED: 600})
    assert by_key(to.deliveries) == in_order(keys, 30)


async def test_an_event_arrives_as_it_was_written(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    (event,) = numbered(
        "Zürich",
        1,
        type="order.paid",
        topic="payments",
        tenant="acme",
        headers={"trace": "ü\u2028"},
        aggregate_type="order",
        aggregate_id="7",
        aggregate_version=3,
        routing_key="eu.paid",
        schema_id="s",
        schema_version="2",
    )
    event = event._replace(
        payload=b'{"n": 1, "raw": "\x00\xff"}', occurred_at=datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)
    )
    await store.add([event])
    async with relay(outbox(), stream(to)):
        (arrived,) = await to.wait_for(1)
    assert arrived == event._replace(seq=arrived.seq, created_at=arrived.created_at)


async def test_each_stream_goes_to_its_own_destination(outbox: Outbox, store: Store) -> None:
    orders, mails = MemoryPublisher(), MemoryPublisher()
    await store.add([*numbered("k", 5), *numbered("k", 7, stream="mails"), *numbered("k", 3, stream="unknown")])
    async with relay(outbox(), stream(orders), stream(mails, "mails")):
        await orders.wait_for(5)
        await mails.wait_for(7)
    assert {event.stream for event in orders.deliveries} == {STREAM}
    assert {event.stream for event in mails.deliveries} == {"mails"}
    assert await counts(store, "unknown") == {Status.PENDING: 3}


async def test_a_stream_whose_destination_is_down_does_not_slow_another(sql: SqlOutbox, store: Store) -> None:
    orders, mails = MemoryPublisher(), MemoryPublisher()
    mails.down()
    async with relay(sql(), stream(orders), stream(mails, "mails")):
        await store.add(mixed([f"k{n}" for n in range(20)], 10, stream="mails"))
        for first in range(1, 6):
            await store.add(numbered("k", 1, first=first))
            await orders.wait_for(first)
        assert not mails.deliveries
        mails.up()
        await mails.wait_for(200)
    assert copies([*orders.deliveries, *mails.deliveries]) == 0


async def test_a_scheduled_event_is_published_when_its_time_has_come_and_holds_nobody(
    outbox: Outbox, store: Store
) -> None:
    to = MemoryPublisher()
    now = datetime.now(UTC)
    late = numbered("k", 1, first=9, available_at=now + timedelta(hours=1))
    soon = numbered("k", 1, first=8, available_at=now + timedelta(seconds=0.3))
    await store.add([*late, *soon, *numbered("k", 3)])
    async with relay(outbox(), stream(to)):
        await to.wait_for(4)
        await settled(store, {Status.PUBLISHED: 4, Status.SCHEDULED: 1})
    # The place of the one that came due depends on how fast this machine is.
    assert [n for n in by_key(to.deliveries)["k"] if n != 8] == [1, 2, 3]


async def test_published_events_can_be_deleted_at_once(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    await store.add(mixed(["a", "b", "c"], 20))
    async with relay(outbox(), stream(to), keep_published=0):
        await to.wait_for(60)
        await settled(store, {})
    assert by_key(to.deliveries) == in_order(["a", "b", "c"], 20)


async def test_a_paused_stream_rests_until_it_is_resumed(outbox: Outbox, store: Store) -> None:
    to, other = MemoryPublisher(), MemoryPublisher()
    await store.pause(STREAM, "olga")
    await store.add([*numbered("k", 5), *numbered("k", 5, stream="other")])
    async with relay(outbox(), stream(to), stream(other, "other")):
        await other.wait_for(5)
        await store.add(numbered("k", 1, first=6, stream="other"))
        await other.wait_for(6)
        assert not to.deliveries
        assert await counts(store) == {Status.PENDING: 5}
        await store.resume(STREAM, "olga")
        await to.wait_for(5)
    assert by_key(to.deliveries) == in_order(["k"], 5)


async def test_a_pause_stops_a_stream_that_is_busy(
    sql: SqlOutbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = Gate()
    await store.add(numbered("k", 300))
    own = sql()
    polls = 0
    poll = own.poll

    async def counted(*arguments: object) -> object:
        nonlocal polls
        work = await poll(*arguments)  # type: ignore[arg-type]
        polls += work.paused
        return work

    monkeypatch.setattr(own, "poll", counted)
    async with relay(own, stream(to, batch=1)):
        await until(lambda: to.calls == 1)
        await store.pause(STREAM, "olga")
        await until(lambda: polls >= 1)
        to.let(1000)
        seen = polls
        await until(lambda: polls >= seen + 15)
        assert len(to.deliveries) <= 4, "what was under way may end; nothing new begins"
        await store.resume(STREAM, "olga")
        await until(lambda: len(to.deliveries) == 300)
    assert by_key(to.deliveries) == in_order(["k"], 300)


async def test_a_batch_is_limited_in_bytes(outbox: Outbox, store: Store) -> None:
    to = Gate(at_once=1)
    key = key_of(0)
    events = numbered(key, 8)
    padded = [event._replace(payload=event.payload + b" " * 1000) for event in events]
    await store.add(padded)
    async with relay(outbox(), stream(to, batch_bytes=2500)):
        to.let(100)
        await until(lambda: len(to.deliveries) == 8)
    assert to.calls >= 3, "two fit, and the one that passes the limit"
    assert by_key(to.deliveries) == in_order([key], 8)


async def test_an_event_larger_than_a_batch_still_goes(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    (large,) = numbered("k", 1)
    await store.add([large._replace(payload=large.payload + b" " * 50_000), *numbered("k", 2, first=2)])
    async with relay(outbox(), stream(to, batch_bytes=1000)):
        await to.wait_for(3)
    assert by_key(to.deliveries) == in_order(["k"], 3)


async def test_an_event_of_an_open_transaction_is_not_overtaken(pg: SqlOutbox, store: SqlStore) -> None:
    """A writer keeps its transaction open while others commit. Its own key still comes in order."""
    to = MemoryPublisher()
    async with relay(pg(), stream(to)):
        async with store.transaction() as tx:
            await store.add(numbered("slow", 1), tx)
            await store.add(mixed(["a", "b"], 50))
            await to.wait_for(100)
        await store.add(numbered("slow", 1, first=2))
        await to.wait_for(102)
    assert by_key(to.deliveries) == in_order(["a", "b"], 50) | in_order(["slow"], 2)


async def test_a_rolled_back_event_is_never_published(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()

    class Regret(Exception):
        pass

    async def write_and_regret() -> None:
        async with store.transaction() as tx:
            await store.add(numbered("k", 3), tx)
            raise Regret

    async with relay(outbox(), stream(to)):
        with pytest.raises(Regret):
            await write_and_regret()
        await store.add(numbered("k", 1, first=4))
        await to.wait_for(1)
        await settled(store, {Status.PUBLISHED: 1})
    assert by_key(to.deliveries) == {"k": [4]}


async def test_drain_waits_for_what_was_written_before(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    async with relay(outbox(), stream(to)) as running:
        for first in range(1, 11):
            await store.add(numbered("k", 1, first=first))
            await running.drain()
            assert len(to.deliveries) == first
            assert (await counts(store)).get(Status.PENDING) is None


async def test_drain_does_not_trust_a_poll_that_began_before_it(
    sqlite: SqlOutbox, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = MemoryPublisher()
    own = sqlite()
    poll = own.poll
    held, free = asyncio.Event(), asyncio.Event()
    free.set()

    async def slow(*arguments: object) -> object:
        work = await poll(*arguments)  # type: ignore[arg-type]
        held.set()
        await free.wait()
        return work

    async with relay(own, stream(to)) as running:
        await running.drain()
        monkeypatch.setattr(own, "poll", slow)
        free.clear()
        held.clear()
        await held.wait()  # it has seen that there is nothing
        await store.add(numbered("k", 1))
        draining = asyncio.create_task(running.drain())
        await asyncio.sleep(0)
        free.set()
        await draining
        assert len(to.deliveries) == 1


async def test_a_relay_takes_no_more_slots_than_its_destination_serves(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher(features=PublisherFeatures(calls=2))
    to.hold()
    await store.add([event for shard in range(SHARDS) for event in numbered(key_of(shard), 3)])
    async with relay(outbox(), stream(to)):
        await to.wait_until_held(2)
        await eventually(lambda: owners(store), lambda found: None not in found)
        assert to._waiting == 2
        to.release()
        await to.wait_for(3 * SHARDS)


async def test_a_relay_can_be_started_again(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    again = relay(outbox(), stream(to))
    for first in (1, 2):
        async with again:
            await store.add(numbered("k", 1, first=first))
            await to.wait_for(first)
    assert by_key(to.deliveries) == in_order(["k"], 2)


async def test_a_relay_that_runs_is_not_started_twice(sqlite: SqlOutbox, store: SqlStore) -> None:
    async with relay(sqlite(), stream(MemoryPublisher())) as running:
        with pytest.raises(ValueError, match="runs already"):
            await running.start()


async def test_drain_does_not_trust_a_poll_during_which_a_turn_ended(
    sqlite: SqlOutbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, behind = Gate(), sqlite()
    real_poll = behind.poll
    polled, go_on = asyncio.Event(), asyncio.Event()
    held = False

    async def poll(*arguments: Any) -> Work:
        is_held = held and not polled.is_set()
        work = await real_poll(*arguments)
        if is_held:
            polled.set()
            await go_on.wait()
        return work

    monkeypatch.setattr(behind, "poll", poll)
    key = key_of(0)
    await store.add(numbered(key, 1))
    async with relay(behind, stream(to)) as running:
        await until(lambda: to.calls == 1)
        # Its turn has read; the shard is busy and left out of the poll.
        await store.add(numbered(key, 1, first=2))
        draining = asyncio.create_task(running.drain())
        await asyncio.sleep(0)
        held = True
        await polled.wait()
        to.let(100)
        await until(lambda: not worker_of(running).busy)
        go_on.set()
        await draining
        assert by_key(to.deliveries) == {key: [1, 2]}


async def test_a_drain_outlives_a_worker_that_fails(
    sql: SqlOutbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, to = sql(), MemoryPublisher()
    poll, failed = own.poll, asyncio.Event()

    async def fail_once(*arguments: Any) -> Work:
        if draining.is_set() and not failed.is_set():
            failed.set()
            raise RuntimeError("a fault that nobody foresaw")
        return await poll(*arguments)

    draining = asyncio.Event()
    monkeypatch.setattr(own, "poll", fail_once)
    async with relay(own, stream(to)) as running:
        await running.drain()
        await store.add(numbered("key", 3))
        draining.set()
        await asyncio.wait_for(running.drain(), WAIT)
        assert failed.is_set()
        assert len(to.deliveries) == 3
