"""Relays in processes of their own, which are killed, stopped and resumed."""

import asyncio
import random
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from pillarbox.conformance.probes import probe_of
from pillarbox.event import Status
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.sqlite import SqliteStore
from tests.integration.relays import (
    LEASE,
    AnyStore,
    Outbox,
    RelayProcess,
    SqlOutbox,
    attempts,
    by_key,
    counts,
    eventually,
    in_order,
    key_of,
    ledger,
    ledger_by_key,
    ledger_copies,
    mixed,
    numbered,
    owners,
    query,
    relay,
    settled,
    stream,
    until,
)

pytestmark = pytest.mark.asyncio

KEYS = [key_of(shard) for shard in range(4) for _ in range(2)]
SLOW = 0.01  # seconds for an event: a test that acts in the midst of the work has time to


async def test_a_killed_relay_is_taken_over_with_few_copies(
    outbox: Outbox, store: AnyStore, tmp_path: Path, processes: list[RelayProcess]
) -> None:
    book = tmp_path / "ledger"
    await store.add(mixed(KEYS, 50))
    victim = RelayProcess(store, book, seconds_per_event=SLOW, batch=10).start()
    processes.append(victim)
    await until(lambda: len(ledger(book)) > 40)
    victim.send(signal.SIGKILL)
    await victim.ended()
    done = len(ledger(book))
    assert done < 400
    processes.append(RelayProcess(store, book, lease=60).start())
    await settled(store, {Status.PUBLISHED: 400})
    lines = ledger(book)
    assert ledger_by_key(lines) == in_order(KEYS, 50)
    assert ledger_copies(lines) <= 4 * 10, "what it had in flight: a batch on each slot"


async def test_a_terminated_relay_makes_no_copy(
    outbox: Outbox, store: AnyStore, tmp_path: Path, processes: list[RelayProcess]
) -> None:
    book = tmp_path / "ledger"
    await store.add(mixed(KEYS, 50))
    for goal in (40, 120):
        polite = RelayProcess(store, book, seconds_per_event=SLOW, batch=10, lease=60).start()
        processes.append(polite)
        await until(lambda goal=goal: len(ledger(book)) > goal)  # type: ignore[misc]
        polite.send(signal.SIGTERM)
        assert await polite.ended() == 0
        assert await owners(store) == {None: 4}, "everything was let go"
    assert len(ledger(book)) < 400
    processes.append(RelayProcess(store, book, lease=60).start())
    await settled(store, {Status.PUBLISHED: 400})
    lines = ledger(book)
    assert ledger_by_key(lines) == in_order(KEYS, 50)
    assert ledger_copies(lines) == 0


async def asleep(sleeper: RelayProcess, store: AnyStore) -> None:
    """Stopped, and not in a transaction of SQLite, which would lock the file for everybody."""
    while True:
        sleeper.suspend()
        if not isinstance(store, SqliteStore):
            return
        path = probe_of(store).url.removeprefix("sqlite:///")
        connection = sqlite3.connect(path, timeout=0.1, isolation_level=None)
        with closing(connection), suppress(sqlite3.OperationalError):
            connection.execute("BEGIN IMMEDIATE")
            return
        sleeper.send(signal.SIGCONT)
        await asyncio.sleep(0.01)


async def test_a_relay_that_sleeps_past_its_lease_makes_no_disorder(
    outbox: Outbox, store: AnyStore, tmp_path: Path, processes: list[RelayProcess]
) -> None:
    book = tmp_path / "ledger"
    await store.add(mixed(KEYS, 50))
    sleeper = RelayProcess(store, book, seconds_per_event=SLOW, batch=10).start()
    processes.append(sleeper)
    await until(lambda: len(ledger(book)) > 40)
    await asleep(sleeper, store)
    stopped = len(ledger(book))
    assert stopped < 400
    to = MemoryPublisher()
    async with relay(outbox(), stream(to, lease=LEASE)):
        await settled(store, {Status.PUBLISHED: 400})
        sleeper.send(signal.SIGCONT)
        # It finds out, joins again, and both work.
        await eventually(store.workers, lambda found: [len(each) for each in found.values()] == [2])
        await store.add(mixed(KEYS, 5, first=51))
        await settled(store, {Status.PUBLISHED: 440})
    lines = ledger(book)
    before, after = lines[:stopped], lines[stopped:]
    mine = by_key(to.deliveries)
    told = ledger_by_key(before)
    stale = [line for line in after if line.n <= 50]
    assert len(stale) <= 4 * 10, "no more than what it had in flight"
    for key in KEYS:
        seen = dict.fromkeys([*told.get(key, []), *[n for n in mine.get(key, []) if n <= 50]])
        assert list(seen) == list(range(1, 51))
    assert set(await attempts(store)) == {1}, "no stale settle was written"


