"""Polling is the truth, and a wake-up makes it early."""

import math
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pillarbox.conformance.probes import probe_of
from pillarbox.conformance.store_setup import read, settle
from pillarbox.event import Mode, Status
from pillarbox.publisher import PublisherFeatures
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay.pace import WAKE_ABOVE, Pace
from pillarbox.store import Failure, Settlement
from pillarbox.stores.postgres import PostgresStore, parts
from pillarbox.stores.sql import SqlStore
from servers import Postgres
from tests.integration.relays import (
    STREAM,
    SqlOutbox,
    by_key,
    eventually,
    numbered,
    query,
    relay,
    settled,
    stream,
    until,
)

pytestmark = pytest.mark.asyncio

ASLEEP = "SELECT stream FROM {sleeper} ORDER BY stream"


class Polls:
    """Counts the looks of a relay at its database."""

    def __init__(self, store: SqlStore, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.idle = 0
        self._poll = store.poll
        patch.setattr(store, "poll", self)

    async def __call__(self, *arguments: Any) -> Any:
        work = await self._poll(*arguments)
        self.count += 1
        self.idle += not work.ready
        return work


async def asleep(store: SqlStore, *streams: str) -> None:
    await eventually(lambda: query(store, ASLEEP), lambda rows: [row[0] for row in rows] == sorted(streams))


def wake_ups(store: SqlStore, patch: pytest.MonkeyPatch) -> list[str]:
    """The streams of which the store tells, as it does."""
    told: list[str] = []
    real_open = store.open

    async def open_noting(on_wake: Callable[[str], None]) -> None:
        def note(name: str) -> None:
            told.append(name)
            on_wake(name)

        await real_open(note)

    patch.setattr(store, "open", open_noting)
    return told


@pytest.fixture
def told_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a relay sleeps, only a wake-up makes it ask again."""
    polled = Pace.polled

    def never_again(pace: Pace, *arguments: Any, **named: Any) -> None:
        polled(pace, *arguments, **named)
        if pace.told and pace.poll_at > 0:
            pace.poll_at = math.inf

    monkeypatch.setattr(Pace, "polled", never_again)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.usefixtures("told_only")
async def test_an_event_wakes_a_relay_that_sleeps(pg: SqlOutbox, store: SqlStore, joint: bool) -> None:
    to = MemoryPublisher(features=PublisherFeatures(joint=joint))
    async with relay(pg(), stream(to)):
        await asleep(store, STREAM)
        for number in (1, 2, 3):
            await store.add(numbered("k", 1, first=number))
            await to.wait_for(number)
        await settled(store, {Status.PUBLISHED: 3})
        await asleep(store, STREAM)
    assert by_key(to.deliveries) == {"k": [1, 2, 3]}
    assert await query(store, ASLEEP) == []


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.usefixtures("told_only")
async def test_a_wake_up_in_the_middle_of_a_turn_is_not_lost(
    pg: SqlOutbox, store: SqlStore, monkeypatch: pytest.MonkeyPatch, joint: bool
) -> None:
    """The turn has read its shard before the second event came, and nobody tells of that event again."""
    to = MemoryPublisher(features=PublisherFeatures(joint=joint))
    own = pg()
    told = wake_ups(own, monkeypatch)
    async with relay(own, stream(to)):
        await asleep(store, STREAM)
        to.hold()
        await store.add(numbered("k", 1))
        await to.wait_until_held()
        await store.add(numbered("k", 1, first=2))
        await until(lambda: len(told) == 2)
        to.release()
        await to.wait_for(2)
    assert by_key(to.deliveries) == {"k": [1, 2]}


@pytest.mark.usefixtures("told_only")
async def test_an_event_that_comes_just_before_the_relay_sleeps_is_found(
    pg: SqlOutbox, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer saw nobody asleep and tells nobody, and the last look was before it."""
    to = MemoryPublisher(features=PublisherFeatures(joint=True))
    own = pg()
    doze = own.doze

    async def too_late(stream: str, worker: str, asleep: bool) -> None:
        if asleep:
            await store.add(numbered("k", 1))
        await doze(stream, worker, asleep)

    monkeypatch.setattr(own, "doze", too_late)
    async with relay(own, stream(to)):
        await to.wait_for(1)


async def test_a_relay_with_many_events_asks_by_itself_and_sleeps_again_after_them(
    pg: SqlOutbox, store: SqlStore
) -> None:
    """A NOTIFY for each of many events would hold up their writers."""
    to = MemoryPublisher(features=PublisherFeatures(joint=True))
    async with relay(pg(), stream(to)):
        await asleep(store, STREAM)
        await store.add(numbered("k", 2 * WAKE_ABOVE))
        await asleep(store)
        await to.wait_for(2 * WAKE_ABOVE)
        await asleep(store, STREAM)


async def test_a_relay_that_does_not_ask_is_not_woken(
    pg: SqlOutbox, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = pg(wake_up=False)
    polls = Polls(own, monkeypatch)
    to = MemoryPublisher()
    async with relay(own, stream(to, poll_limit=1.0)):
        await until(lambda: polls.idle > 3)
        assert await query(store, ASLEEP) == []
        before = polls.count
        await store.add(numbered("k", 1))
        await to.wait_for(1)
        assert polls.count > before, "found by looking"


async def test_one_stream_that_is_written_to_does_not_wake_another(
    pg: SqlOutbox, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every write to a busy stream is a NOTIFY, which serialises the commits of the whole server."""
    to, other = MemoryPublisher(), MemoryPublisher()
    own = pg()
    told = wake_ups(own, monkeypatch)
    async with relay(own, stream(to, poll_limit=10), stream(other, "quiet", poll_limit=10)):
        await asleep(store, STREAM, "quiet")
        await store.add(numbered("k", 1))
        await to.wait_for(1)
        await until(lambda: told)
        # Told in the order of commits: what belongs to the first write has come before this.
        await asleep(store, STREAM, "quiet")
        await store.add(numbered("k", 1, first=2))
        await to.wait_for(2)
    assert set(told) == {STREAM}


async def test_a_relay_whose_listening_connection_is_cut_listens_again(pg: SqlOutbox, store: SqlStore) -> None:
    to = MemoryPublisher()
    channel = probe_of(store).tables["channel"]
    listening = f"SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%{channel}%'"
    async with relay(pg(), stream(to, poll_limit=10)):
        await asleep(store, STREAM)
        ((first,),) = await eventually(lambda: query(store, listening), lambda rows: len(rows) == 1)
        await probe_of(store).run(f"SELECT pg_terminate_backend({first})")
        await eventually(lambda: query(store, listening), lambda rows: len(rows) == 1 and rows[0][0] != first)
        await store.add(numbered("k", 1))
        await to.wait_for(1)


async def test_a_writer_wakes_a_relay_of_an_outbox_with_the_longest_names(postgres: Postgres) -> None:
    schema = f"s{os.getpid()}".ljust(40, "s")
    store = PostgresStore(postgres.url, prefix="p" * 40, schema=schema)
    to = MemoryPublisher()
    await probe_of(store).run(f"CREATE SCHEMA {schema}")
    await store.migrate()
    async with relay(store, stream(to, poll_limit=10)):
        await asleep(store, STREAM)
        await store.add(numbered("k", 1))
        await to.wait_for(1)
    await probe_of(store).run(f"DROP SCHEMA {schema} CASCADE")
    await store.close()


async def test_an_event_that_returns_is_found_in_every_stream_however_busy_another_is(
    pg: SqlOutbox, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that come back below the floor are found by a sweep; each stream must get its own."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: clock.now))
    reader = pg()
    await reader.open()
    grants = {}
    for name in ("busy", "quiet"):
        await reader.announce(name, Mode.ORDERED, "memory")
        await reader.join(name, "ann", 60)
        grants[name] = await reader.take(name, "ann", 4, 60)
    (failed,) = numbered(None, 1, stream="quiet")
    await store.add([failed, *numbered("k", 50, stream="quiet")])
    for grant in grants["quiet"]:
        for event in await read(reader, grant, 100, 10**6):
            failures = [Failure(event, "bad", 1, -1.0)] if event.id == failed.id else []
            await settle(reader, Settlement(grant, failed=failures, published=[] if failures else [event]))
    for _ in range(20):
        clock.now += 0.3
        assert not await reader.read(grants["quiet"], 100, 10**6)
    await reader.poll("quiet", "ann", grants["quiet"])
    assert await store.reenter_due("quiet", 10) == 1
    assert not (await reader.poll("quiet", "ann", grants["quiet"])).ready, "it stands below the floor"
    # Long after the last sweep of either: the busy stream asks first, and both must look from the beginning.
    clock.now += 600
    await reader.poll("busy", "ann", grants["busy"])
    work = await reader.poll("quiet", "ann", grants["quiet"])
    await reader.close()
    assert work.ready
