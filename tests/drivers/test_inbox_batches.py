"""Handlers that run once for each event of a list, on every driver and its real database."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from pillarbox import Event, Handlers, Outage, Outbox
from pillarbox.batch import Batch
from pillarbox.drivers import driver_of
from pillarbox.inbox import once
from pillarbox.publisher import PUBLISHED
from tests.drivers.desk import Desk
from tests.drivers.test_inbox_once import ALL, COPIES, ON_SERVERS, close, handle_of, is_awaited, kill, nothing

EVENTS = 12


class Unlucky(Exception):
    """A handler fails after its work."""


def events_of(count: int = EVENTS) -> list[Event]:
    return [Outbox().event("order.created", {}) for _ in range(count)]


def decorated(desk: Desk, handle: Any, work: Callable[[Any], Any]) -> Callable[[list[Event]], Any]:
    """An async or a plain handler that writes the effects of its events and then runs ``work(tx)``."""

    async def awaited(events: list[Event], tx: Any) -> None:
        for event in events:
            await desk.apply(tx, event)
        returned = work(tx)
        if returned is not None:
            await returned

    def plain(events: list[Event], tx: Any) -> None:
        for event in events:
            desk.apply(tx, event)
        work(tx)

    handler: Any = awaited if is_awaited(desk.app) else plain
    return desk.inbox().once(handle)(handler)


async def effects(desk: Desk, events: Sequence[Event]) -> list[int]:
    return [await desk.effects(event) for event in events]


@ALL
@pytest.mark.asyncio
async def test_a_list_is_applied_in_one_transaction_without_its_copies(desk: Desk) -> None:
    handle, seen = await handle_of(desk.app), events_of(5)
    handler, handlers = decorated(desk, handle, nothing), Handlers()
    handlers.on_batch("*")(handler)
    await handlers.open()
    assert await handlers.publish(Batch.of(seen[:3])) == [PUBLISHED] * 3
    assert await handlers.publish(Batch.of([*seen, seen[4]])) == [PUBLISHED] * 6
    assert await handlers.publish(Batch.of(seen)) == [PUBLISHED] * 5
    await handlers.close()
    await close(desk.app, handle)
    assert await effects(desk, seen) == [1] * 5


@ALL
@pytest.mark.asyncio
async def test_overlapping_batches_at_the_same_time_have_one_effect(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the handler fails at random after its work, and each copy has other events in another order."""
    monkeypatch.setattr(once, "_HANDLER_ATTEMPTS", 1000)  # MySQL ends a deadlock where it likes
    chance, lock, events = random.Random(10), threading.Lock(), events_of()
    batches = [chance.sample(events, EVENTS - 2) for _ in range(COPIES)]

    def fail_at_random(tx: Any) -> None:
        with lock:
            is_unlucky = chance.random() < 0.3
        if is_unlucky:
            raise Unlucky

    handle = await handle_of(desk.app)
    handler = decorated(desk, handle, fail_at_random)

    async def deliver(batch: list[Event]) -> None:
        while True:
            with suppress(Unlucky):
                await handler(batch)
                return

    def deliver_plain(batch: list[Event]) -> None:
        while True:
            with suppress(Unlucky):
                handler(batch)
                return

    if is_awaited(desk.app):
        await asyncio.gather(*map(deliver, batches))
    else:
        with ThreadPoolExecutor(COPIES) as threads:
            list(threads.map(deliver_plain, batches))
    await close(desk.app, handle)
    assert await effects(desk, events) == [1] * EVENTS


@ON_SERVERS
@pytest.mark.asyncio
async def test_a_lost_connection_leaves_nothing_of_a_batch(desk: Desk) -> None:
    handle, events = await handle_of(desk.app), events_of(3)
    broken = decorated(desk, handle, lambda tx: driver_of(tx).run(kill))
    with pytest.raises(Outage, match="the database of the inbox is away"):
        await (broken(events) if is_awaited(desk.app) else asyncio.to_thread(broken, events))
    await close(desk.app, handle)
    assert await effects(desk, events) == [0] * 3
