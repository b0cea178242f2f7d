"""Bugs to be caught: each is a mistake that a relay could have, switched on by its name in the workers of a run.

They change the objects of one process, by hand, from outside of the library.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Final, TypeVar
from uuid import UUID

from pillarbox import Event
from pillarbox.errors import LeaseLost
from pillarbox.publisher import PUBLISHED, Outcome, Result, rejected, retry
from pillarbox.store import Claim, Failure, Grant, Settlement
from pillarbox.stores.sql import SqlStore

# A bug of the writers, and not of the relays: what is rolled back leaves its event behind.
EVENT_IN_A_TRANSACTION_OF_ITS_OWN: Final = "event_in_a_transaction_of_its_own"
_BUFFERED_SECONDS: Final = 0.5
_CROSSING_SECONDS: Final = 0.2
_PATIENT_SECONDS: Final = 2.0
_background: set[asyncio.Task[Any]] = set()
T = TypeVar("T")


def _keep(task: asyncio.Task[Any]) -> None:
    _background.add(task)
    task.add_done_callback(_background.discard)


def plant(name: str | None, store: Any, publisher: Any) -> None:
    """Change this store and this publisher so that they have the bug."""
    if name is not None and name != EVENT_IN_A_TRANSACTION_OF_ITS_OWN:
        _OF_RELAYS[name](store, publisher)


def settle_before_the_acknowledgement(store: Any, publisher: Any) -> None:
    """Sent is taken for confirmed."""
    send = publisher.publish

    async def later(events: Sequence[Event]) -> None:
        await asyncio.sleep(_BUFFERED_SECONDS)
        await send(events)

    async def publish(events: Sequence[Event]) -> Sequence[Outcome]:
        _keep(asyncio.create_task(later(events)))
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


async def _with_any_token(store: SqlStore, grant: Grant, call: Callable[[Grant], Awaitable[T]]) -> T:
    """As the owner that the lease has now, which may be another one before the call arrives: then once more, so that
    the bug shows each time."""
    deadline = time.monotonic() + _PATIENT_SECONDS
    while True:
        try:
            return await call(await _current(store, grant))
        except LeaseLost:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.01)


def settle_without_the_token(store: Any, publisher: Any) -> None:
    """A stale owner settles all the same."""
    settle = store.settle

    async def careless(grant: Grant, settlement: Settlement) -> Collection[str]:
        done: Collection[str]
        try:
            done = await settle(grant, settlement)
        except LeaseLost:
            done = await _with_any_token(store, grant, lambda current: settle(current, settlement))
        return done

    store.settle = careless


def settle_that_crosses_a_take_over(store: Any, publisher: Any) -> None:
    """The lease was checked by the read, and the events are changed a moment later."""
    settle = store.settle

    async def careless(grant: Grant, settlement: Settlement) -> Collection[str]:
        await asyncio.sleep(_CROSSING_SECONDS)
        done: Collection[str] = await _with_any_token(store, grant, lambda current: settle(current, settlement))
        return done

    store.settle = careless


def read_without_the_token(store: Any, publisher: Any) -> None:
    """A stale owner reads, and goes on publishing."""
    read = store.read

    async def careless(grant: Grant, limit: int, max_bytes: int) -> Sequence[Event]:
        deadline = time.monotonic() + _PATIENT_SECONDS
        while True:
            events: Sequence[Event] = await _with_any_token(store, grant, lambda now: read(now, limit, max_bytes))
            # The new owner leaves little to read: wait for it, so that the bug shows each time.
            if events or (await _current(store, grant)).token == grant.token or time.monotonic() > deadline:
                return events
            await asyncio.sleep(0.01)

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
        _keep(task)
        return [retry("the destination did not answer")] * len(events)

    publisher.publish = publish


def leases_by_the_workers_clock(store: Any, publisher: Any) -> None:
    """A worker whose clock is ahead takes what others own."""
    take, look = store.take, store.poll

    async def careless(stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        now = (await store._db.fetch(store._sql["clock"]))[0][0]
        ahead = time.time() - store._as_instant(now).timestamp()
        now_here = store.dialect.later.format(f"{ahead:.3f}")
        text = "SELECT shard FROM {lease} WHERE stream = :stream AND (owner IS NULL OR lease_until < NOW) LIMIT :limit"
        store._sql["takeable"] = store._statement(text.replace("NOW", now_here))
        grants: Sequence[Grant] = await take(stream, worker, limit, seconds)
        return grants

    async def poll(stream: str, worker: str, grants: Any) -> Any:
        return replace(await look(stream, worker, grants), free=1)

    store.poll = poll
    store.take = careless


def _again(payload: bytes) -> bytes:
    try:
        return json.dumps(json.loads(payload), indent=1).encode()
    except (ValueError, RecursionError):
        return payload


def payload_serialised_again(store: Any, publisher: Any) -> None:
    """The same JSON in other bytes."""
    send = publisher.publish

    async def publish(events: Sequence[Event]) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = await send([event._replace(payload=_again(event.payload)) for event in events])
        return outcomes

    publisher.publish = publish


def retry_overtaken_by_its_key(store: Any, publisher: Any) -> None:
    """A failed event does not hold back what follows."""
    settle = store.settle

    async def careless(grant: Grant, settlement: Settlement) -> Collection[str]:
        failed = [failure._replace(delay=0.3) for failure in settlement.failed]
        done: Collection[str] = await settle(grant, replace(settlement, failed=failed, aside={}, held=()))
        return done

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
        done: Collection[str] = await settle(grant, replace(settlement, dead=dead, failed=(), aside={}))
        return done

    store.settle = careless


def replay_that_forgets_its_key(store: Any, publisher: Any) -> None:
    """An operator's replay brings the event back, and its key stays blocked."""
    same = "UPDATE {blocked_key} SET mode = mode WHERE stream = :stream AND shard = :shard AND key = :key"
    store._sql["free_key"] = store._statement(f"{same} AND dead_head = :id")


