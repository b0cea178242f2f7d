import asyncio

import pytest

from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError, Outage, Reject
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Result, outage, rejected, retry
from pillarbox.publishers.keyed import KeyedBatch, send_by_key


def events(*keys: str | None) -> list[Event]:
    return [make_event(key=key) for key in keys]


class TestCursors:
    def test_a_cursor_finishes_a_key_before_it_takes_the_next(self) -> None:
        a1, b1, a2, free, b2 = batch = events("a", "b", "a", None, "b")
        keyed = KeyedBatch(batch)
        first, second = keyed.cursor(), keyed.cursor()
        assert (first.event, second.event) == (a1, b1)
        first.record(PUBLISHED)
        assert first.event == a2
        first.record(PUBLISHED)
        assert first.event == free
        assert second.event == b1, "its outcome is not known yet"
        second.record(PUBLISHED)
        first.record(PUBLISHED)
        assert [first.event, second.event] == [None, b2]
        assert keyed.outcomes == [PUBLISHED] * 4 + [UNTRIED]
        assert keyed.keys == 3

    @pytest.mark.parametrize("failure", [retry("busy"), rejected("bad"), UNTRIED])
    def test_a_failure_leaves_the_rest_of_its_key_untried(self, failure: Outcome) -> None:
        keyed = KeyedBatch(events("a", "a", "a", "b"))
        cursor = keyed.cursor()
        for outcome in (PUBLISHED, failure, PUBLISHED):
            assert cursor.event is not None
            cursor.record(outcome)
        assert cursor.event is None
        assert keyed.outcomes == [PUBLISHED, failure, UNTRIED, PUBLISHED]

    def test_after_an_outage_no_cursor_has_an_event(self) -> None:
        keyed = KeyedBatch(events("a", "b", "b", "c"))
        first, second = keyed.cursor(), keyed.cursor()
        assert None not in (first.event, second.event)
        first.record(outage("away"))
        second.record(PUBLISHED)  # it was on its way
        assert (first.event, second.event) == (None, None)
        assert keyed.outcomes == [outage("away"), PUBLISHED, UNTRIED, UNTRIED]


@pytest.mark.asyncio
class TestSendByKey:
    async def test_one_event_of_a_key_at_a_time_and_keys_side_by_side(self) -> None:
        batch = events("a", "b", "a", "b", None, "a")
        barrier, running, sent = asyncio.Barrier(2), set[str | None](), list[Event]()

        async def send(event: Event) -> Outcome:
            assert event.key not in running
            running.add(event.key)
            await barrier.wait()
            running.remove(event.key)
            sent.append(event)
            return PUBLISHED

        async with asyncio.timeout(10):
            assert await send_by_key(batch, send, concurrency=2) == [PUBLISHED] * 6
        for key in ("a", "b"):
            assert [e for e in sent if e.key == key] == [e for e in batch if e.key == key]

    async def test_no_more_at_once_than_the_concurrency(self) -> None:
        running = most = 0

        async def send(event: Event) -> Outcome:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return PUBLISHED

        await send_by_key(events(*[None] * 20), send, concurrency=3)
        assert most == 3
        with pytest.raises(ConfigError, match="concurrency=0"):
            await send_by_key(events(None), send, concurrency=0)

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (Reject("no such address"), rejected("no such address")),
            (ValueError("bad: secret"), retry("sending it failed with ValueError")),
        ],
    )
    async def test_an_exception_is_the_outcome_of_its_event(self, error: Exception, expected: Outcome) -> None:
        batch = events("a", "a", "b")

        async def send(event: Event) -> Outcome:
            if event is batch[0]:
                raise error
            return PUBLISHED

        assert await send_by_key(batch, send) == [expected, UNTRIED, PUBLISHED]

    async def test_after_an_outage_nothing_more_is_sent(self) -> None:
        calls = 0

        async def send(event: Event) -> Outcome:
            nonlocal calls
            calls += 1
            await asyncio.sleep(0)
            raise Outage("it is away")

        outcomes = await send_by_key(events(*"abcdef"), send, concurrency=2)
        assert calls == 2
        assert outcomes == [outage("it is away")] * 2 + [UNTRIED] * 4

    async def test_an_empty_batch(self) -> None:
        async def send(event: Event) -> Outcome:
            raise AssertionError

        assert await send_by_key([], send) == []

    async def test_a_cancelled_call_cancels_what_it_sends(self) -> None:
        started, cancelled = asyncio.Event(), 0

        async def send(event: Event) -> Outcome:
            nonlocal cancelled
            try:
                started.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled += 1
                raise
            return Outcome(Result.PUBLISHED)

        call = asyncio.create_task(send_by_key(events("a", "b"), send))
        await started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert cancelled == 2
