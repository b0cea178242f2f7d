"""Dead letters of a consumer with a store: their history, their replay, and what becomes of copies."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pillarbox import Consumer, Event, Fixed, Handlers, Inbox, Reject
from pillarbox.conformance.events import make_event
from pillarbox.consumer import make_decoder
from pillarbox.source import Message
from pillarbox.sources.memory import MemorySource, MemoryTopic
from pillarbox.store import Failure, Ref, Store
from pillarbox.stores.memory import MemoryStore
from tests.integration.relays import WAIT, eventually


@pytest_asyncio.fixture
async def store() -> AsyncIterator[Store]:
    store = MemoryStore()
    await store.migrate()
    await store.open()
    yield store
    await store.close()


class Cards:
    """Handlers that fail until they are mended."""

    def __init__(self) -> None:
        self.handlers = Handlers()
        self.applied: list[Event] = []
        self.is_mended = False

        self.failures = 0  # that come although it is mended

        @self.handlers.on("order.created")
        async def handle(event: Event) -> None:
            await asyncio.sleep(0)
            if not self.is_mended or self.failures:
                self.failures -= self.is_mended
                raise RuntimeError("broken")
            self.applied.append(event)

    def consumer(self, topic: MemoryTopic, store: Store, **settings: Any) -> Consumer:
        return Consumer(
            "cards",
            MemorySource(topic),
            to=self.handlers,
            store=store,
            retry=Fixed(0.0),
            max_attempts=3,
            replay_every="10ms",
            **settings,
        )


async def errors(store: Store) -> list[list[str]]:
    return [[entry["error"] for entry in letter.errors] for letter in await store.dead_letters(consumer="cards")]


@pytest.mark.asyncio
async def test_a_dead_letter_has_every_error_and_is_applied_when_an_operator_replays_it(store: Store) -> None:
    topic, cards, event = MemoryTopic(), Cards(), make_event()
    topic.send(event)
    ref = Ref(event.id, event.stream, "cards")
    async with cards.consumer(topic, store):
        await topic.wait_settled("cards", timeout=WAIT)
        assert await errors(store) == [["RuntimeError: broken"] * 3]
        assert await store.replay([ref], "olga") == 1
        # A replay has as many attempts as a new event.
        await eventually(lambda: errors(store), lambda found: found == [["RuntimeError: broken"] * 6])
        cards.is_mended = True
        assert await store.replay([ref], "olga") == 1
        await eventually(lambda: store.dead_count("cards"), lambda count: count == 0)
    assert [applied.id for applied in cards.applied] == [event.id]


@pytest.mark.asyncio
async def test_a_copy_of_a_dead_event_writes_no_second_letter(store: Store) -> None:
    topic, cards, event = MemoryTopic(), Cards(), make_event()
    for _ in range(3):
        topic.send(event)
    async with cards.consumer(topic, store):
        await topic.wait_settled("cards", timeout=WAIT)
    assert await errors(store) == [["RuntimeError: broken"] * 3]


@pytest.mark.asyncio
async def test_replays_of_a_key_are_applied_in_order_though_the_first_fails_again(store: Store) -> None:
    topic, cards = MemoryTopic(), Cards()
    events = [make_event(key="k") for _ in range(3)]
    for event in events:
        topic.send(event)
    async with cards.consumer(topic, store):
        await topic.wait_settled("cards", timeout=WAIT)
        cards.is_mended, cards.failures = True, 2
        assert await store.replay([Ref(event.id, event.stream, "cards") for event in events], "olga") == 3
        await eventually(lambda: store.dead_count("cards"), lambda count: count == 0)
    assert [applied.id for applied in cards.applied] == [event.id for event in events]


@pytest.mark.asyncio
async def test_each_message_that_can_be_read_later_has_an_id_of_its_own(store: Store) -> None:
    """Else the inbox would take the second one for a copy of the first."""
    topic, cards, by_place = MemoryTopic(), Cards(), make_decoder(ids="place")
    cards.is_mended = True

    def decode(message: Message) -> Event:
        if not cards.is_mended:
            raise Reject("an older form")
        return by_place(message)

    for _ in range(2):
        topic.put(b"{}", headers=[("event_type", b"order.created")])
    async with cards.consumer(topic, store, decoder=decode):
        await topic.wait_settled("cards", timeout=WAIT)
        first = {event.id for event in cards.applied}
    topic, cards.is_mended, cards.applied = MemoryTopic(), False, []
    for _ in range(2):
        topic.put(b"{}", headers=[("event_type", b"order.created")])
    async with cards.consumer(topic, store, decoder=decode):
        await topic.wait_settled("cards", timeout=WAIT)
        letters = await store.dead_letters(consumer="cards")
        cards.is_mended = True
        assert await store.replay([Ref(each.event.id, "default", "cards") for each in letters], "olga") == 2
        await eventually(lambda: store.dead_count("cards"), lambda count: count == 0)
    assert {event.id for event in cards.applied} == first, "the ids that they would have had at once"
    assert len(first) == 2


@pytest.mark.asyncio
async def test_an_inbox_of_another_name_is_told(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "cards.db")

    def handle(event: Event, tx: sqlite3.Connection) -> None: ...

    for name in ("cards", "card"):
        handlers = Handlers()
        consumer = Consumer("cards", MemorySource(), to=handlers, store=store)
        handlers.on("order.created")(Inbox(name).once(connect)(handle))
        async with consumer:
            await consumer.ready()
    (told,) = [record for record in caplog.records if getattr(record, "action", "") == "other_inbox"]
    assert (
        "consumer 'cards': handler handle records its events in Inbox('card'), so a copy"
        in told.getMessage().replace("test_an_inbox_of_another_name_is_told.<locals>.", "")
    )


@pytest.mark.asyncio
async def test_a_stop_finishes_the_replay_that_runs(store: Store) -> None:
    topic, handlers, event = MemoryTopic(), Handlers(), make_event()
    begun, may_end, applied = asyncio.Event(), asyncio.Event(), list[Event]()

    @handlers.on("order.created")
    async def handle(event: Event) -> None:
        begun.set()
        await may_end.wait()
        applied.append(event)

    assert await store.bury("cards", Failure(event, "broken", 3))
    assert await store.replay([Ref(event.id, event.stream, "cards")], "olga") == 1
    cards = Consumer("cards", MemorySource(topic), to=handlers, store=store, replay_every="10ms")
    await cards.start()
    await asyncio.wait_for(begun.wait(), WAIT)
    stopping = asyncio.create_task(cards.stop())
    # Longer than a service without work has for its end.
    await asyncio.wait([stopping], timeout=0.7)
    assert not stopping.done()
    may_end.set()
    await stopping
    assert [each.id for each in applied] == [event.id]
    assert await store.dead_count("cards") == 0


@pytest.mark.asyncio
async def test_a_replay_that_would_wait_for_longer_than_its_lease_is_dead_again(store: Store) -> None:
    """Else each lease would begin with the first attempt, and the replay would never end."""
    topic, handlers, event = MemoryTopic(), Handlers(), make_event()

    @handlers.on("order.created", retry=Fixed(3600.0), max_attempts=20)
    async def handle(event: Event) -> None:
        raise RuntimeError("still broken")

    assert await store.bury("cards", Failure(event, "broken", 3))
    assert await store.replay([Ref(event.id, event.stream, "cards")], "olga") == 1
    async with Consumer("cards", MemorySource(topic), to=handlers, store=store, replay_every="10ms"):
        await eventually(lambda: errors(store), lambda found: found == [["broken", "RuntimeError: still broken"]])
    (letter,) = await store.find_by_id(event.id, "cards")
    assert letter.replay_at is None