def sent_again_to_be_sure(store: Any, publisher: Any) -> None:
    """What was confirmed is sent once more, as by a producer that is not idempotent."""
    send = publisher.publish
    calls = count()

    async def publish(events: Sequence[Event]) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = await send(events)
        if next(calls) % 10 == 0:
            await send([event for event, each in zip(events, outcomes, strict=True) if each == PUBLISHED])
        return outcomes

    publisher.publish = publish


def take_over_that_resets_what_is_published(store: Any, publisher: Any) -> None:
    """A new owner begins with everything that is young, whatever became of it."""
    take = store.take

    async def careless(stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        grants: Sequence[Grant] = await take(stream, worker, limit, seconds)
        text = """UPDATE {event} SET status = 'pending' WHERE stream = :stream AND shard = :shard
            AND status = 'published' AND published_at > {later:young}"""
        for grant in grants:
            await store._db.execute(store._statement(text), stream=stream, shard=grant.shard, young=-5.0)
        return grants

    store.take = careless


def claim_settled_without_its_token(store: Any, publisher: Any) -> None:
    """A worker whose event was rescued settles it all the same."""
    settle_claims = store.settle_claims

    async def careless(claims: Sequence[Claim], settlement: Settlement, refund: Sequence[UUID] = ()) -> int:
        refused: int = await settle_claims(claims, settlement, refund)
        if refused:
            ids = [claim.event.id for claim in claims]
            rows = await store._db.fetch(store._sql["claimed"], ids=ids)
            now = {store._as_uuid(row[0]): row[-1] for row in rows}
            again = [claim._replace(token=now.get(claim.event.id, claim.token)) for claim in claims]
            await settle_claims(again, settlement, refund)
        return 0

    store.settle_claims = careless


def claim_of_what_another_has(store: Any, publisher: Any) -> None:
    """What is being worked is claimed as well."""
    text = """SELECT id FROM {event} WHERE stream = :stream AND shard = :shard AND status IN ('pending', 'processing')
        ORDER BY seq LIMIT :limit"""
    store._sql["ready_ids"] = store._statement(text)


_OF_RELAYS: Final[dict[str, Callable[[Any, Any], None]]] = {
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
        sent_again_to_be_sure,
        take_over_that_resets_what_is_published,
        claim_settled_without_its_token,
        claim_of_what_another_has,
    )
}
PLANTED: Final = (*_OF_RELAYS, EVENT_IN_A_TRANSACTION_OF_ITS_OWN)
