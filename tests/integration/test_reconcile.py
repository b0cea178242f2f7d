"""The reconciler on real databases: run by itself, beside others, and by a relay."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pillarbox import Check, Event, Fixed, stable_id
from pillarbox import Outbox as Writer
from pillarbox.errors import CheckFailed, StoreDown
from pillarbox.event import Status
from pillarbox.maintenance.prune import Prune
from pillarbox.maintenance.reconcile import Reconcile, Reconciled
from pillarbox.publisher import rejected, retry
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.store import Filter, Found, Store
from tests.integration.relays import (
    STREAM,
    WAIT,
    InAnHour,
    Shared,
    SqlOutbox,
    by_key,
    copies,
    counts,
    in_order,
    relay,
    settled,
    stream,
    until,
)

pytestmark = pytest.mark.asyncio
WRITER = Writer()


def page(number: int, key: str = "k", **fields: Any) -> Event:
    given = {"key": key, "stream": STREAM, "id": stable_id("page", key, number), **fields}
    return WRITER.event("page.saved", {"n": number}, **given)


def pages(count: int, key: str = "k", first: int = 1) -> list[Event]:
    return [page(number, key) for number in range(first, first + count)]


def check(found: Sequence[Event] | Callable[[], Any], **options: Any) -> Check:
    return Check("pages", found if callable(found) else lambda: found, **options)


def told(caplog: pytest.LogCaptureFixture, action: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "action", None) == action]


async def test_what_is_missing_is_emitted_once(sql: SqlOutbox, store: Store) -> None:
    await store.add(pages(2))
    reconcile = Reconcile(store, check(pages(250)))
    assert await reconcile.run_once() == Reconciled("pages", missing=248, emitted=248, waiting=2)
    assert await counts(store) == {Status.PENDING: 250}
    assert await reconcile.run_once() == Reconciled("pages", waiting=250)
    assert await counts(store) == {Status.PENDING: 250}


async def test_an_event_is_written_as_the_check_made_it(sql: SqlOutbox, store: Store) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    event = page(
        7, topic="pages", tenant="acme", headers={"a": "b"}, aggregate_id=7, aggregate_version=3, occurred_at=at
    )
    await Reconcile(store, check([event])).run_once()
    (found,) = await store.find_by_id(event.id)
    assert found.event._replace(seq=0, created_at=event.created_at) == event


async def test_two_at_once_emit_one_copy(sql: SqlOutbox, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    other = sql()
    await other.open()
    both = asyncio.Barrier(2)

    def look_together(each: Store) -> None:
        find = each.find

        async def together(where: Filter, limit: int, newest_first: bool = True) -> Sequence[Found]:
            found = await find(where, limit, newest_first)
            async with asyncio.timeout(WAIT):
                await both.wait()
            return found

        monkeypatch.setattr(each, "find", together)

    look_together(store)
    look_together(other)
    found = pages(50)
    one, two = await asyncio.gather(
        Reconcile(store, check(found)).run_once(), Reconcile(other, check(found[::-1])).run_once()
    )
    await other.close()
    assert one.emitted + two.emitted == 50
    assert one.waiting + two.waiting == 50, "each was known to the slower one"
    assert await counts(store) == {Status.PENDING: 50}


async def test_a_dry_run_writes_nothing(sql: SqlOutbox, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    await store.add(pages(1))
    found = check(pages(5))
    assert await Reconcile(store, found, dry_run=True).run_once() == Reconciled("pages", missing=4, waiting=1)
    assert await Reconcile(store, found, dry_run=True, limit=3).run_once() == Reconciled(
        "pages", missing=3, waiting=1, more=True
    )
    assert await counts(store) == {Status.PENDING: 1}
    assert not told(caplog, "reconciled")


async def test_a_run_is_limited_and_those_that_are_known_starve_nobody(sql: SqlOutbox, store: Store) -> None:
    closed = []

    def find() -> Iterator[Event]:
        try:
            yield from pages(10)
        finally:
            closed.append(True)

    await store.add(pages(5))
    reconcile = Reconcile(store, check(find, limit=3))
    assert await reconcile.run_once() == Reconciled("pages", missing=3, emitted=3, waiting=5, more=True)
    assert closed == [True]
    assert await reconcile.run_once() == Reconciled("pages", missing=2, emitted=2, waiting=8)
    assert await counts(store) == {Status.PENDING: 10}


async def test_at_the_limit_there_is_more_only_if_more_is_missing(sql: SqlOutbox, store: Store) -> None:
    await store.add(pages(2, first=4))
    assert await Reconcile(store, check(pages(5), limit=3)).run_once() == Reconciled(
        "pages", missing=3, emitted=3, waiting=2
    )


async def test_one_that_is_found_twice_is_counted_once(sql: SqlOutbox, store: Store) -> None:
    twice = [*pages(120), *pages(120)]
    assert await Reconcile(store, check(twice, limit=120)).run_once() == Reconciled("pages", missing=120, emitted=120)


async def test_each_state_is_told_and_left_alone(
    sql: SqlOutbox, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    to = MemoryPublisher()
    to.fail_next(retry("busy"), key="failed")
    to.fail_next(rejected("bad"), key="dead")
    later = datetime.now(UTC) + timedelta(hours=1)
    found = [
        *pages(3, "published"),
        *pages(2, "failed"),
        *pages(1, "dead"),
        page(1, "scheduled", available_at=later),
        page(1, "processing", stream="queue"),
    ]
    await store.add(found)
    async with relay(sql(), stream(to, retry=Fixed(3600.0))):
        states = {Status.PUBLISHED: 3, Status.FAILED: 1, Status.HELD: 1, Status.DEAD: 1, Status.SCHEDULED: 1}
        await settled(store, states)
    claims = [claim for shard in range(4) for claim in await store.claim("queue", shard, "ann", 10, 3600)]
    assert len(claims) == 1
    await store.add(pages(2, "pending"))
    found += pages(2, "pending")
    wanted = Reconciled("pages", waiting=6, published=3, dead=1)
    assert await Reconcile(store, check(found)).run_once() == wanted
    assert await counts(store) == {**states, Status.PENDING: 2}
    (record,) = told(caplog, "reconciled")
    assert record.levelno == logging.WARNING
    assert {name: getattr(record, name) for name in wanted._fields} == wanted._asdict()
    assert "10 without effect: 0 emitted, 6 waiting, 3 published already, 1 dead" in record.getMessage()


async def test_one_that_died_and_was_written_again_is_waiting(sql: SqlOutbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(rejected("bad"), key="k")
    await store.add(pages(1))
    async with relay(sql(), stream(to)):
        await settled(store, {Status.DEAD: 1})
    await store.add(pages(1))
    assert await Reconcile(store, check(pages(1))).run_once() == Reconciled("pages", waiting=1)


async def test_one_that_was_pruned_is_emitted_again(sql: SqlOutbox, store: Store) -> None:
    await store.add(pages(1))
    async with relay(sql(), stream(MemoryPublisher())):
        await settled(store, {Status.PUBLISHED: 1})
    reconcile = Reconcile(store, check(pages(1)))
    assert (await reconcile.run_once()).published == 1
    await Prune(InAnHour(store), keep_published="30m").run_once()
    assert (await reconcile.run_once()).emitted == 1


async def test_nothing_found_is_not_logged(sqlite: SqlOutbox, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert await Reconcile(store, check([])).run_once() == Reconciled("pages")
    assert not told(caplog, "reconciled")
    await Reconcile(store, check(pages(1))).run_once()
    (record,) = told(caplog, "reconciled")
    assert record.levelno == logging.INFO


async def test_what_was_found_before_a_failure_is_emitted(
    sql: SqlOutbox, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def find() -> Iterator[Event]:
        yield from pages(3)
        raise ZeroDivisionError("a bug")

    with pytest.raises(CheckFailed, match="check 'pages' failed with ZeroDivisionError"):
        await Reconcile(store, check(find)).run_once()
    assert await counts(store) == {Status.PENDING: 3}
    assert len(told(caplog, "reconciled")) == 1


async def test_a_new_id_is_refused_and_writes_nothing(sql: SqlOutbox, store: Store) -> None:
    with pytest.raises(CheckFailed, match="stable_id"):
        await Reconcile(store, check(lambda: [page(1, id=None)])).run_once()
    assert await counts(store) == {}


async def test_a_database_that_is_away_is_not_the_checks_fault(
    sqlite: SqlOutbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> Any:
        raise StoreDown("away")

    monkeypatch.setattr(store, "add", away)
    with pytest.raises(StoreDown):
        await Reconcile(store, check(pages(1))).run_once()


async def test_relays_publish_in_order_what_was_missing_and_once(sql: SqlOutbox, store: Store) -> None:
    to = Shared()
    runs = 0

    def find() -> Iterator[Event]:
        nonlocal runs
        runs += 1
        # As data has it: what has arrived is no longer missing.
        arrived = {each.id for each in list(to.deliveries)}
        yield from (event for event in pages(20) if event.id not in arrived)

    found = check(find, every=0.05)
    async with relay(sql(), stream(to), checks=[found]), relay(sql(), stream(to), checks=[found]):
        await to.wait_for(20)
        await settled(store, {Status.PUBLISHED: 20})
        before = runs
        await until(lambda: runs > before + 4)
    assert by_key(to.deliveries) == in_order(["k"], 20)
    assert copies(to.deliveries) == 0


async def test_a_check_that_fails_disturbs_nothing_else(
    sql: SqlOutbox, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    to = MemoryPublisher()

    async def broken() -> list[Event]:
        raise ZeroDivisionError("a bug")

    checks = [Check("broken", broken, every=0.02), check(pages(3), every=0.02)]
    async with relay(sql(), stream(to), checks=checks):
        await to.wait_for(3)
        await until(lambda: len(told(caplog, "reconcile_failed")) >= 3)
        await store.add(pages(1, "other"))
        await to.wait_for(4)
    record: Any = told(caplog, "reconcile_failed")[0]
    assert record.check == "broken"
    assert record.getMessage() == "reconcile 'broken' failed; trying again later"
    assert record.exc_info[1].__cause__.args == ("a bug",)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_stop_ends_a_run_between_two_events(sqlite: SqlOutbox, store: Store, is_async: bool) -> None:
    began, closed = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    await store.add(pages(1))

    def find() -> Iterator[Event]:
        try:
            while True:
                loop.call_soon_threadsafe(began.set)
                yield page(1)
        finally:
            closed.set()

    async def find_async() -> AsyncIterator[Event]:
        try:
            while True:
                began.set()
                yield page(1)
                await asyncio.sleep(0)
        finally:
            closed.set()

    reconcile = Reconcile(store, check(find_async if is_async else find))
    running = asyncio.create_task(reconcile.run_once())
    async with asyncio.timeout(WAIT):
        await began.wait()
        reconcile.stop()
        done = await running
    assert done.more
    assert closed.is_set()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_stop_gives_up_a_check_that_hangs(
    sqlite: SqlOutbox, store: Store, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    began, release, closed = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def find() -> Iterator[Event]:
        try:
            loop.call_soon_threadsafe(began.set)
            release.wait(WAIT)
            yield page(1)
        finally:
            closed.set()

    async def find_async() -> AsyncIterator[Event]:
        try:
            began.set()
            await asyncio.sleep(3600)
            yield page(1)
        finally:
            closed.set()

    kept = find()  # held here, so that no garbage collection closes it
    hanging = check(find_async if is_async else lambda: kept, every=0.01)
    async with asyncio.timeout(WAIT):
        async with relay(sqlite(), stream(MemoryPublisher()), checks=[hanging], grace=0.05):
            await began.wait()
    assert len(told(caplog, "check_given_up")) == 1
    release.set()
    assert await asyncio.to_thread(closed.wait, WAIT), "it is closed when it comes back"
    assert await counts(store) == {}


async def test_a_check_that_cancels_itself_has_failed(sqlite: SqlOutbox, store: Store) -> None:
    async def find() -> list[Event]:
        raise asyncio.CancelledError

    with pytest.raises(CheckFailed, match="was cancelled by its own code"):
        await Reconcile(store, check(find)).run_once()


async def test_a_run_that_is_cancelled_ends_its_check(sqlite: SqlOutbox, store: Store) -> None:
    began, closed = asyncio.Event(), asyncio.Event()

    async def find() -> AsyncIterator[Event]:
        try:
            began.set()
            await asyncio.sleep(3600)
            yield page(1)
        finally:
            closed.set()

    running = asyncio.create_task(Reconcile(store, check(find)).run_once())
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert closed.is_set()
