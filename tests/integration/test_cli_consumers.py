"""The command line on consumers and their dead letters."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pillarbox.conformance.events import make_event
from pillarbox.event import Event
from pillarbox.store import ConsumerReport, Failure, Store
from pillarbox.urls import store_from_url
from tests.integration.commands import Command

pytestmark = pytest.mark.timeout(300)
CARDS = ("--consumer", "cards")


@pytest_asyncio.fixture
async def store(pillarbox: Command) -> AsyncIterator[Store]:
    """The test's own connection to the outbox of the command."""
    variables = pillarbox.variables
    made = store_from_url(variables["PILLARBOX_STORE"], prefix=variables["PILLARBOX_PREFIX"])
    await made.open()
    yield made
    await made.close()


async def bury(store: Store, count: int, consumer: str = "cards") -> list[Event]:
    events = [make_event(key="7", type=f"n.{n}") for n in range(count)]
    for event in events:
        assert await store.bury(consumer, Failure(event, "refused: \x1b[31m", 5))
    return events


@pytest.mark.asyncio
async def test_dead_letters_of_a_consumer(pillarbox: Command, store: Store) -> None:
    one, two, three = await bury(store, 3)
    assert pillarbox("dead", "list", "--json").json == [], "those of relays only"
    assert pillarbox("dead", "list").out == (
        "no dead letter matches; consumers have some: cards (3), see `pillarbox dead list --consumer NAME`\n"
    )
    listed = pillarbox("dead", "list", *CARDS, "--json").json
    assert [(row["id"], row["consumer"], row["replay_at"]) for row in listed] == [
        (str(event.id), "cards", None) for event in (one, two, three)
    ]
    assert "\x1b" not in pillarbox("dead", "list", *CARDS).out
    id = str(one.id)
    pillarbox("dead", "show", id).failed(3, "is a dead letter of consumer 'cards'; add --consumer cards")
    shown = pillarbox("dead", "show", id, *CARDS, "--json").json
    assert [line["error"] for line in shown["errors"]] == ["refused: \x1b[31m"]
    pillarbox("dead", "show", id, "--consumer", "mail").failed(3, "is a dead letter of consumer 'cards'")


@pytest.mark.asyncio
async def test_dead_letters_of_a_consumer_are_replayed_and_discarded(pillarbox: Command, store: Store) -> None:
    one, two, three = await bury(store, 3)
    pillarbox("dead", "replay", *CARDS).failed(2, "give ids, filters or --all")
    pillarbox("dead", "discard", *CARDS, "--all").failed(2, "3 dead letters would be lost", "--yes")
    assert len(pillarbox("dead", "replay", *CARDS, "--all", "--dry-run", "--json").json) == 3
    assert pillarbox("dead", "replay", str(one.id), "--json").code == 3, "no relay has such a dead letter"
    replayed = pillarbox("dead", "replay", *CARDS, "--type", "n.0", "--by", "olga")
    assert replayed.out.startswith("replayed 1 dead letter\nconsumer 'cards' applies them again as soon as it runs")
    waiting = [row["replay_at"] is not None for row in pillarbox("dead", "list", *CARDS, "--json").json]
    assert waiting == [True, False, False]
    assert pillarbox("dead", "replay", "--consumer", "card", "--all").out == (
        "replayed 0 dead letters; consumers have some: cards (3), see `pillarbox dead list --consumer NAME`\n"
    )
    assert "consumers have some: cards (3)" in pillarbox("dead", "list", "--consumer", "card").out
    assert "consumers" not in pillarbox("dead", "list", *CARDS, "--type", "none").out
    (replay,) = await store.take_replays("cards", "ann", 10, 60)
    assert await store.finish_replay("cards", replay)
    assert pillarbox("dead", "discard", *CARDS, str(two.id), "--yes", "--json").json == {"discarded": 1}
    assert [row["id"] for row in pillarbox("dead", "list", *CARDS, "--json").json] == [str(three.id)]
    audited = [(row["action"], row["consumer"]) for row in pillarbox("audit", "--json").json]
    assert audited == [("discard", "cards"), ("replay", "cards")]


@pytest.mark.asyncio
async def test_the_status_of_consumers(pillarbox: Command, store: Store) -> None:
    assert pillarbox("consumers").out.startswith("no consumer runs with ")
    assert pillarbox("consumers", "--json").json == []
    await bury(store, 2, "mail")
    await store.report("cards", "ann", ConsumerReport("kafka orders", 6, 1, 3, 1500, 2.25), 60)
    await store.report("cards", "bob", ConsumerReport("kafka orders", 6, 0, 1, 500, 90.0, "orders/3: deleted"), 60)
    await store.report("cards", "eve", ConsumerReport("kafka orders", 6, 0, 1, 500, 90.0), -1)
    await store.report("search", "joe", ConsumerReport("kafka orders", 1, 0, 0, None, None), -1)
    cards, mail, search = pillarbox("consumers", "--json").json
    assert {name: cards[name] for name in ("lag_events", "lag_seconds", "lanes", "paused_lanes", "held_keys")} == {
        "lag_events": 2000,
        "lag_seconds": 90.0,
        "lanes": 12,
        "paused_lanes": 1,
        "held_keys": 4,
    }
    assert [worker["failed_lanes"] for worker in cards["worker_list"]] == ["", "orders/3: deleted"]
    assert [(worker["name"], worker["live"]) for worker in cards["worker_list"]] == [("ann", True), ("bob", True)]
    assert (mail["dead"], mail["workers"], mail["source"], mail["worker_list"]) == (2, 0, None, [])
    assert (search["workers"], [worker["name"] for worker in search["worker_list"]]) == (0, ["joe"])
    for command in ("consumers", "status"):
        out = pillarbox(command).out
        assert "12 (1 paused)" in out
        assert "1.5 min" in out
        assert "cards: served by ann (6 lanes), bob (6 lanes)" in out
        assert "cards: bob gets no more messages of orders/3: deleted\n" in out
        assert "mail: 2 dead letters, see `pillarbox dead list --consumer mail`" in out
        assert "search: no process is live; joe was seen " in out
        assert "mail: no process runs\n" in out
    failed = pillarbox("status", "--fail-if-dead")
    assert (failed.code, failed.err) == (1, "pillarbox: consumer 'mail' has 2 dead letters\n")
