"""A relay under load reports exactly what happened, on every database."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from pillarbox.batch import Batch, Part
from pillarbox.event import Event, Status
from pillarbox.observe import Observer
from pillarbox.publisher import Outcome, rejected, retry
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.store import Claim, ClaimResults, Grant, Settlement, Store
from tests.integration.relays import (
    SHARDS,
    STREAM,
    Outbox,
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

pytestmark = pytest.mark.asyncio
KEYS = [f"key-{number}" for number in range(20)]
EVENTS = 40 * len(KEYS)


class Count(Observer):
    """Counts events by what became of them."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.in_flight = 0
        self.crashes: list[int] = []
        self.errors: list[BaseException] = []

    def after_take(self, stream: str, grants: Sequence[Grant], seconds: float) -> None:
        self.found["taken"] += len(grants)
        self.crashes += [grant.crashes for grant in grants]

    def after_give(self, grants: Sequence[Grant], seconds: float) -> None:
        self.found["given"] += len(grants)

    def after_read(self, grants: Sequence[Grant], parts: Sequence[Part], seconds: float) -> None:
        self.found["read"] += sum(len(part.events) for part in parts)

    def before_publish(self, batch: Batch) -> None:
        self.in_flight += len(batch)

    def after_publish(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
        self.in_flight -= len(batch)
        self.found.update(str(outcome.result) for outcome in outcomes)

    def after_settle(self, settlements: Sequence[Settlement], lost: Sequence[Settlement], seconds: float) -> None:
        for settlement in settlements:
            self._settled(settlement, settlement in lost)
            self.found["held"] += len(settlement.held)

    def after_claim(self, stream: str, claims: Sequence[Claim], seconds: float) -> None:
        self.found["read"] += len(claims)

    def after_settle_claims(self, claims: Sequence[Claim], results: ClaimResults, refused: int, seconds: float) -> None:
        self.found["lost"] += refused
        if not refused:
            self._settled(results, False)

    def _settled(self, results: Settlement | ClaimResults, is_lost: bool) -> None:
        if is_lost:
            self.found["lost"] += len(results.published)
            return
        self.found["settled"] += len(results.published)
        self.found["failed"] += len(results.failed)
        self.found["dead"] += len(results.dead)

    def call_failed(self, call: str, arguments: tuple[Any, ...], error: BaseException, seconds: float) -> None:
        self.errors.append(error)


def load(mode: str) -> list[Event]:
    if mode == "ordered":
        return mixed(KEYS, EVENTS // len(KEYS))
    return numbered(None, EVENTS)


@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_the_counts_are_those_of_the_destination_and_of_the_database(
    outbox: Outbox, store: Store, mode: str
) -> None:
    to, count = MemoryPublisher(), Count()
    to.fail_next(retry("not yet"), times=3)
    to.fail_next(rejected("never"), times=2)
    await store.add(load(mode))

    async with relay(outbox(), stream(to, mode=mode), observers=[count]):
        await settled(store, {Status.PUBLISHED: EVENTS - 2, Status.DEAD: 2})

    found = count.found
    assert len(to.deliveries) == EVENTS - 2
    assert found["published"] == found["settled"] == EVENTS - 2
    assert (found["retry"], found["failed"]) == (3, 3)
    assert (found["rejected"], found["dead"]) == (2, 2)
    # Each event that was read was published, failed or held, or is read again because it was not tried.
    assert found["read"] == sum(found[outcome] for outcome in ("published", "retry", "rejected", "untried", "held"))
    assert (count.in_flight, found["lost"], count.errors) == (0, 0, [])
    if mode == "ordered":
        assert found["taken"] == found["given"] == SHARDS
        assert set(count.crashes) == {0}


async def test_a_take_over_and_the_refused_settle_are_reported(outbox: Outbox, store: Store) -> None:
    events = 2 * len(KEYS)
    to, first, second = MemoryPublisher(), Count(), Count()
    await store.add(mixed(KEYS, 2))
    to.hold()
    async with relay(outbox(), stream(to, lease=60.0), observers=[first]):
        await until(lambda: first.in_flight == events)
        # Its leases have run out, and it does not know yet. The other relay takes its share of them.
        await move(store, "lease", "lease_until", -1.0)
        after = MemoryPublisher()
        async with relay(outbox(), stream(after, lease=1.0), observers=[second]) as other:
            await until(lambda: second.found["taken"])
            await other.drain()
            to.release()
            await until(lambda: first.found["lost"] + first.found["settled"] == events)
    assert second.crashes == [1] * (SHARDS // 2)
    assert second.found["settled"] == len(after.deliveries) == first.found["lost"] > 0
    assert copies(to.deliveries + after.deliveries) == first.found["lost"]
    await settled(store, {Status.PUBLISHED: events})


async def test_a_refused_settle_of_claims_is_reported(outbox: Outbox, store: Store) -> None:
    to, count = MemoryPublisher(), Count()
    await store.add(numbered(None, 5))
    to.hold()
    async with relay(outbox(), stream(to, mode="queue", lease=60.0), observers=[count]):
        await to.wait_until_held(5)
        await store.pause(STREAM, "olga")  # nobody claims them again
        await move(store, "event", "lease_until", -1.0)
        await store.rescue(STREAM, 600.0, 100)
        to.release()
        await until(lambda: count.found["lost"] == 5)
    assert (count.found["read"], count.found["published"], count.found["settled"]) == (5, 5, 0)


async def test_changes_of_the_circuit_are_reported(sqlite: SqlOutbox, store: Store) -> None:
    class Circuits(Observer):
        def __init__(self) -> None:
            self.seen: list[tuple[str, str]] = []

        def circuit_changed(self, stream: str, state: str) -> None:
            self.seen.append((stream, state))

    to, circuits = MemoryPublisher(), Circuits()
    to.down("gone fishing")
    await store.add(numbered("a", 3))
    async with relay(sqlite(), stream(to), observers=[circuits]):
        await until(lambda: circuits.seen)
        to.up()
        await settled(store, {Status.PUBLISHED: 3})
    assert circuits.seen == [(STREAM, state) for state in ("open", "half_open", "closed")]
