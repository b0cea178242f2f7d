"""What an operator reads in the log of a relay."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

import pytest

from pillarbox.event import Mode, Status
from pillarbox.publisher import outage, rejected, retry
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.store import CRASHES_ALONE, Settlement
from pillarbox.stores.sql import SqlStore
from servers import Mongo
from tests.integration.commands import Command
from tests.integration.relays import SqlOutbox, numbered, relay, settled, stream, until
from tests.mongo_outbox import database_url


def told(caplog: pytest.LogCaptureFixture, *actions: str) -> list[tuple[str, str]]:
    found = [record for record in caplog.records if getattr(record, "action", "") in actions]
    return [(record.levelname, record.getMessage()) for record in found]


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_each_failure_and_each_death_is_told(
    sqlite: SqlOutbox, store: SqlStore, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("RuntimeError: busy"), key="bad", times=2)
    to.fail_next(rejected("too large"), key="huge")
    bad, huge = (numbered(key, 1, type="order.created")[0] for key in ("bad", "huge"))
    await store.add([bad, huge])
    async with relay(sqlite(), stream(to, mode=mode, max_attempts=2)):
        await settled(store, {Status.DEAD: 2})
    prefix = "stream 'orders': order.created"
    assert sorted(told(caplog, "failed", "dead")) == sorted(
        [
            ("WARNING", f"{prefix} {bad.id} key bad failed, attempt 1 of 2, next in 0.0 s: RuntimeError: busy"),
            (
                "ERROR",
                f"{prefix} {bad.id} key bad is dead after 2 attempts: RuntimeError: busy; "
                f"see: pillarbox dead show {bad.id}",
            ),
            (
                "ERROR",
                f"{prefix} {huge.id} key huge was rejected and is dead: too large; see: pillarbox dead show {huge.id}",
            ),
        ]
    )


@pytest.mark.asyncio
async def test_nothing_is_told_that_was_not_stored(
    sqlite: SqlOutbox, store: SqlStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own, to = sqlite(), MemoryPublisher()
    refused = asyncio.Event()

    async def lost(settlements: Sequence[Settlement]) -> Mapping[int, Collection[str]]:
        refused.set()
        return {}

    monkeypatch.setattr(own, "settle", lost)
    to.fail_next(rejected("too large"), key="k")
    await store.add(numbered("k", 1))
    async with relay(own, stream(to)):
        await refused.wait()
        await until(lambda: told(caplog, "lease_lost"))
    assert not told(caplog, "failed", "dead")


@pytest.mark.asyncio
async def test_an_outage_and_its_end_have_the_same_level(
    sqlite: SqlOutbox, store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    to = MemoryPublisher()
    to.fail_next(outage("refused"), key="k")
    await store.add(numbered("k", 1))
    async with relay(sqlite(), stream(to)):
        await to.wait_for(1)
    assert [level for level, _ in told(caplog, "circuit_opened", "circuit_closed")] == ["WARNING", "WARNING"]


@pytest.mark.asyncio
async def test_rescued_events_that_die_are_an_error_with_the_command(
    sqlite: SqlOutbox, store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    await store.announce("jobs", Mode.QUEUE, "memory")
    await store.add(numbered("k", 1, stream="jobs"))
    for shard in range(4):
        await store.claim("jobs", shard, "died", 1, -1.0)
    for _ in range(CRASHES_ALONE):
        await store.rescue("jobs", 600.0, 10)
        await store.claim("jobs", None, "died", 1, -1.0)
    async with relay(sqlite(), stream(MemoryPublisher(), "jobs", mode="queue")):
        await settled(store, {Status.DEAD: 1}, "jobs")
        await until(lambda: told(caplog, "rescued"))
    said = "rescued 1 events of workers that died or hang; 1 of them are dead; see: pillarbox dead list --stream jobs"
    assert told(caplog, "rescued") == [("ERROR", f"stream 'jobs': {said}")]


def test_a_driver_does_not_log_payloads(tmp_path_factory: pytest.TempPathFactory, mongo: Mongo) -> None:
    command = Command(tmp_path_factory.mktemp("driver"), database_url(mongo.url, "driver_log"))
    assert command("init").code == 0
    assert command("events", "add", "order.created", '{"card": "4711"}', "--header", "token=geheim").code == 0
    ended = command("relay", "--to", f"file://{command.folder}/out", "--drain", "--log-level", "debug")
    assert ended.code == 0
    assert "serves 'default'" in ended.err
    assert "4711" not in ended.err
    assert "geheim" not in ended.err
