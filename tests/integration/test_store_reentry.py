"""Re-entry while others write: a new place is above all that was written before, and below all that comes after."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from pillarbox.conformance.events import make_event
from pillarbox.conformance.store_setup import refs, settle
from pillarbox.event import Event, Mode, Status
from pillarbox.store import Failure, Settlement, Store
from pillarbox.stores.sql import SqlStore
from tests.integration.relays import STREAM, SqlOutbox, counts, execute, key_of, numbered, query

pytestmark = pytest.mark.asyncio

ROUNDS = 25


async def write_until(done: asyncio.Event, store: Store) -> int:
    written = 0
    while not done.is_set():
        events = [make_event(stream=STREAM, key="other", payload=bytes(2000)) for _ in range(5)]
        await store.add(events)
        written += len(events)
    return written


async def test_places_are_in_order_while_others_write(sql: SqlOutbox, store: Store) -> None:
    done = asyncio.Event()
    stores = [sql() for _ in range(3)]
    for each in stores:
        await each.open()
    writing = [asyncio.create_task(write_until(done, each)) for each in stores]
    rounds: list[list[Event]] = []
    earlier = datetime.now(UTC) - timedelta(minutes=1)
    for _ in range(ROUNDS):
        (before,), (after,) = numbered("k", 1), numbered("k", 1)
        scheduled = [
            make_event(stream=STREAM, key="k", payload=bytes(1000), available_at=earlier + timedelta(seconds=seconds))
            for seconds in (2, 1, 3)
        ]
        await store.add([before, *scheduled])
        assert await store.reenter_due(STREAM, 10) == 3
        await store.add([after])
        rounds.append([before, scheduled[1], scheduled[0], scheduled[2], after])
    done.set()
    written = sum(await asyncio.gather(*writing))
    for each in stores:
        await each.close()
    assert await counts(store) == {Status.PENDING: written + 5 * ROUNDS}
    places = [(await store.find_by_id(event.id))[0].event.seq for events in rounds for event in events]
    assert places == sorted(set(places))


async def test_replays_are_in_order_while_others_write(sql: SqlOutbox, store: Store) -> None:
    await store.announce(STREAM, Mode.ORDERED, "memory")
    await store.join(STREAM, "ann", 600)
    key = key_of(0)
    grant = next(each for each in await store.take(STREAM, "ann", 4, 600) if each.shard == 0)
    done, other = asyncio.Event(), sql()
    await other.open()
    writing = asyncio.create_task(write_until(done, other))
    places = []
    for _ in range(ROUNDS):
        events = numbered(key, 3)
        await store.add(events)
        await settle(store, Settlement(grant, dead=[Failure(event, "refused", 1) for event in reversed(events)]))
        assert await store.replay(refs(*reversed(events)), "olga") == 3
        places += [(await store.find_by_id(event.id))[0].event.seq for event in events]
    done.set()
    await writing
    await other.close()
    assert places == sorted(set(places))


async def test_a_number_that_a_re_entry_took_is_never_given_again(sql: SqlOutbox, store: SqlStore) -> None:
    await store.announce(STREAM, Mode.QUEUE, "memory")
    (event,) = numbered(None, 1, available_at=datetime.now(UTC) - timedelta(minutes=1))
    await store.add([event])
    assert await store.reenter_due(STREAM, 10) == 1
    ((taken,),) = await query(store, "SELECT seq FROM {event}")
    assert await execute(store, "DELETE FROM {event} WHERE seq = :seq", seq=taken) == 1
    await store.add(numbered(None, 1))
    ((given,),) = await query(store, "SELECT seq FROM {event}")
    assert given > taken
