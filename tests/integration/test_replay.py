"""Replay of published events on real databases: by range, in order, once each, with a dry run and an audit."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio

from pillarbox import operations
from pillarbox.conformance.events import make_event
from pillarbox.event import Event, Status
from pillarbox.operations import events as events_module
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Stream
from pillarbox.store import Filter, Ref, Store
from pillarbox.urls import store_from_url
from tests.integration.commands import Command
from tests.integration.relays import STREAM, Outbox, eventually, numbered, relay, settled, stream

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


def written(count: int, key: str = "7", **fields: Any) -> list[Event]:
    """Events of one key."""
    return [make_event(**{"stream": STREAM, "key": key, **fields}) for _ in range(count)]


async def moment(store: Store) -> datetime:
    """An instant between all that was written and all that comes."""
    now = await store.clock()
    await eventually(store.clock, lambda later: later > now + timedelta(milliseconds=4))
    return now + timedelta(milliseconds=2)


async def publish(own: Store, *streams: Stream) -> None:
    async with relay(own, *streams) as running:
        await running.drain()


async def test_a_range_is_published_again_in_order_and_once(outbox: Outbox, store: Store) -> None:
    events = written(10)
    await store.add([*events, *(event._replace(stream="mail") for event in events[:3])])
    since = await moment(store)
    # A writer on MongoDB sets the instant itself.
    wanted = written(10)
    await store.add([*written(30, key="8", type="other"), *wanted])
    until = await moment(store)
    await store.add(written(10))
    to, mail = MemoryPublisher(), MemoryPublisher()
    await publish(outbox(), stream(to), stream(mail, name="mail"))
    assert (len(to.deliveries), len(mail.deliveries)) == (60, 3)
    to.deliveries.clear()

    where = Filter(stream=STREAM, key="7", type=wanted[0].type, since=since, until=until)
    found = [each.event.id async for each in operations.published(store, where)]
    assert set(found) == {event.id for event in wanted}
    assert (await store.count(STREAM)).get(Status.PENDING, 0) == 0, "a look changes nothing"

    told: list[tuple[int, int]] = []
    assert await operations.replay_published(store, where, "olga", lambda *each: told.append(each)) == 10
    assert told == [(10, 10)]
    rows = await store.audit(100, STREAM, events_module.REPLAYED)
    assert {(row.by, row.event_id) for row in rows} == {("olga", event.id) for event in wanted}
    await publish(outbox(), stream(to), stream(mail, name="mail"))
    assert [event.id for event in to.deliveries] == [event.id for event in wanted]
    assert len(mail.deliveries) == 3, "another stream is left alone"


async def test_a_replay_in_steps_while_a_relay_works_sends_each_once(
    outbox: Outbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "_STEP", 10)
    events = [*written(25), *written(25, key="8")]
    await store.add(events)
    to = MemoryPublisher()
    async with relay(outbox(), stream(to)) as running:
        await running.drain()
        to.deliveries.clear()
        send = store.replay_published

        async def send_and_drain(refs: Sequence[Ref], by: str) -> int:
            done = await send(refs, by)
            await store.add(written(1, key="7", type="late"))
            await running.drain()
            return done

        monkeypatch.setattr(store, "replay_published", send_and_drain)
        assert await operations.replay_published(store, Filter(type=events[0].type), "olga") == 50
        await running.drain()
    again = [event for event in to.deliveries if event.type != "late"]
    for key in ("7", "8"):
        wanted = [event.id for event in events if event.key == key]
        assert [event.id for event in again if event.key == key] == wanted


async def test_the_rest_of_an_interrupted_replay(outbox: Outbox, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_STEP", 10)
    events = written(25)
    await store.add(events)
    to = MemoryPublisher()
    await publish(outbox(), stream(to))
    to.deliveries.clear()
    begun = await store.clock()
    send = store.replay_published

    async def once(refs: Sequence[Ref], by: str) -> int:
        monkeypatch.setattr(store, "replay_published", interrupted)
        return await send(refs, by)

    async def interrupted(refs: Sequence[Ref], by: str) -> int:
        raise asyncio.CancelledError

    monkeypatch.setattr(store, "replay_published", once)
    with pytest.raises(asyncio.CancelledError):
        await operations.replay_published(store, Filter(), "olga")
    monkeypatch.setattr(store, "replay_published", send)
    await publish(outbox(), stream(to))
    assert [event.id for event in to.deliveries] == [event.id for event in events[:10]]

    assert await operations.replay_published(store, Filter(), "olga", skip_since=begun) == 15
    await publish(outbox(), stream(to))
    assert [event.id for event in to.deliveries] == [event.id for event in events]
    assert await operations.replay_published(store, Filter(), "olga", skip_since=begun) == 0
    later = await store.clock() + timedelta(hours=1)
    assert await operations.replay_published(store, Filter(), "olga", skip_since=later) == 25


@pytest_asyncio.fixture
async def shop(pillarbox: Command) -> AsyncIterator[Store]:
    variables = pillarbox.variables
    made = store_from_url(variables["PILLARBOX_STORE"], prefix=variables["PILLARBOX_PREFIX"])
    await made.open()
    yield made
    await made.close()


async def test_the_command(pillarbox: Command, shop: Store) -> None:
    await shop.add([*numbered("a", 3), *written(1, type="card.made")])
    since = await moment(shop)
    await shop.add(written(3, type="card.made"))
    until = await moment(shop)
    await shop.add(written(1, type="card.made"))
    async with relay(shop, stream(MemoryPublisher())):
        await settled(shop, {Status.PUBLISHED: 8})
    call = ("events", "replay", "--stream", STREAM, "--type", "card.made")
    window = ("--since", since.isoformat(), "--until", until.isoformat())
    told = pillarbox(*call, *window, "--dry-run", "--json").json
    assert told == {"dry_run": True, "replayed": 0, "matching": 3}
    assert pillarbox(*call, *window, "--dry-run").out == "3 published events would be replayed\n"
    assert pillarbox(*call, *window, "--by", "ana").out == "3 published events will be published again\n"
    assert pillarbox(*call, "--skip-since", "1h", "--json").json == {
        "dry_run": False,
        "replayed": 2,
        "matching": 2,
    }
    assert pillarbox(*call).out.startswith("no published event matches")
    rows = pillarbox("audit", "--json").json
    assert [row["by"] for row in rows if row["action"] == "replay published"][-3:] == ["ana"] * 3
    pillarbox("events", "replay").failed(2, "--all")
    pillarbox("events", "replay", "--all", "--key", "7").failed(2, "--all")
    pillarbox("events", "replay", "--all", "--skip-since", "soon").failed(2, "--skip-since is 'soon'")
