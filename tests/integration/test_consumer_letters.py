"""Dead letters of a consumer with a store: their history, their replay, and what becomes of copies."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pillarbox import Consumer, Event, Fixed, Handlers
from pillarbox.conformance.events import make_event
from pillarbox.sources.memory import MemorySource, MemoryTopic
from pillarbox.store import Ref, Store
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

    def consumer(self, topic: MemoryTopic, store: Store) -> Consumer:
        return Consumer(
            "cards",
            MemorySource(topic),
            to=self.handlers,
            store=store,
            retry=Fixed(0.0),
            max_attempts=3,
            replay_every="10ms",
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
