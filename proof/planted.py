"""Bugs to be caught: each is a mistake that a relay could have, switched on by its name in the workers of a run.

They change the objects of one process, by hand, from outside of the library.
"""

import asyncio
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Final

from pillarbox import Event
from pillarbox.errors import LeaseLost
from pillarbox.publisher import PUBLISHED, Outcome, Result, rejected, retry
from pillarbox.store import Failure, Grant, Settlement
from pillarbox.stores.sql import SqlStore

_background: set[asyncio.Task[Any]] = set()


def plant(name: str | None, store: Any, publisher: Any) -> None:
    """Change this store and this publisher so that they have the bug."""
    if name is not None:
        PLANTED[name](store, publisher)


def settle_before_the_acknowledgement(store: Any, publisher: Any) -> None:
    """Sent is taken for confirmed."""
    send = publisher.publish

    async def publish(events: Sequence[Event]) -> Sequence[Outcome]:
        task = asyncio.create_task(send(events))
        _background.add(task)
        task.add_done_callback(_background.discard)
        return [PUBLISHED] * len(events)

    publisher.publish = publish


def delivery_report_ignored(store: Any, publisher: Any) -> None:
    """What the broker refused counts as published."""
    send = publisher.publish

    async def publish(events: Sequence[Event]) -> Sequence[Outcome]:
        await send(events)
        return [PUBLISHED] * len(events)

    publisher.publish = publish


async def _current(store: SqlStore, grant: Grant) -> Grant:
    """The grant with whatever token and owner the lease has now."""
    text = "SELECT token, owner FROM {lease} WHERE stream = :stream AND shard = :shard"
    rows = await store._db.fetch(store._statement(text), stream=grant.stream, shard=grant.shard)
    return grant._replace(token=rows[0][0], worker=rows[0][1] or grant.worker)


def settle_without_the_token(store: Any, publisher: Any) -> None:
    """A stale owner settles all the same."""
    settle = store.settle

    async def careless(grant: Grant, settlement: Settlement) -> Collection[str]:
        try:
            done: Collection[str] = await settle(grant, settlement)
            return done
        except LeaseLost:
            return await settle(await _current(store, grant), settlement)

    store.settle = careless


def settle_that_crosses_a_take_over(store: Any, publisher: Any) -> None:
    """The lease is checked, and the events are changed a moment later."""
    settle = store.settle

    async def careless(grant: Grant, settlement: Settlement) -> Collection[str]:
        await asyncio.sleep(0.05)
        return await settle(await _current(store, grant), settlement)

    store.settle = careless


def read_without_the_token(store: Any, publisher: Any) -> None:
    """A stale owner reads, and goes on publishing."""
    read = store.read

    async def careless(grant: Grant, limit: int, max_bytes: int) -> Sequence[Event]:
        return await read(await _current(store, grant), limit, max_bytes)

    store.read = careless
    settle_without_the_token(store, publisher)


def order_by_id(store: Any, publisher: Any) -> None:
    """In order of the writers' clocks rather than of commits."""
    read = store.read

    async def careless(grant: Grant, limit: int, max_bytes: int) -> Sequence[Event]:
        return sorted(await read(grant, limit, max_bytes), key=lambda event: event.id)

    store.read = careless


def only_after_the_last_seen(store: Any, publisher: Any) -> None:
    """What commits late, with a lower number, is never seen."""
    read = store.read
    seen: dict[int, int] = {}

    async def careless(grant: Grant, limit: int, max_bytes: int) -> Sequence[Event]:
        last = seen.get(grant.shard, 0)
        events = [event for event in await read(grant, limit, max_bytes) if event.seq > last]
        seen[grant.shard] = max([last, *(event.seq for event in events)])
        return events

    store.read = careless


def prune_that_ignores_the_state(store: Any, publisher: Any) -> None:
    """Old is old, published or not."""
    prune = store.prune_published

    async def careless(keep_seconds: float, limit: int, after: Any = None) -> Any:
        text = "DELETE FROM {event} WHERE id IN (SELECT id FROM {event} WHERE status <> 'published' LIMIT 3)"
        await store._db.execute(store._statement(text))
        return await prune(keep_seconds, limit, after)

    store.prune_published = careless


