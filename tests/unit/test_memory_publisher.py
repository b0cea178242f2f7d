import asyncio

import pytest

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.publisher import PUBLISHED, UNTRIED, outage, rejected, retry
from pillarbox.publishers.memory import MemoryPublisher


async def opened() -> MemoryPublisher:
    publisher = MemoryPublisher()
    await publisher.open()
    return publisher


@pytest.mark.asyncio
async def test_failures_are_given_to_those_they_are_meant_for() -> None:
    publisher = await opened()
    publisher.fail_next(retry("by key"), key="a", times=2)
    publisher.fail_next(rejected("by type"), type="t")
    events = [make_event(key="a"), make_event(key="a"), make_event(key=None, type="t"), make_event(type="t")]
    assert await publisher.publish(Batch.of(events)) == [retry("by key"), UNTRIED, rejected("by type"), PUBLISHED]
    assert await publisher.publish(Batch.of(events[:2])) == [retry("by key"), UNTRIED]
    assert await publisher.publish(Batch.of(events[:2])) == [PUBLISHED, PUBLISHED]
    assert publisher.deliveries == [events[3], *events[:2]]


@pytest.mark.asyncio
async def test_an_outage_lasts_until_up() -> None:
    publisher = await opened()
    publisher.down("gone")
    assert await publisher.publish(Batch.of([make_event()])) == [outage("gone")]
    publisher.up()
    assert await publisher.publish(Batch.of([make_event()])) == [PUBLISHED]


@pytest.mark.asyncio
async def test_a_test_can_stop_a_call_half_way() -> None:
    publisher, event = await opened(), make_event()
    publisher.hold()
    call = asyncio.create_task(publisher.publish(Batch.of([event])))
    await publisher.wait_until_held()
    assert publisher.deliveries == []
    waiter = asyncio.create_task(publisher.wait_for(1))
    publisher.release()
    assert await waiter == [event]
    assert await call == [PUBLISHED]


@pytest.mark.asyncio
async def test_close_takes_back_what_waits_even_when_opened_again_at_once() -> None:
    publisher = await opened()
    publisher.hold()
    call = asyncio.create_task(publisher.publish(Batch.of([make_event()])))
    await publisher.wait_until_held()
    await publisher.close()
    await publisher.open()
    assert await call == [UNTRIED]
    assert publisher.deliveries == []


@pytest.mark.asyncio
async def test_waiting_in_vain_says_what_is_missing() -> None:
    publisher = await opened()
    with pytest.raises(TimeoutError, match=r"0 of 2 deliveries after 0.01 s"):
        await publisher.wait_for(2, timeout=0.01)
    with pytest.raises(TimeoutError, match=r"0 of 1 calls wait after 0.01 s"):
        await publisher.wait_until_held(timeout=0.01)


def test_a_failure_must_be_one() -> None:
    with pytest.raises(ValueError, match="takes a failure"):
        MemoryPublisher().fail_next(PUBLISHED)
    with pytest.raises(ValueError, match="times=0"):
        MemoryPublisher().fail_next(UNTRIED, times=0)
