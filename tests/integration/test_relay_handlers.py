"""Handlers behind a relay: what they raise, their own limits, and how many run at once."""

import asyncio
from typing import Any

import pytest

from pillarbox import Handlers, Outage
from pillarbox.conformance.events import make_event
from pillarbox.event import Event, Status
from pillarbox.relay import Fixed
from pillarbox.store import Store
from tests.integration.relays import (
    STREAM,
    CircuitState,
    SqlOutbox,
    attempts,
    eventually,
    move,
    numbered,
    relay,
    settled,
    stream,
    until,
)

pytestmark = pytest.mark.asyncio

NEVER = Fixed(3600.0)
BOTH = pytest.mark.parametrize("mode", ["ordered", "queue"])


def of_types(*types: str) -> list[Event]:
    return [make_event(key=type_, type=type_, stream=STREAM) for type_ in types]


async def due(store: Store, mode: str) -> None:
    """The time of every retry has come."""
    await move(store, "event" if mode == "queue" else "held_key", "next_attempt_at", 0.0)


@BOTH
async def test_a_returned_value_is_not_a_failure(sqlite: SqlOutbox, store: Store, mode: str) -> None:
    handlers, calls = Handlers(), []

    @handlers.on("*")
    async def handler(event: Event) -> bool:
        calls.append(event.id)
        return False

    await store.add(numbered("k", 3))
    async with relay(sqlite(), stream(handlers, mode=mode)):
        await settled(store, {Status.PUBLISHED: 3})
    assert len(calls) == 3


@BOTH
async def test_an_outage_in_a_handler_opens_the_circuit_and_charges_nothing(
    sqlite: SqlOutbox, store: Store, mode: str
) -> None:
    handlers, circuit, is_away = Handlers(), CircuitState(), True

    @handlers.on("*")
    async def handler(event: Event) -> None:
        if is_away:
            raise Outage("the mail server is away")

    await store.add(numbered("k", 3))
    async with relay(sqlite(), stream(handlers, mode=mode, max_attempts=1), observers=[circuit]):
        await until(lambda: circuit.state == "open")
        is_away = False
        await settled(store, {Status.PUBLISHED: 3})
    assert set(await attempts(store)) == {1}  # of the success


@BOTH
async def test_a_type_without_a_handler_waits_until_it_has_one(sqlite: SqlOutbox, store: Store, mode: str) -> None:
    handlers, done = Handlers(), []
    handlers.on("old")(lambda event: done.append(event.type))
    await store.add([make_event(key="k", type=type_, stream=STREAM) for type_ in ("old", "new")])
    await store.add(of_types("old", "old"))
    async with relay(sqlite(), stream(handlers, mode=mode, max_attempts=1)):
        await settled(store, {Status.PUBLISHED: 3, Status.FAILED: 1})
        handlers.on("new")(lambda event: done.append(event.type))
        await due(store, mode)
        await settled(store, {Status.PUBLISHED: 4})
    assert done == ["old", "old", "old", "new"]
    assert set(await attempts(store)) == {1}  # of the success


@BOTH
async def test_a_handler_has_a_limit_of_its_own(sqlite: SqlOutbox, store: Store, mode: str) -> None:
    handlers, calls = Handlers(), []

    @handlers.on("brief", max_attempts=2)
    @handlers.on("patient")
    async def handler(event: Event) -> None:
        calls.append(event.type)
        raise ValueError("boom")

    await store.add(of_types("brief", "patient"))
    async with relay(sqlite(), stream(handlers, mode=mode, max_attempts=4)):
        await settled(store, {Status.DEAD: 2})
    assert sorted(calls) == ["brief"] * 2 + ["patient"] * 4
    assert sorted(letter.event.attempts for letter in await store.dead_letters(STREAM)) == [2, 4]


@BOTH
@pytest.mark.parametrize("retry", [Fixed(0.0), "fixed:0s"])
async def test_a_handler_has_a_retry_policy_of_its_own(sqlite: SqlOutbox, store: Store, mode: str, retry: Any) -> None:
    handlers, calls = Handlers(), []

    @handlers.on("quick", retry=retry)
    @handlers.on("slow")
    async def handler(event: Event) -> None:
        calls.append(event.type)
        raise ValueError("boom")

    await store.add(of_types("quick", "slow"))
    async with relay(sqlite(), stream(handlers, mode=mode, retry=NEVER, max_attempts=3)):
        await settled(store, {Status.DEAD: 1, Status.FAILED: 1})
    assert sorted(calls) == ["quick"] * 3 + ["slow"]


@BOTH
async def test_as_many_handlers_run_at_once_as_were_asked_for(sqlite: SqlOutbox, store: Store, mode: str) -> None:
    handlers, running, free = Handlers(concurrency=32), set(), asyncio.Event()

    @handlers.on("*")
    async def handler(event: Event) -> None:
        running.add(event.id)
        await free.wait()

    await store.add([make_event(stream=STREAM) for _ in range(40)])
    async with relay(sqlite(), stream(handlers, mode=mode)):

        async def count() -> int:
            return len(running)

        await eventually(count, lambda found: found >= 32)
        for _ in range(20):  # another one would begin within a few rounds of the loop
            await asyncio.sleep(0)
        assert len(running) == 32
        free.set()
        await settled(store, {Status.PUBLISHED: 40})
