"""Metrics of real relays, writers, inboxes and requests are equal to what happened."""

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pillarbox import Idempotency, Inbox, Outbox
from pillarbox.conformance.events import make_event
from pillarbox.errors import StoreDown
from pillarbox.event import Status
from pillarbox.idempotency import Reply, Request
from pillarbox.maintenance.sample import Sample
from pillarbox.observe import Observers
from pillarbox.observe.prometheus import Prometheus
from pillarbox.publisher import rejected, retry
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.store import Store
from pillarbox.stores.sqlite import SqliteStore
from tests.integration import relays
from tests.integration.relays import (
    STREAM,
    SqlOutbox,
    copies,
    mixed,
    move,
    numbered,
    relay,
    settled,
    stream,
    until,
)

KEYS = [f"key-{number}" for number in range(20)]
EVENTS = 40 * len(KEYS)


class Page:
    """What Prometheus would read."""

    def __init__(self) -> None:
        self.observer = Prometheus(registry=CollectorRegistry())

    def __call__(self, name: str, **labels: str) -> float | None:
        """The value of a sample; None: there is none."""
        text = self.observer.page("application/openmetrics-text; version=1.0.0")[1].decode()
        families: Any = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for family in families:
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return None

    def of(self, name: str, **labels: str) -> float | None:
        """The value for the stream of the tests."""
        return self(name, stream=STREAM, **labels)


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_a_run_with_failures_is_counted_exactly(
    outbox: relays.Outbox, store: Store, page: Page, mode: str
) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("not yet"), times=3)
    to.fail_next(rejected("never"), times=2)
    await store.add(mixed(KEYS, EVENTS // len(KEYS)) if mode == "ordered" else numbered(None, EVENTS))

    async with relay(outbox(), stream(to, mode=mode), observers=[page.observer]):
        await settled(store, {Status.PUBLISHED: EVENTS - 2, Status.DEAD: 2})
        await until(lambda: page.of("outbox_done_total") == EVENTS - 2)
        await until(lambda: page.of("outbox_workers") == 1)

    assert len(to.deliveries) == page.of("outbox_publish_latency_seconds_count") == EVENTS - 2
    assert page.of("outbox_failed_total", outcome="retry") == 3
    assert page.of("outbox_failed_total", outcome="rejected") == page.of("outbox_died_total") == 2
    for name in ("outbox_inflight", "outbox_circuit_open", "outbox_settle_refused_total", "outbox_duplicates_total"):
        assert page.of(name) == 0
    assert page.of("outbox_takeovers_total") == page.of("outbox_rescued_total") == 0


@pytest.mark.asyncio
async def test_an_outage_is_counted_and_its_circuit_is_seen(sqlite: SqlOutbox, store: Store, page: Page) -> None:
    to = MemoryPublisher()
    to.down("gone fishing")
    await store.add(numbered("a", 3))
    async with relay(sqlite(), stream(to), observers=[page.observer]):
        await until(lambda: page.of("outbox_circuit_open") == 1)
        to.up()
        await settled(store, {Status.PUBLISHED: 3})
        await until(lambda: page.of("outbox_circuit_open") == 0)
    failed = page.of("outbox_failed_total", outcome="outage")
    assert failed is not None
    assert failed > 0
    assert page.of("outbox_died_total") == page.of("outbox_failed_total", outcome="retry") == 0


@pytest.mark.asyncio
async def test_the_latency_of_a_scheduled_event_counts_from_its_instant(
    outbox: relays.Outbox, store: Store, page: Page
) -> None:
    await store.add(numbered("a", 1, available_at=datetime.now(UTC) - timedelta(hours=1)))
    async with relay(outbox(), stream(MemoryPublisher()), observers=[page.observer]):
        await settled(store, {Status.PUBLISHED: 1})
    latency = page.of("outbox_publish_latency_seconds_sum")
    assert latency is not None
    assert 3500 < latency < 3700


@pytest.mark.asyncio
async def test_a_take_over_and_its_copies_are_counted(outbox: relays.Outbox, store: Store) -> None:
    events = 2 * len(KEYS)
    to, after, first, second = MemoryPublisher(), MemoryPublisher(), Page(), Page()
    await store.add(mixed(KEYS, 2))
    to.hold()
    async with relay(outbox(), stream(to, lease=60.0), observers=[first.observer]):
        await until(lambda: first.of("outbox_inflight") == events)
        # Its leases have run out, and it does not know yet. The other relay takes its share of them.
        await move(store, "lease", "lease_until", -1.0)
        async with relay(outbox(), stream(after, lease=1.0), observers=[second.observer]) as other:
            await until(lambda: second.of("outbox_takeovers_total"))
            await other.drain()
            to.release()
            await until(lambda: settled_of(first) == events)
    found = copies(to.deliveries + after.deliveries)
    assert found > 0
    assert first.of("outbox_settle_refused_total") == first.of("outbox_duplicates_total") == found
    assert second.of("outbox_done_total") == found
    await settled(store, {Status.PUBLISHED: events})


def settled_of(page: Page) -> float:
    """The events whose results this relay has written, or could not write any more."""
    return (page.of("outbox_done_total") or 0) + (page.of("outbox_settle_refused_total") or 0)


@pytest.mark.asyncio
async def test_rescued_events_are_counted(outbox: relays.Outbox, store: Store, page: Page) -> None:
    to = MemoryPublisher()
    await store.add(numbered(None, 5))
    to.hold()
    async with relay(outbox(), stream(to, mode="queue", lease=60.0), rescue_every=0.05, observers=[page.observer]):
        await to.wait_until_held(5)
        await store.pause(STREAM, "olga")  # nobody claims them again
        await move(store, "event", "lease_until", -1.0)
        await until(lambda: page.of("outbox_rescued_total") == 5)
        to.release()
        await until(lambda: page.of("outbox_settle_refused_total") == 5)
    assert (page.of("outbox_duplicates_total"), page.of("outbox_done_total")) == (5, 0)


@pytest.mark.asyncio
async def test_the_gauges_are_those_of_the_database(outbox: relays.Outbox, store: Store, page: Page) -> None:
    to = MemoryPublisher()
    to.fail_next(rejected("never"), times=1)
    await store.add(numbered("a", 1))
    async with relay(outbox(), stream(to)):
        await settled(store, {Status.DEAD: 1})
    await store.add(numbered("b", 7))
    await store.pause(STREAM, "olga")
    sample = Sample(store, Observers([page.observer]))

    assert await sample.run_once() < sample.every_seconds
    assert page.of("outbox_backlog") == page.of("outbox_events", state="pending") == 7
    assert (page.of("outbox_dead"), page.of("outbox_paused"), page.of("outbox_workers")) == (1, 1, 0)
    lag = page.of("outbox_lag_seconds")
    assert lag is not None
    assert lag >= 0


@pytest.mark.asyncio
async def test_a_store_that_is_slow_is_sampled_less_often(sqlite: SqlOutbox, store: Store, page: Page) -> None:
    class Slow:
        async def gauges(self, limit: int = 10_000) -> Any:
            until = time.monotonic() + 0.02
            while time.monotonic() < until:
                continue
            return await store.gauges(limit)

    sample = Sample(Slow(), Observers([page.observer]), every=0.1)  # type: ignore[arg-type]
    seconds = await sample.run_once()
    assert sample.every_seconds >= 19 * seconds > 0.1


@pytest.mark.asyncio
async def test_while_the_database_is_away_the_sample_grows_old(sqlite: SqlOutbox, page: Page) -> None:
    class Away:
        async def gauges(self, limit: int = 10_000) -> Any:
            raise StoreDown("away")

    sample = Sample(Away(), Observers([page.observer]))  # type: ignore[arg-type]
    await sample.run_once()
    assert page("outbox_sample_age_seconds") is None


@contextmanager
def shop(folder: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(folder / "shop.db", isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    asyncio.run(SqliteStore(str(tmp_path / "shop.db")).migrate())
    return tmp_path


def test_a_writer_counts_what_it_adds_with_rollbacks(tables: Path, page: Page) -> None:
    outbox = Outbox(observers=[page.observer])
    with shop(tables) as connection:
        connection.execute("BEGIN")
        outbox.add(connection, "order.created", {}, key="1")
        outbox.add_all(connection, [outbox.event("order.created", {}, stream=each) for each in ("default", "mail")])
        connection.execute("COMMIT")
        connection.execute("BEGIN")
        outbox.add(connection, "order.created", {})
        connection.execute("ROLLBACK")
    assert page("outbox_new_total", stream="default") == 3
    assert page("outbox_new_total", stream="mail") == 1


def test_an_inbox_counts_new_events_and_copies(tables: Path, page: Page) -> None:
    inbox = Inbox("mailer", observers=[page.observer])
    first, second, third = (make_event() for _ in range(3))
    with shop(tables) as connection:
        connection.execute("BEGIN")
        assert inbox.record(connection, first)
        assert not inbox.record(connection, first)
        assert list(inbox.record_all(connection, [first, second, third])) == [second, third]
        connection.execute("COMMIT")

    handled = []

    @inbox.once(lambda: sqlite3.connect(tables / "shop.db", isolation_level=None))
    def handle(event: Any, tx: Any) -> None:
        handled.append(event.id)

    fourth = make_event()
    for event in (fourth, fourth, first):
        handle(event)
    assert handled == [fourth.id]
    assert page("inbox_events_total", consumer="mailer", result="new") == 4
    assert page("inbox_events_total", consumer="mailer", result="copy") == 4


def test_requests_are_counted_by_what_became_of_them(tables: Path, page: Page) -> None:
    once = Idempotency(
        lambda: sqlite3.connect(tables / "shop.db", isolation_level=None),
        scope=lambda request: "anna",
        observers=[page.observer],
    )

    def ask(key: str | None, body: bytes, work: Any) -> Reply:
        keys = () if key is None else (key,)
        reply: Reply = once.run(Request("POST", "/orders", b"", body, keys), work)
        return reply

    def broken(tx: Any) -> Any:
        raise ValueError("a bug")

    assert ask("1", b"{}", lambda tx: (201, {"id": 7})).status == 201
    assert ask("1", b"{}", lambda tx: (201, {"id": 8})).is_replayed
    assert ask("1", b"other", lambda tx: (201, {"id": 8})).status == 422
    assert ask("2", b"{}", lambda tx: (400, {})).status == 400
    assert ask(None, b"{}", lambda tx: (201, {})).status == 201
    with pytest.raises(ValueError, match="a bug"):
        ask("3", b"{}", broken)

    outcomes = {"done": 1.0, "replayed": 1.0, "mismatch": 1.0, "failed": 2.0, "unkeyed": 1.0}
    assert {each: page("idempotency_requests_total", outcome=each) for each in outcomes} == outcomes
