"""Events that fail, keys that wait, dead letters, and destinations that are away."""

from collections.abc import Sequence

import pytest

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.conformance.store_setup import refs
from pillarbox.event import Status
from pillarbox.outbox import Outbox as Writer
from pillarbox.outbox.routes import in_each_stream
from pillarbox.publisher import Outcome, outage, rejected, retry
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Fixed
from pillarbox.store import Store
from tests.integration.relays import (
    STREAM,
    CircuitState,
    Outbox,
    SqlOutbox,
    attempts,
    by_key,
    copies,
    counts,
    eventually,
    in_order,
    key_of,
    mixed,
    move,
    numbered,
    relay,
    settled,
    stream,
    until,
    worker_of,
)

pytestmark = pytest.mark.asyncio

NEVER = Fixed(3600.0)


async def due(store: Store) -> None:
    """The time of every retry has come."""
    await move(store, "held_key", "next_attempt_at", 0.0)


async def test_a_failed_key_holds_only_its_key_and_goes_on_in_order(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy"), key="bad")
    await store.add(mixed(["bad", "good"], 10))
    async with relay(outbox(), stream(to, retry=NEVER)):
        await to.wait_for(10)
        await settled(store, {Status.PUBLISHED: 10, Status.FAILED: 1, Status.HELD: 9})
        await store.add(mixed(["bad", "good"], 2, first=11))
        await to.wait_for(12)
        await settled(store, {Status.PUBLISHED: 12, Status.FAILED: 1, Status.HELD: 11})
        assert "bad" not in by_key(to.deliveries)
        await due(store)
        await to.wait_for(24)
        await settled(store, {Status.PUBLISHED: 24})
        await store.add(numbered("bad", 3, first=13))
        await to.wait_for(27)
        await settled(store, {Status.PUBLISHED: 27})
    assert by_key(to.deliveries) == in_order(["good"], 12) | in_order(["bad"], 15)
    await store.join(STREAM, "heir", 60)
    assert not [key for grant in await store.take(STREAM, "heir", 4, 60) for key in await store.held_keys(grant)]


async def test_attempts_are_counted_and_the_last_one_kills(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    for error in ("first", "second", "third"):
        to.fail_next(retry(error), key="k")
    await store.add(numbered("k", 3))
    async with relay(outbox(), stream(to, max_attempts=3)):
        await to.wait_for(2)
        await settled(store, {Status.PUBLISHED: 2, Status.DEAD: 1})
    assert by_key(to.deliveries) == {"k": [2, 3]}
    (letter,) = await store.dead_letters(STREAM)
    assert (letter.event.attempts, letter.error) == (3, "third")
    assert [(line["attempts"], line["error"]) for line in letter.errors] == [(1, "first"), (2, "second"), (3, "third")]


async def test_attempts_that_ended_well_are_counted_too(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy"), key="k", times=2)
    await store.add(numbered("k", 2))
    async with relay(outbox(), stream(to)):
        await to.wait_for(2)
        await settled(store, {Status.PUBLISHED: 2})
    assert await attempts(store) == [3, 1]


async def test_an_event_without_key_is_retried_by_itself(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy"), type="slow", times=2)
    slow = make_event(key=None, stream=STREAM, type="slow")
    others = [make_event(key=None, stream=STREAM) for _ in range(20)]
    await store.add([slow, *others])

    async def failed(times: int) -> None:
        """So often; the others are published, and its next time has come."""
        await eventually(lambda: attempts(store), lambda found: sorted(found) == [1] * 20 + [times])
        await move(store, "event", "next_attempt_at", 0.0, status="failed")

    async with relay(outbox(), stream(to, retry=NEVER)):
        await failed(1)
        await failed(2)
        await to.wait_for(21)
        await settled(store, {Status.PUBLISHED: 21})
    assert copies(to.deliveries) == 0
    assert to.deliveries[-1].id == slow.id
    assert to.deliveries[-1].attempts == 2


async def test_a_retry_waits_for_as_long_as_the_destination_asks(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy", after_seconds=3600.0), key="k")
    await store.add(mixed(["k", "other"], 2))
    async with relay(outbox(), stream(to)) as running:
        await to.wait_for(2)
        await running.drain()
        await settled(store, {Status.PUBLISHED: 2, Status.FAILED: 1, Status.HELD: 1})
        await due(store)
        await to.wait_for(4)
    assert by_key(to.deliveries) == in_order(["k", "other"], 2)


async def test_an_event_can_have_a_limit_of_its_own(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy"), key="once")
    to.fail_next(retry("busy"), key="often", times=4)
    await store.add([*numbered("once", 1, max_attempts=1), *numbered("often", 1, max_attempts=5)])
    async with relay(outbox(), stream(to, max_attempts=2)):
        await to.wait_for(1)
        await settled(store, {Status.PUBLISHED: 1, Status.DEAD: 1})
    assert by_key(to.deliveries) == {"often": [1]}


async def test_a_rejected_event_dies_at_once(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(rejected("too large"), key="k")
    await store.add(numbered("k", 3))
    async with relay(outbox(), stream(to, retry=NEVER)):
        await to.wait_for(2)
    assert by_key(to.deliveries) == {"k": [2, 3]}
    (letter,) = await store.dead_letters()
    assert (letter.event.attempts, letter.error) == (1, "too large")


@pytest.mark.parametrize("act", ["replay", "discard"])
async def test_a_blocked_key_waits_for_its_operator(outbox: Outbox, store: Store, act: str) -> None:
    to = MemoryPublisher()
    to.fail_next(rejected("bad"), key="k")
    await store.add(numbered("k", 5))
    async with relay(outbox(), stream(to, on_dead="block")):
        await settled(store, {Status.DEAD: 1, Status.HELD: 4})
        await store.add([*numbered("k", 1, first=6), *numbered("other", 1)])
        await to.wait_for(1)
        await settled(store, {Status.PUBLISHED: 1, Status.DEAD: 1, Status.HELD: 5})
        (letter,) = await store.dead_letters()
        if act == "replay":
            assert await store.replay(refs(letter.event), "olga") == 1
        else:
            assert await store.discard(refs(letter.event), "olga") == 1
        expected = [1, 2, 3, 4, 5, 6] if act == "replay" else [2, 3, 4, 5, 6]
        await to.wait_for(1 + len(expected))
        await settled(store, {Status.PUBLISHED: 1 + len(expected)})
        await store.add(numbered("k", 1, first=7))
        await to.wait_for(2 + len(expected))
    assert by_key(to.deliveries)["k"] == [*expected, 7]


async def test_a_blocked_key_whose_head_dies_again_waits_again(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(rejected("bad"), key="k", times=2)
    await store.add(numbered("k", 3))
    async with relay(outbox(), stream(to, on_dead="block")):
        await settled(store, {Status.DEAD: 1, Status.HELD: 2})
        (letter,) = await store.dead_letters()
        await store.replay(refs(letter.event), "olga")
        # It dies a second time: the history says so, and nothing went past it.
        await eventually(lambda: store.dead_letters(), lambda found: [len(each.errors) for each in found] == [2])
        assert not to.deliveries
        await store.replay(refs(letter.event), "olga")
        await to.wait_for(3)
    assert by_key(to.deliveries) == in_order(["k"], 3)


async def test_later_events_of_a_parked_key_die_until_they_are_replayed(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(rejected("bad"), key="k")
    await store.add(mixed(["k", "other"], 5))
    async with relay(outbox(), stream(to, on_dead="park")):
        await settled(store, {Status.DEAD: 5, Status.PUBLISHED: 5})
        await store.add(numbered("k", 2, first=6))
        await settled(store, {Status.DEAD: 7, Status.PUBLISHED: 5})
        letters = await store.dead_letters()
        assert [letter.error for letter in letters][1:] == ["parked: an earlier event of its key is dead"] * 6
        assert [letter.event.attempts for letter in letters] == [1, 0, 0, 0, 0, 0, 0]
        assert await store.replay(refs(*(letter.event for letter in letters)), "olga") == 7
        await to.wait_for(12)
        await settled(store, {Status.PUBLISHED: 12})
    assert by_key(to.deliveries)["k"] == [1, 2, 3, 4, 5, 6, 7]


async def test_a_key_that_one_relay_holds_is_known_to_the_next(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy"), key="k")
    await store.add(numbered("k", 3))
    async with relay(outbox(), stream(to, retry=NEVER)):
        await settled(store, {Status.FAILED: 1, Status.HELD: 2})
    async with relay(outbox(), stream(to, retry=NEVER)):
        await store.add(numbered("k", 2, first=4))
        await settled(store, {Status.FAILED: 1, Status.HELD: 4})
        await due(store)
        await to.wait_for(5)
    assert by_key(to.deliveries) == in_order(["k"], 5)


async def test_a_long_held_key_is_worked_off_in_batches(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy"), key="k")
    await store.add(numbered("k", 60))
    async with relay(outbox(), stream(to, retry=NEVER, batch=7)):
        await settled(store, {Status.FAILED: 1, Status.HELD: 59})
        await due(store)
        await store.add(numbered("k", 10, first=61))
        await to.wait_for(70)
        await settled(store, {Status.PUBLISHED: 70})
    assert by_key(to.deliveries) == in_order(["k"], 70)


async def test_an_outage_charges_nothing_and_passes(sql: SqlOutbox, store: Store) -> None:
    to = MemoryPublisher()
    to.down()
    keys = [key_of(shard) for shard in range(4)]
    await store.add(mixed(keys, 10))
    circuit = CircuitState()
    async with relay(sql(), stream(to, max_attempts=1), observers=[circuit]):
        await until(lambda: circuit.state == "open")
        assert await counts(store) == {Status.PENDING: 40}
        to.up()
        await to.wait_for(40)
        await settled(store, {Status.PUBLISHED: 40})
    assert by_key(to.deliveries) == in_order(keys, 10)
    assert set(await attempts(store)) == {1}


async def test_an_outage_during_a_retry_charges_nothing(sql: SqlOutbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy"), key="k")
    to.fail_next(outage("refused"), key="k", times=3)
    await store.add(numbered("k", 3))
    async with relay(sql(), stream(to, max_attempts=2)):
        await to.wait_for(3, timeout=30)
        await settled(store, {Status.PUBLISHED: 3})
    assert by_key(to.deliveries) == in_order(["k"], 3)
    assert await attempts(store) == [2, 1, 1]


async def test_the_outage_of_one_destination_does_not_hold_the_other(outbox: Outbox, store: Store) -> None:
    routed = Writer(routes={"order.*": ["broker", "search"]})
    made = [routed.event("order.created", {"n": n}, key=key) for n in range(1, 11) for key in ("a", "b")]
    await store.add([copy for event in made for copy in in_each_stream(event)])
    broker, search = MemoryPublisher(), MemoryPublisher()
    search.down()
    async with relay(outbox(), stream(broker, "broker"), stream(search, "search", max_attempts=1)):
        await settled(store, {Status.PUBLISHED: 20}, "broker")
        assert await counts(store, "search") == {Status.PENDING: 20}
        search.up()
        await settled(store, {Status.PUBLISHED: 20}, "search")
    assert by_key(broker.deliveries) == by_key(search.deliveries) == in_order(["a", "b"], 10)
    assert {event.id for event in broker.deliveries} == {event.id for event in search.deliveries}


class Full(MemoryPublisher):
    """Refuses every event until it is no longer full."""

    def __init__(self) -> None:
        super().__init__()
        self.full = True
        self.calls = 0

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        if not self.full:
            return await super().publish(batch)
        self.calls += 1
        return [retry("the queue is full", ambiguous=True)] * len(batch)


@pytest.mark.parametrize(("mode", "charged"), [("ordered", 0), ("queue", 4)])
async def test_refusals_of_five_events_in_a_row_are_an_outage(
    sql: SqlOutbox, store: Store, mode: str, charged: int
) -> None:
    """A queue stream sends one event in a call, so that four are charged before it is clear that they are not at
    fault."""
    to = Full()
    keys = [f"key-{n}" for n in range(10)]
    await store.add(mixed(keys, 4))
    async with relay(sql(), stream(to, mode=mode, retry=NEVER, concurrency=8)) as running:
        await until(lambda: to.calls and worker_of(running)._destination.breaker.state == "open")
        probed = to.calls
        await until(lambda: to.calls > probed)
        to.full = False
        await to.wait_for(1, timeout=30)

        async def all_are_published() -> bool:
            if mode == "ordered":
                await due(store)
            else:
                await move(store, "event", "next_attempt_at", 0.0, status="failed")
            return await counts(store) == {Status.PUBLISHED: 40}

        await eventually(all_are_published)
    assert sorted(await attempts(store)) == [1] * (40 - charged) + [2] * charged
    if mode == "ordered":
        assert by_key(to.deliveries) == in_order(keys, 4)


class Raising(MemoryPublisher):
    """Breaks its contract a few times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        if self._times:
            self._times -= 1
            raise ZeroDivisionError("a bug in a publisher")
        return await super().publish(batch)


async def test_a_publisher_that_raises_charges_nothing_and_is_tried_again(
    sql: SqlOutbox, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    to = Raising(2)
    await store.add(numbered("k", 3))
    async with relay(sql(), stream(to, max_attempts=1)):
        await to.wait_for(3, timeout=30)
        await settled(store, {Status.PUBLISHED: 3})
    assert by_key(to.deliveries) == in_order(["k"], 3)
    assert "bug" in {getattr(record, "action", None) for record in caplog.records}


async def test_the_circuit_recovers_when_the_shard_of_its_probe_is_lost(sql: SqlOutbox, store: Store) -> None:
    """The shard that waits to be the probe is taken by another worker; the others must still be served."""
    to = MemoryPublisher()
    to.down()
    keys = [key_of(shard) for shard in range(4)]
    circuit = CircuitState()
    async with relay(sql(), stream(to, slots=1, lease=30), observers=[circuit]) as running:
        await until(lambda: worker_of(running) is not None)
        worker = worker_of(running)
        await store.add(mixed(keys, 3))
        await until(lambda: circuit.state == "open" and len(worker._waiting) == 4)
        lost = worker._waiting[0]
        worker.ownership.drop(lost)
        to.up()
        await to.wait_for(9)
    rest = [key for key in keys if key != keys[lost.grant.shard]]
    assert {key: by_key(to.deliveries)[key] for key in rest} == in_order(rest, 3)


@pytest.mark.parametrize("error", ["nul \x00 byte", "lone \ud800 surrogate", "separators \u2028 \x85 \x1c"])
async def test_an_error_that_a_database_cannot_store_is_still_written_down(
    outbox: Outbox, store: Store, error: str
) -> None:
    to = MemoryPublisher()
    to.fail_next(retry(error), key="k")
    to.fail_next(rejected(error), key="k")
    same_shard = key_of(0)
    await store.add([*numbered("k", 2), *numbered(same_shard, 2)])
    async with relay(outbox(), stream(to)):
        await to.wait_for(3)
        await settled(store, {Status.PUBLISHED: 3, Status.DEAD: 1})
    assert copies(to.deliveries) == 0
    (letter,) = await store.dead_letters()
    assert len(letter.errors) == 2


async def test_an_id_that_died_before_can_die_again(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.fail_next(rejected("bad"), key="k", times=2)
    (event,) = numbered("k", 1)
    async with relay(outbox(), stream(to)):
        await store.add([event])
        await settled(store, {Status.DEAD: 1})
        await store.add([event])
        await store.add(numbered("k", 1, first=2))
        await to.wait_for(1)
        await settled(store, {Status.PUBLISHED: 1, Status.DEAD: 1})
    assert by_key(to.deliveries) == {"k": [2]}


class Half(MemoryPublisher):
    """Publishes every event except the odd ones."""

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        sent = await super().publish(Batch.of(event for event in batch if event.type != "odd"))
        rest = iter(sent)
        return [retry("odd") if event.type == "odd" else next(rest) for event in batch]


async def test_a_users_backoff_that_raises_does_not_publish_the_batch_again(sql: SqlOutbox, store: Store) -> None:
    def broken(attempts: int) -> float:
        raise ZeroDivisionError

    to = Half()
    odd = make_event(key=None, stream=STREAM, type="odd")
    await store.add([odd, *(make_event(key=None, stream=STREAM) for _ in range(20))])
    async with relay(sql(), stream(to, retry=broken, max_attempts=2)):
        await to.wait_for(20)
        await settled(store, {Status.PUBLISHED: 20, Status.DEAD: 1})
    assert copies(to.deliveries) == 0