async def crash_until_dead(
    store: AnyStore, book: Path, processes: list[RelayProcess], wanted: dict[Status, int], **settings: object
) -> int:
    """Start a relay again whenever its process has ended, as a supervisor would; how often it died."""
    deaths = 0
    while True:
        one = RelayProcess(store, book, **settings).start()
        processes.append(one)

        async def look(one: RelayProcess = one) -> object:
            found = await counts(store)
            return None if found == wanted or not one.running else found

        await eventually(look, lambda found: found is None)
        if one.running:
            one.send(signal.SIGTERM)
            assert await one.ended() == 0
            return deaths
        assert await one.ended() == 9
        deaths += 1
        # tests/unit/test_crash_loops.py bounds the number of deaths. Here a slow machine adds some: leases run out.
        assert deaths < 40


@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_an_event_that_kills_its_relay_is_found_and_dies_alone(
    sql: SqlOutbox, store: AnyStore, tmp_path: Path, processes: list[RelayProcess], mode: str
) -> None:
    book = tmp_path / "ledger"
    keys = [key_of(shard) for shard in range(4)]
    poison = numbered("poison", 1, type="poison")
    await store.add([*mixed(keys, 10), *poison, *mixed(["poison", *keys], 3, first=11)])
    wanted = {Status.PUBLISHED: 40 + 3 * 5, Status.DEAD: 1}
    deaths = await crash_until_dead(store, book, processes, wanted, mode=mode, max_attempts=2, lease=0.5)
    assert deaths >= 4
    (letter,) = await store.dead_letters()
    assert letter.event.id == poison[0].id
    assert "died" in letter.error
    assert "may have been delivered" in letter.error
    lines = ledger(book)
    assert {line.key for line in lines} == {"poison", *keys}
    if mode == "ordered":
        found = ledger_by_key(lines)
        assert {key: found[key] for key in keys} == in_order(keys, 13)
        assert found["poison"] == [11, 12, 13]


async def test_innocent_events_do_not_die_of_their_neighbour(
    sqlite: SqlOutbox, store: SqlStore, tmp_path: Path, processes: list[RelayProcess]
) -> None:
    """Each call takes a while, so that events of other shards are always under way when the poison kills."""
    book = tmp_path / "ledger"
    poison_key, *keys = [key_of(shard) for shard in range(4)]
    await store.add([*numbered(poison_key, 1, type="poison"), *mixed(keys, 30)])
    wanted = {Status.PUBLISHED: 90, Status.DEAD: 1}
    await crash_until_dead(store, book, processes, wanted, max_attempts=1, lease=0.5, seconds_per_event=0.05)
    assert ledger_by_key(ledger(book)) == in_order(keys, 30)


@pytest.mark.long
@pytest.mark.parametrize("kills", ["at the first event", "at any time"])
@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_a_relay_that_is_killed_in_a_loop_goes_on_and_buries_nobody(
    outbox: Outbox, store: AnyStore, tmp_path: Path, processes: list[RelayProcess], mode: str, kills: str
) -> None:
    book = tmp_path / "ledger"
    keys = [key_of(shard) for shard in range(4) for _ in range(20)]
    await store.add(mixed(keys, 25))
    for _ in range(15):
        victim = RelayProcess(store, book, mode=mode, seconds_per_event=0.0005, lease=0.5).start()
        processes.append(victim)
        before = len(ledger(book))
        await until(lambda before=before: len(ledger(book)) > before)  # type: ignore[misc]
        if kills == "at any time":
            await asyncio.sleep(random.expovariate(1.0))
        victim.send(signal.SIGKILL)
        await victim.ended()
        if (await counts(store)).keys() == {Status.PUBLISHED}:
            break
    processes.append(RelayProcess(store, book, mode=mode, lease=0.5).start())
    await settled(store, {Status.PUBLISHED: 2000}, seconds=60)
    if mode == "ordered":
        assert ledger_by_key(ledger(book)) == in_order(keys, 25)


async def test_a_killed_relay_does_not_stay_behind_as_a_sleeper(
    pg: SqlOutbox, store: SqlStore, tmp_path: Path, processes: list[RelayProcess]
) -> None:
    """A sleeper's row makes every writer notify: a worker that is gone must not leave one for ever."""
    victim = RelayProcess(store, tmp_path / "ledger", lease=0.5).start()
    processes.append(victim)
    asleep = "SELECT worker FROM {sleeper}"
    (dead,) = await eventually(lambda: query(store, asleep), lambda rows: len(rows) == 1)
    victim.send(signal.SIGKILL)
    await victim.ended()
    to = MemoryPublisher()
    async with relay(pg(), stream(to, lease=LEASE)):
        await store.add(numbered("k", 1))
        await to.wait_for(1)
        await eventually(lambda: query(store, asleep), lambda rows: rows != [] and dead not in rows)
