"""Why an event is late: each cause on real databases, with the sentence and the command that helps."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from pillarbox import operations
from pillarbox.conformance.events import make_event
from pillarbox.conformance.store_setup import read, settle
from pillarbox.event import Event, Mode
from pillarbox.ids import uuid7
from pillarbox.operations import SeveralStreams, Why
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.store import PARKED, ClaimResults, Failure, Grant, Hold, HoldMode, Settlement, Store
from tests.integration.commands import Command
from tests.integration.relays import STREAM, Outbox, eventually, key_of, numbered, relay, stream

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

LEASE = 60.0
LONG = 3600.0
PAST = -1.0


async def ask(store: Store, event: Event, command: str | None) -> Why:
    answer = await operations.why(store, event.id, event.stream)
    assert answer.command == (None if command is None else command.format(event.id))
    return answer


async def own(store: Store, worker: str = "ann") -> dict[int, Grant]:
    await store.announce(STREAM, Mode.ORDERED, "memory")
    await store.join(STREAM, worker, LEASE)
    return {grant.shard: grant for grant in await store.take(STREAM, worker, 64, LEASE)}


async def written(store: Store, grant: Grant, events: Sequence[Event]) -> list[Event]:
    await store.add(events)
    return await eventually(lambda: read(store, grant, 100, 10**6), lambda found: len(found) == len(events))


async def test_an_event_that_nobody_committed(outbox: Outbox, store: Store) -> None:
    answer = await ask(store, make_event(stream=STREAM), "pillarbox events list --since 1h")
    assert answer.cause == "unknown"
    assert "not committed or was rolled back" in answer.sentence


async def test_an_event_that_is_published_or_dead_or_scheduled(outbox: Outbox, store: Store) -> None:
    grant = (await own(store))[0]
    one, two = await written(store, grant, numbered(key_of(0), 2))
    await settle(store, Settlement(grant, published=[one], dead=[Failure(two, "refused for good", 1)]))
    answer = await ask(store, one, f"pillarbox events show {{}} --stream {STREAM}")
    assert answer.cause == "published"
    assert str(answer.facts["published_at"]) in answer.sentence
    answer = await ask(store, two, f"pillarbox dead replay {{}} --stream {STREAM}")
    assert (answer.cause, answer.facts["error"]) == ("dead", "refused for good")
    later = make_event(stream=STREAM, available_at=datetime.now(UTC) + timedelta(hours=1))
    await store.add([later])
    answer = await ask(store, later, None)
    assert answer.cause == "scheduled"
    assert "in 60 min" in answer.sentence


async def test_an_event_of_several_streams_is_asked_for_by_its_stream(outbox: Outbox, store: Store) -> None:
    event = make_event(stream=STREAM)
    await store.add([event, event._replace(stream="mail")])
    with pytest.raises(SeveralStreams):
        await operations.why(store, event.id)
    assert (await operations.why(store, event.id, "mail")).cause == "unserved"
    answer = await operations.why(store, event.id, "males")
    assert answer.cause == "elsewhere"
    assert answer.sentence == f"stream 'males' has no event {event.id}; it is in stream 'mail' and 'orders'"
    assert answer.command == f"pillarbox events why {event.id} --stream mail"


async def test_an_event_of_a_paused_stream(outbox: Outbox, store: Store) -> None:
    event = make_event(stream=STREAM)
    await store.add([event])
    await store.pause(STREAM, "olga")
    await store.resume(STREAM, "igor")
    await store.pause("mail", "igor")
    await store.pause(STREAM, "ivan")
    answer = await ask(store, event, f"pillarbox streams resume {STREAM}")
    assert (answer.cause, answer.facts["by"]) == ("paused", "ivan")
    assert "is paused by ivan since 20" in answer.sentence


async def test_an_event_of_a_stream_that_nobody_serves(outbox: Outbox, store: Store) -> None:
    event = make_event(stream=STREAM)
    await store.add([event])
    assert (
        await ask(store, event, f"pillarbox relay --stream {STREAM}")
    ).sentence == "no relay serves its stream 'orders'"
    await own(store)
    await store.join(STREAM, "ann", PAST)
    answer = await ask(store, event, f"pillarbox relay --stream {STREAM}")
    assert answer.sentence == "no relay serves its stream 'orders'; worker ann that had it is gone"


async def test_an_event_whose_destination_is_down(outbox: Outbox, store: Store) -> None:
    to = MemoryPublisher()
    to.down("no broker there")
    event = make_event(stream=STREAM)
    await store.add([event])
    async with relay(outbox(), stream(to, lease=0.6)):
        answer = await eventually(lambda: operations.why(store, event.id), lambda found: found.cause == "circuit_open")
    assert answer.command == "pillarbox doctor"
    assert "no broker there" in answer.sentence
    assert "memory is down since 20" in answer.sentence


async def test_an_event_behind_another_of_its_key(outbox: Outbox, store: Store) -> None:
    grant = (await own(store))[0]
    head, behind = await written(store, grant, numbered(key_of(0), 2))
    key = str(head.key)
    failed = [Failure(head, "refused", 3)]
    await settle(store, Settlement(grant, failed=failed, held=[behind], hold_keys={key: Hold(HoldMode.RETRYING, LONG)}))
    answer = await ask(store, behind, f"pillarbox events show {head.id} --stream {STREAM}")
    assert answer.cause == "held"
    assert answer.sentence.startswith(
        f"event {head.id} of its key {key!r} comes first, which failed: refused; its next"
    )
    assert answer.sentence.endswith("in 60 min")
    answer = await ask(store, head, f"pillarbox events show {{}} --stream {STREAM}")
    assert answer.cause == "failed"
    assert answer.sentence.startswith("attempt 3 failed at 20")
    assert answer.sentence.endswith("in 60 min")


async def test_an_event_that_waits_uncharged(outbox: Outbox, store: Store) -> None:
    grant = (await own(store))[0]
    (event,) = await written(store, grant, numbered(key_of(0), 1))
    hold = {str(event.key): Hold(HoldMode.RETRYING, LONG)}
    await settle(store, Settlement(grant, failed=[Failure(event, "no handler for it", 0)], hold_keys=hold))
    answer = await ask(store, event, f"pillarbox events show {{}} --stream {STREAM}")
    assert (answer.cause, answer.facts["attempts"]) == ("failed", 0)
    assert answer.sentence.startswith("it has to wait, uncharged, since 20")
    assert ": no handler for it; its next attempt is at 20" in answer.sentence


@pytest.mark.parametrize("mode", [HoldMode.BLOCKED, HoldMode.PARKED])
async def test_an_event_behind_a_dead_letter(outbox: Outbox, store: Store, mode: HoldMode) -> None:
    grant = (await own(store))[0]
    head, behind = await written(store, grant, numbered(key_of(0), 2))
    key = str(head.key)
    hold = {key: Hold(mode, None, head.id)}
    await settle(store, Settlement(grant, dead=[Failure(head, "refused", 3)], hold_keys=hold))
    await settle(store, Settlement(grant, held=[behind]))
    answer = await ask(store, behind, f"pillarbox dead replay {head.id} --stream {STREAM}")
    assert answer.cause == mode.value
    assert answer.sentence == f"its key {key!r} is {mode.value} by the dead letter {head.id}: refused"
    letters = {letter.event.id: letter.error for letter in await store.dead_letters()}
    assert (letters.get(behind.id) == PARKED) is (mode is HoldMode.PARKED)


async def test_an_event_of_a_shard_whose_owner_died(outbox: Outbox, store: Store) -> None:
    event = make_event(stream=STREAM)
    await store.add([event])
    await own(store, "ann")
    await store.join(STREAM, "bob", LEASE)
    await store.leave(STREAM, "ann")
    answer = await ask(store, event, None)
    assert (answer.cause, answer.facts["owner"]) == ("owned", "ann")
    assert "then another worker takes it over" in answer.sentence


async def test_an_event_behind_older_ones_of_its_shard(outbox: Outbox, store: Store) -> None:
    grant = (await own(store))[0]
    first, second, third, last = await written(store, grant, numbered(key_of(0), 4))
    answer = await ask(store, last, "pillarbox status")
    assert (answer.cause, answer.sentence) == ("behind", "3 older events come before it")

    async def publish_one(seconds: float) -> None:
        await settle(store, Settlement(grant, published=[first]))

    answer = await operations.why(store, last.id, wait=publish_one)
    assert answer.facts["per_second"] == 1.0
    assert answer.sentence == "3 older events come before it; its shard publishes about 1 a second"

    async def stand_still(seconds: float) -> None:
        assert seconds > 0

    answer = await operations.why(store, last.id, wait=stand_still)
    assert answer.sentence.endswith("none of them was published in the last second")
    await settle(store, Settlement(grant, published=[second]))
    assert (await ask(store, last, "pillarbox status")).sentence == "1 older event comes before it"
    await settle(store, Settlement(grant, published=[third]))
    assert (await ask(store, last, None)).cause == "next"


async def test_an_event_of_a_key_that_is_about_to_be_released(outbox: Outbox, store: Store) -> None:
    grant = (await own(store))[0]
    (event,) = await written(store, grant, numbered(key_of(0), 1))
    await settle(store, Settlement(grant, hold_keys={str(event.key): Hold(HoldMode.RETRYING, LONG)}))
    assert [each.head for each in await store.stuck_keys(STREAM)] == [None]
    assert (await ask(store, event, None)).cause == "next"


async def test_an_event_of_a_queue_stream(outbox: Outbox, store: Store) -> None:
    (event,) = numbered(None, 1)
    await store.add([event])
    await store.announce(STREAM, Mode.QUEUE, "handlers")
    await store.join(STREAM, "ann", LEASE)
    claims = [claim for shard in range(store.shards) for claim in await store.claim(STREAM, shard, "ann", 1, LEASE)]
    answer = await ask(store, event, None)
    assert (answer.cause, answer.facts["worker"]) == ("processing", "ann")
    assert answer.sentence.startswith("worker ann is processing it since 20")
    await store.renew_claims(claims, PAST)
    answer = await ask(store, event, f"pillarbox rescue --stream {STREAM}")
    assert answer.cause == "lease_over"
    await store.settle_claims(claims, ClaimResults(failed=[Failure(claims[0].event, "too slow", 1, LONG)]))
    answer = await ask(store, event, f"pillarbox events show {{}} --stream {STREAM}")
    assert answer.cause == "failed"
    assert "too slow; its next attempt is at 20" in answer.sentence


async def test_the_command_says_why(pillarbox: Command) -> None:
    id = pillarbox("events", "add", "order.created", "{}", "--key", "7").out.strip()
    told = pillarbox("events", "why", id)
    assert (told.code, told.out) == (0, "no relay serves its stream 'default'\nsee: pillarbox relay --stream default\n")
    assert pillarbox("events", "why", id, "--json").json["cause"] == "unserved"
    assert pillarbox("events", "why", str(uuid7())).code == 3
    assert pillarbox("events", "why", id, "--stream", "nobody").code == 3
    pillarbox("events", "why", "7").failed(2, "'7' is not an event's id")
