"""Prune, rescue and watch: each run by itself, and by a relay."""

import asyncio
import logging
from typing import Any

import pytest

from pillarbox.conformance.events import make_event
from pillarbox.conformance.probes import probe_of
from pillarbox.errors import ConfigError, Outage, StoreDown
from pillarbox.event import Event, Status
from pillarbox.maintenance.check import Check
from pillarbox.maintenance.prune import Prune, Pruned
from pillarbox.maintenance.rescue import Rescue
from pillarbox.maintenance.watch import Watch
from pillarbox.publisher import outage, rejected, retry
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Fixed
from pillarbox.store import Rescued, Store
from pillarbox.stores.sql import SqlStore
from tests.integration.relays import (
    STREAM,
    InAnHour,
    Outbox,
    SqlOutbox,
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


async def make_states(outbox: Outbox, store: Store) -> None:
    """Five published events, and at least one in each other state of an ordered stream."""
    to = MemoryPublisher()
    to.fail_next(retry("busy"), key="failed")
    to.fail_next(rejected("bad"), key="dead")
    await store.add([*numbered("k", 5), *numbered("failed", 2), *numbered("dead", 1)])
    async with relay(outbox(), stream(to, retry=Fixed(3600.0))):
        await settled(store, {Status.PUBLISHED: 5, Status.FAILED: 1, Status.HELD: 1, Status.DEAD: 1})
    await store.add(numbered("pending", 3))


async def test_only_what_was_published_and_is_old_enough_is_pruned(outbox: Outbox, store: Store) -> None:
    await make_states(outbox, store)
    assert await Prune(store).run_once() == Pruned(0, 0), "nothing is a day old"
    assert await Prune(InAnHour(store), keep_published="30m", keep_dead="2h").run_once() == Pruned(5, 0)
    assert await counts(store) == {Status.PENDING: 3, Status.FAILED: 1, Status.HELD: 1, Status.DEAD: 1}
    assert await Prune(InAnHour(store), keep_published="30m", keep_dead="30m").run_once() == Pruned(0, 1)
    assert await counts(store) == {Status.PENDING: 3, Status.FAILED: 1, Status.HELD: 1}


async def test_prune_goes_through_many_small_batches(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    await store.add(mixed(["a", "b"], 25))
    async with relay(outbox(), stream(to)):
        await settled(store, {Status.PUBLISHED: 50})
    await store.add(numbered("c", 10))
    assert await Prune(InAnHour(store), keep_published="30m", batch=7).run_once() == Pruned(50, 0)
    assert await counts(store) == {Status.PENDING: 10}


async def test_one_run_of_prune_is_limited(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    await store.add(numbered("a", 30))
    async with relay(outbox(), stream(to)):
        await settled(store, {Status.PUBLISHED: 30})
    assert (await Prune(InAnHour(store), keep_published="30m", batch=5, limit=10).run_once()).published == 10
    assert (await Prune(InAnHour(store), keep_published="30m", batch=5).run_once()).published == 20


@pytest.mark.parametrize("policy", ["block", "park"])
async def test_dead_letters_that_an_operator_needs_are_spared(outbox: Outbox, store: Store, policy: str) -> None:
    to = MemoryPublisher()
    to.fail_next(rejected("bad"), key="k")
    to.fail_next(rejected("bad"), type="keyless")
    await store.add([*numbered("k", 1), make_event(key=None, stream=STREAM, type="keyless")])
    async with relay(outbox(), stream(to, on_dead=policy)):
        await settled(store, {Status.DEAD: 2})
    assert await Prune(InAnHour(store), keep_dead="30m").run_once() == Pruned(0, 1)
    assert [letter.event.key for letter in await store.dead_letters()] == ["k"]


async def test_the_inbox_and_the_idempotency_keys_are_pruned(
    outbox: Outbox, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for table in ("inbox", "idempotency"):
        await probe_of(store).remember(table, 9)
    assert await Prune(store).run_once() == Pruned(), "nothing is a day old"
    caplog.set_level(logging.INFO, "pillarbox.maintenance")
    assert await Prune(InAnHour(store), keep_keys="30m", batch=4).run_once() == Pruned(keys=9)
    assert await Prune(InAnHour(store), keep_inbox="30m", batch=4).run_once() == Pruned(inbox=9)
    assert caplog.messages == [
        "pruned 0 published events, 0 dead letters, 0 rows of the inbox and 9 idempotency keys",
        "pruned 0 published events, 0 dead letters, 9 rows of the inbox and 0 idempotency keys",
    ]


async def test_a_relay_prunes_the_inbox_and_the_keys_by_itself(
    outbox: Outbox, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pillarbox.maintenance")
    for table in ("inbox", "idempotency"):
        await probe_of(store).remember(table, 3)

    def pruned() -> list[int]:
        done = [record for record in caplog.records if getattr(record, "action", "") == "pruned"]
        return [sum(getattr(record, kind) for record in done) for kind in ("inbox", "keys")]

    async with relay(outbox(), stream(MemoryPublisher()), keep_inbox=0, keep_keys=0, prune_every=0.05):
        await until(lambda: pruned() == [3, 3])


async def test_a_relay_prunes_by_itself(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    await store.add(numbered("k", 5))
    async with relay(outbox(), stream(to), keep_published=0.2, prune_every=0.1):
        await to.wait_for(5)
        await settled(store, {})


async def test_rescue_takes_from_the_dead_and_from_those_that_hang(outbox: Outbox, store: Store) -> None:
    await store.add(mixed(["a", "b", "c"], 4))
    claims = [claim for shard in range(4) for claim in await store.claim(STREAM, shard, "ann", 100, 3600)]
    assert len(claims) == 12
    assert await Rescue(store, STREAM).run_once() == Rescued(0, 0)
    expired = [claim.event.id for claim in claims[:3]]
    for event_id in expired:
        await move(store, "event", "lease_until", -5.0, id=event_id)
    hanging = claims[3].event.id
    await move(store, "event", "processing_started_at", -700.0, id=hanging)
    assert await Rescue(store, STREAM, batch=2).run_once() == Rescued(4, 0)
    assert await Rescue(store, "other").run_once() == Rescued(0, 0)
    assert await counts(store) == {Status.PROCESSING: 8, Status.FAILED: 4}


async def test_a_suspect_dies_of_its_last_crash_alone(outbox: Outbox, store: Store) -> None:
    await store.add(numbered(None, 1))
    for shard in range(4):
        await store.claim(STREAM, shard, "ann", 10, -1.0)
    rescue = Rescue(store, STREAM)
    assert await rescue.run_once() == Rescued(1, 0)
    for result in (Rescued(1, 0), Rescued(1, 0), Rescued(0, 1)):
        assert len(await store.claim(STREAM, None, "ann", 1, -1.0)) == 1
        assert await rescue.run_once() == result
    (letter,) = await store.dead_letters(STREAM)
    assert letter.event.attempts == 0, "a crash is no attempt"


async def test_a_relay_rescues_in_an_interval_of_its_own(outbox: Outbox, store: Store) -> None:
    await store.pause(STREAM, "olga")
    async with relay(outbox(), stream(MemoryPublisher(), mode="queue", lease=3600), rescue_every=0.05):
        await eventually(store.workers, lambda found: [len(each) for each in found.values()] == [1])
        await store.add(numbered(None, 1))
        for shard in range(4):
            await store.claim(STREAM, shard, "dead", 10, -1.0)
        await settled(store, {Status.FAILED: 1})


async def test_watch_warns_once_of_a_stream_that_nobody_serves(
    outbox: Outbox, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    watch = Watch(store)
    assert await watch.run_once() == []
    await store.add([*numbered("k", 2, stream="oders"), *numbered("k", 1)])
    await store.join(STREAM, "ann", 60)
    assert await watch.run_once() == ["oders"]
    assert await watch.run_once() == ["oders"]
    told = [record for record in caplog.records if getattr(record, "action", None) == "unserved"]
    assert len(told) == 1
    assert "oders" in told[0].getMessage()
    assert "correct the writer" in told[0].getMessage()
    await store.join("oders", "ann", 60)
    assert await watch.run_once() == []
    await store.leave("oders", "ann")
    assert await watch.run_once() == ["oders"]
    assert sum(getattr(record, "action", None) == "unserved" for record in caplog.records) == 2


async def test_a_relay_warns_of_a_stream_that_nobody_serves(
    outbox: Outbox, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await store.add([*numbered("k", 1, stream="oders"), *numbered("k", 1)])

    async def told() -> list[str]:
        return [record.__dict__["stream"] for record in caplog.records if record.__dict__.get("action") == "unserved"]

    class Away(MemoryPublisher):
        async def open(self) -> None:
            raise Outage("nobody answers")

    # Its own stream waits for its destination, as another line says.
    async with relay(outbox(), stream(Away()), watch_every=0.05):
        await eventually(told)
    assert await told() == ["oders"]


async def test_a_service_that_fails_is_tried_again(
    sqlite: SqlOutbox, store: SqlStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch(store, every=0.01)
    troubles: list[Exception] = [StoreDown("away"), ZeroDivisionError("a bug")]
    done = asyncio.Event()

    async def unserved() -> list[str]:
        if troubles:
            raise troubles.pop(0)
        done.set()
        return []

    monkeypatch.setattr(store, "unserved", unserved)
    running = asyncio.create_task(watch.run())
    async with asyncio.timeout(10):
        await done.wait()
        watch.stop()
        await running
    assert sum(getattr(record, "action", None) == "watch_failed" for record in caplog.records) == 2


def broken(attempts: int) -> float:
    raise ZeroDivisionError


def hopeless() -> list[Event]:
    raise ZeroDivisionError


async def test_all_log_lines_of_a_relay_go_to_its_logger(
    sqlite: SqlOutbox, store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    to = MemoryPublisher()
    to.fail_next(outage("refused"), key="k")
    to.fail_next(retry("busy"), key="k")
    await store.add([*numbered("k", 2), *numbered("k", 1, stream="oders"), *numbered(None, 1, stream="jobs")])
    for shard in range(4):
        await store.claim("jobs", shard, "dead", 10, -1.0)
        await store.take(STREAM, "dead", 1, -1.0)
    settings: dict[str, Any] = {"keep_published": 0.05, "prune_every": 0.05, "watch_every": 0.05}
    checks = [Check("pages", hopeless, every=0.05)]
    streams = stream(to, retry=broken), stream(to, "jobs", mode="queue")
    wanted = {"started", "circuit_opened", "circuit_closed", "retry_policy_failed", "unserved", "pruned", "rescued"}
    wanted |= {"reconcile_failed", "stopped"}

    def actions() -> set[str]:
        return {getattr(record, "action", "") for record in caplog.records}

    async with relay(sqlite(), *streams, checks=checks, logger=logging.getLogger("shop.outbox"), **settings):
        await until(lambda: wanted - {"stopped"} <= actions())
    assert wanted <= actions()
    assert {record.name for record in caplog.records if hasattr(record, "action")} == {"shop.outbox"}


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
async def test_an_interval_must_be_above_zero(sqlite: SqlOutbox, store: SqlStore, seconds: float) -> None:
    with pytest.raises(ConfigError, match="prune: every is"):
        Prune(store, every=seconds)