def outage_charged(store: Any, publisher: Any) -> None:
    """A destination that is away costs an attempt."""
    send = publisher.publish

    async def publish(events: Sequence[Event]) -> Sequence[Outcome]:
        task = asyncio.create_task(send(events))
        done, _ = await asyncio.wait([task], timeout=0.5)
        if done:
            outcomes: Sequence[Outcome] = task.result()
            return [retry(each.error or "") if each.is_outage else each for each in outcomes]
        _background.add(task)
        task.add_done_callback(_background.discard)
        return [retry("the destination did not answer")] * len(events)

    publisher.publish = publish


def leases_by_the_workers_clock(store: Any, publisher: Any) -> None:
    """A worker whose clock is ahead takes what others own."""
    take = store.take

    async def careless(stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        text = "UPDATE {lease} SET lease_until = {later:past} WHERE stream = :stream AND owner <> :worker AND lease_until < {later:mine}"
        ahead = time.time() - (await _database_clock(store))
        await store._db.execute(store._statement(text), stream=stream, worker=worker, past=-1.0, mine=ahead)
        return await take(stream, worker, limit, seconds)

    async def poll(stream: str, worker: str, grants: Any) -> Any:
        work = await look(stream, worker, grants)
        return replace(work, free=max(work.free, 1))

    look = store.poll
    store.poll = poll
    store.take = careless


async def _database_clock(store: SqlStore) -> float:
    value = (await store._db.fetch(store._sql["clock"]))[0][0]
    return float(store._as_instant(value).timestamp())


def payload_serialised_again(store: Any, publisher: Any) -> None:
    """The same JSON in other bytes."""
    send = publisher.publish

    async def publish(events: Sequence[Event]) -> Sequence[Outcome]:
        again = [event._replace(payload=json.dumps(json.loads(event.payload), indent=1).encode()) for event in events]
        return await send(again)

    publisher.publish = publish


def retry_overtaken_by_its_key(store: Any, publisher: Any) -> None:
    """A failed event does not hold back what follows."""
    settle = store.settle

    async def careless(grant: Grant, settlement: Settlement) -> Collection[str]:
        failed = [failure._replace(delay=0.3) for failure in settlement.failed]
        return await settle(grant, replace(settlement, failed=failed, aside={}, held=()))

    store.settle = careless


def whole_batch_declared_dead(store: Any, publisher: Any) -> None:
    """One refused event condemns those that were sent with it."""
    send = publisher.publish

    async def publish(events: Sequence[Event]) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = await send(events)
        if any(outcome.result is Result.REJECTED for outcome in outcomes):
            return [rejected("its batch was refused")] * len(events)
        return outcomes

    publisher.publish = publish


def dead_before_its_attempts(store: Any, publisher: Any) -> None:
    """The first failure is the last."""
    settle = store.settle

    async def careless(grant: Grant, settlement: Settlement) -> Collection[str]:
        dead = [*settlement.dead, *(Failure(each.event, each.error, each.attempts) for each in settlement.failed)]
        return await settle(grant, replace(settlement, dead=dead, failed=(), aside={}))

    store.settle = careless


def replay_that_forgets_its_key(store: Any, publisher: Any) -> None:
    """An operator's replay brings the event back, and its key stays blocked."""
    store._sql["free_key"] = store._statement(
        "UPDATE {blocked_key} SET mode = mode WHERE stream = :stream AND shard = :shard AND key = :key AND dead_head = :id"
    )


PLANTED: Final[dict[str, Callable[[Any, Any], None]]] = {
    each.__name__: each
    for each in (
        settle_before_the_acknowledgement,
        delivery_report_ignored,
        settle_without_the_token,
        settle_that_crosses_a_take_over,
        read_without_the_token,
        order_by_id,
        only_after_the_last_seen,
        prune_that_ignores_the_state,
        outage_charged,
        leases_by_the_workers_clock,
        payload_serialised_again,
        retry_overtaken_by_its_key,
        whole_batch_declared_dead,
        dead_before_its_attempts,
        replay_that_forgets_its_key,
    )
}
