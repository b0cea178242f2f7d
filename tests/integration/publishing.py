"""Helpers for tests of publishers: publish as a relay does, and check the order of keys."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, Outcome, Publisher, Result


async def publish(publisher: Publisher, events: Sequence[Event]) -> list[Outcome]:
    return list(await publisher.publish(Batch.of(events)))


async def publish_rest(publisher: Publisher, events: Sequence[Event]) -> None:
    """Publish until nothing is left, as a relay would. No attempt may be charged."""
    async with asyncio.timeout(60):
        while events:
            outcomes = await publish(publisher, events)
            assert not [each for each in outcomes if each.result is Result.RETRY and each.charged]
            rest = unpublished(events, outcomes)
            if len(rest) == len(events):
                await asyncio.sleep(0.05)  # nothing tells a client that a real server is ready again
            events = rest


def unpublished(events: Sequence[Event], outcomes: Sequence[Outcome]) -> list[Event]:
    return [event for event, each in zip(events, outcomes, strict=True) if each is not PUBLISHED]


def numbered(keys: int, count: int) -> list[Event]:
    """Events whose payload is their place in their key."""
    return [make_event(key=f"k{key}", payload=b"%d" % n) for n in range(count) for key in range(keys)]


def assert_key_order(events: Sequence[Event], arrived: Sequence[str]) -> None:
    """All arrived, and the first copies of a key are in order. arrived: event ids."""
    by_id = {str(event.id): event for event in events}
    first: dict[str | None, list[int]] = defaultdict(list)
    for each in dict.fromkeys(arrived):
        first[by_id[each].key].append(int(by_id[each].payload))
    assert set(by_id) == set(arrived), "events are missing"
    assert all(numbers == sorted(numbers) for numbers in first.values()), "a key's events arrived in another order"
