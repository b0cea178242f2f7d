"""Draining: until nothing of a stream is ready, whoever has it."""

import logging

import pytest

from pillarbox.errors import NotDrained
from pillarbox.event import Mode, Status
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.store import Store
from tests.integration.commands import Command
from tests.integration.relays import STREAM, Outbox, SqlOutbox, counts, key_of, mixed, numbered, relay, stream

KEYS = [key_of(shard) for shard in range(4)]


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_a_drain_waits_for_the_lease_of_a_worker_that_died(outbox: Outbox, store: Store, mode: str) -> None:
    await store.add(mixed(KEYS, 3))
    await store.announce(STREAM, Mode(mode), "memory")
    await store.join(STREAM, "ghost", 1.0)
    if mode == "ordered":
        assert len(await store.take(STREAM, "ghost", 4, 1.0)) == 4
    else:
        claims = [await store.claim(STREAM, shard, "ghost", 100, 1.0) for shard in range(4)]
        assert sum(map(len, claims)) == 12
    to = MemoryPublisher()
    async with relay(outbox(), stream(to, mode=mode), rescue_every=0.1) as running:
        await running.drain()
        assert await counts(store) == {Status.PUBLISHED: 12}
    assert len(to.deliveries) == 12


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_a_drain_of_a_paused_stream_says_so(sqlite: SqlOutbox, store: Store, mode: str) -> None:
    await store.pause(STREAM, "olga")
    async with relay(sqlite(), stream(MemoryPublisher(), mode=mode)) as running:
        await running.drain()  # there is nothing to wait for
        await store.add(numbered("k", 3))
        with pytest.raises(NotDrained, match=f"stream '{STREAM}' is paused, and 3 of its events wait; resume it with"):
            await running.drain()
        await store.resume(STREAM, "olga")
        await running.drain()
        assert await counts(store) == {Status.PUBLISHED: 3}


def test_the_command_fails_for_a_paused_stream(on_sqlite: Command) -> None:
    on_sqlite("events", "add", "order.created", "{}")
    assert on_sqlite("streams", "pause", "default").code == 0
    drained = on_sqlite("relay", "--to", "stdout:", "--drain", "--log-level", "error")
    drained.failed(1, "stream 'default' is paused, and 1 of its events wait", "pillarbox streams resume default")
    assert on_sqlite("streams", "resume", "default").code == 0
    assert on_sqlite("relay", "--to", "stdout:", "--drain").code == 0


def test_the_command_says_what_is_left_for_later(on_sqlite: Command) -> None:
    on_sqlite("events", "add", "order.created", "{}")
    program = on_sqlite.folder / "shop.py"
    program.write_text(
        "from pillarbox import Fixed, Handlers, Relay, Stream\n"
        "handlers = Handlers()\n"
        "@handlers.on('order.created')\n"
        "def fail(event):\n"
        "    raise RuntimeError('not now')\n"
        f"relay = Relay('sqlite:///{on_sqlite.folder}/shop.db', [Stream('default', handlers, retry=Fixed(3600))])\n"
    )
    drained = on_sqlite("relay", "shop:relay", "--drain")
    assert drained.code == 0, drained.err
    assert "stream 'default' is drained; still in the outbox: 1 waiting for a retry" in drained.err


@pytest.mark.asyncio
async def test_a_take_over_is_one_line_for_each_worker_that_died(
    outbox: Outbox, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if getattr(record, "action", None) == "took_over"]

    await store.announce(STREAM, Mode.ORDERED, "memory")
    await store.join(STREAM, "ghost", -1.0)
    assert len(await store.take(STREAM, "ghost", 3, -1.0)) == 3
    await store.join(STREAM, "other", -1.0)
    (grant,) = [each for each in await store.take(STREAM, "other", 4, -1.0) if each.shard == 3]
    await store.take(STREAM, "ghost", 3, -1.0)
    assert grant.previous is None
    for _ in range(2):
        async with relay(outbox(), stream(MemoryPublisher())) as running:
            await running.drain()
    lines = told()
    assert len(lines) == len(set(lines))
    assert sum("from worker ghost, which died or hung" in line for line in lines) == 1
