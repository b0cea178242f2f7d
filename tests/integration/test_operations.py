"""The operations of the command line, on real databases."""

import pytest

from pillarbox import operations
from pillarbox.conformance.events import make_event
from pillarbox.conformance.store_setup import read, settle
from pillarbox.event import Event, Mode, Status
from pillarbox.operations import Decided, NotFound, PlannedStream, SeveralStreams, Steered
from pillarbox.store import Failure, Filter, Settlement, Store
from tests.integration.relays import Outbox

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


async def die(store: Store, *events: Event) -> None:
    """Write these events, and let them die."""
    await store.add(events)
    for stream in {event.stream for event in events}:
        await store.announce(stream, Mode.ORDERED, "memory")
        await store.join(stream, "ann", 60)
        grants = await store.take(stream, "ann", 64, 60)
        for grant in grants:
            dead = [Failure(event, "refused", 1) for event in await read(store, grant, 100, 1_000_000)]
            await settle(store, Settlement(grant, dead=dead))
        await store.give(grants)
        await store.leave(stream, "ann")


async def test_an_id_in_several_streams_is_refused_until_one_is_named(outbox: Outbox, store: Store) -> None:
    event = make_event(key="7", stream="mail")
    await die(store, event, event._replace(stream="orders"), make_event(stream="mail"))
    where = Filter(ids=[event.id])
    for refused in (
        operations.find_event(store, event.id),
        operations.find_dead_letter(store, event.id),
        operations.find_all_dead(store, where),
        operations.count_dead(store, where),
        operations.replay(store, where, "olga"),
        operations.discard(store, where, "olga"),
    ):
        with pytest.raises(SeveralStreams, match=f"{event.id} is in the streams 'mail', 'orders'") as caught:
            await refused
        assert {id: sorted(streams) for id, streams in caught.value.streams.items()} == {event.id: ["mail", "orders"]}
    assert len(await store.find_dead(Filter(), 10)) == 3, "nothing was changed"
    assert (await operations.find_event(store, event.id, "orders")).event.stream == "orders"

    assert await operations.replay(store, Filter(stream="mail", ids=[event.id]), "olga") == Decided(1, [])
    assert (await operations.find_event(store, event.id, "mail")).event.status is Status.PENDING
    letter = await operations.find_dead_letter(store, event.id)
    assert letter.event.stream == "orders", "only one of the two is a dead letter now"
    with pytest.raises(NotFound, match="in stream 'mail' is pending, not dead"):
        await operations.find_dead_letter(store, event.id, "mail")
    assert await operations.discard(store, where, "olga") == Decided(1, [])
    assert (await operations.find_event(store, event.id)).event.stream == "mail"
    assert await operations.discard(store, where, "olga") == Decided(0, [event.id])
    acts = [(row.action, row.stream, row.event_id) for row in await store.audit(10)]
    assert acts == [("discard", "orders", event.id), ("replay", "mail", event.id)]


async def test_events_and_dead_letters_are_chosen_by_topic_and_aggregate(outbox: Outbox, store: Store) -> None:
    about = [("orders", "order", "7"), ("orders", "cart", "7"), ("mail", "order", "8")]
    given: list[tuple[dict[str, str | None], list[int]]] = [
        ({"topic": "orders"}, [0, 1]),
        ({"aggregate_type": "order"}, [0, 2]),
        ({"aggregate_id": "7"}, [0, 1]),
        ({"topic": "orders", "aggregate_type": "order", "aggregate_id": "7"}, [0]),
        ({"topic": "mail", "aggregate_id": "7"}, []),
    ]
    events, letters = (
        [make_event(stream=stream, topic=topic, aggregate_type=kind, aggregate_id=id) for topic, kind, id in about]
        for stream in ("waiting", "dying")
    )
    await store.add(events)
    await die(store, *letters)
    for texts, places in given:
        where = operations.filter_from(texts)
        found = {each.event.id for each in await store.find(where, 10)}
        assert found == {each[place].id for each in (events, letters) for place in places}
        found = {each.event.id for each in await operations.find_all_dead(store, where)}
        assert found == {letters[place].id for place in places}
    replayed = await operations.replay(
        store, operations.filter_from({"topic": "orders", "aggregate_type": "cart"}), "me"
    )
    discarded = await operations.discard(store, operations.filter_from({"aggregate_id": "7"}), "me")
    assert (replayed.changed, discarded.changed) == (1, 1), "the replayed one is no dead letter any more"
    assert [each.event.id for each in await store.find_dead(Filter(), 10)] == [letters[2].id]


async def test_the_status_shows_how_a_stream_was_served_and_else_the_plan(outbox: Outbox, store: Store) -> None:
    plans = {
        "served": PlannedStream(Mode.ORDERED, "kafka old:9092"),
        "planned": PlannedStream(Mode.QUEUE, "file /tmp/x"),
        "waiting": PlannedStream(Mode.QUEUE),
        "nowhere": PlannedStream(Mode.QUEUE),
    }
    await store.announce("served", Mode.QUEUE, "kafka new:9092")
    await store.add([make_event(stream=name) for name in ("served", "waiting", "unknown", "unknown")])
    rows = {row.stream: row for row in await operations.status(store, plans)}
    assert list(rows) == ["planned", "served", "unknown", "waiting"]
    assert (rows["served"].mode, rows["served"].destination) == (Mode.QUEUE, "kafka new:9092")
    assert (rows["planned"].mode, rows["planned"].destination) == (Mode.QUEUE, "file /tmp/x")
    assert (rows["waiting"].mode, rows["waiting"].destination) == (Mode.QUEUE, None)
    assert (rows["unknown"].mode, rows["unknown"].destination) == (None, None)
    assert (rows["unknown"].waiting, rows["unknown"].counts[Status.PENDING], rows["unknown"].is_unserved) == (
        2,
        2,
        True,
    )
    assert (rows["planned"].waiting, rows["planned"].oldest_seconds, rows["planned"].is_unserved) == (0, None, False)


async def test_a_pause_says_whether_it_changed_something(outbox: Outbox, store: Store) -> None:
    await store.add([make_event(stream="orders")])
    with pytest.raises(NotFound, match=r"no stream 'order'.*did you mean 'orders'\?"):
        await operations.pause(store, "order", "olga")
    assert await operations.pause(store, "orders", "olga") == Steered("orders", paused=True, changed=True)
    assert await operations.pause(store, "orders", "igor") == Steered("orders", paused=True, changed=False)
    assert await operations.pause(store, "new", "olga", force=True) == Steered("new", paused=True, changed=True)
    assert await operations.resume(store, "orders", "igor") == Steered("orders", paused=False, changed=True)
    with pytest.raises(NotFound, match="no stream 'other'"):
        await operations.resume(store, "other", "olga")
    assert [(row.by, row.action) for row in await store.audit(10)] == [
        ("igor", "resume"),
        ("olga", "pause"),
        ("olga", "pause"),
    ]
