"""The tests that every publisher must pass; subclass them for a destination of your own."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import pytest

from pillarbox.batch import Batch, Part
from pillarbox.conformance.events import make_event, unique_key
from pillarbox.event import Event
from pillarbox.publisher import ERROR_LENGTH, Needs, Outcome, Publisher, PublisherFeatures, Result

PAYLOADS: Final = (
    b'{"order_id":7}',
    b'{ "spaced" :  1.0, "b": 1e2, "a": [ ] , "b": 2 }',
    '{"name":"Zoë Łódź 東京 \U0001f4ee\u2028"}'.encode(),
    b'{"escaped":"\\u00e9\\ud83d\\udcee"}',
    b'{\r\n  "lines": 2\r\n}\n',
    b"",
    b"\x00\xff\xfe\r\n\x80 not text",
    bytes(range(256)) * 800,
    b'"' + b"x" * 200_000 + b'"',
)


class Delivery(NamedTuple):
    """One event at the destination; ``key`` is None if the destination keeps none."""

    id: str
    key: str | None
    payload: bytes


class PublisherContract:
    """Subclass it in a test module: write ``delivered`` and a fixture ``publisher``, which is open.

    Declare what the test environment can do: ``can_reject`` with ``rejecting_event``, ``can_go_down`` with ``go_down``
    and ``come_back``. The other tests of rejections and outages are skipped.
    ``waiting_seconds`` is the length of an outage for a publisher that waits for its end,
    ``limit_seconds`` the longest time that closing and recovery may take.
    """

    can_reject: ClassVar[bool] = False
    can_go_down: ClassVar[bool] = False
    waiting_seconds: float = 1.0
    limit_seconds: float = 30.0

    async def delivered(self, publisher: Publisher) -> Sequence[Delivery]:
        """All deliveries in order of arrival. Those of earlier tests may be among them."""
        raise NotImplementedError("read back what arrived at the destination")

    def event(self, **fields: Any) -> Event:
        """An event for this destination; override it to give each a topic, a type or a routing key."""
        return make_event(**fields)

    def rejecting_event(self, key: str | None) -> Event:
        """An event of this key that the destination rejects."""
        raise NotImplementedError("make an event that the destination rejects, or set can_reject = False")

    async def go_down(self) -> None:
        """Make the destination unreachable."""
        raise NotImplementedError("cut the destination off, or set can_go_down = False")

    async def come_back(self) -> None:
        raise NotImplementedError("bring the destination back, or set can_go_down = False")

    @pytest.mark.asyncio
    async def test_describes_itself(self, publisher: Publisher) -> None:
        assert isinstance(publisher, Publisher)
        assert isinstance(publisher.features, PublisherFeatures)
        assert publisher.features.calls >= 1
        assert publisher.features.first_batch >= 1
        assert publisher.description.strip()

    @pytest.mark.asyncio
    async def test_published_means_that_it_is_there_once(self, publisher: Publisher) -> None:
        events = [self.event() for _ in range(20)] + [self.event(key=None) for _ in range(20)]
        await self._publish_all(publisher, events)
        arrived = await self._arrived(publisher, events)
        assert sorted(d.id for d in arrived) == sorted(str(e.id) for e in events)

    @pytest.mark.asyncio
    async def test_an_empty_batch_has_no_outcomes(self, publisher: Publisher) -> None:
        assert await self._publish(publisher, []) == []

    @pytest.mark.asyncio
    async def test_a_batch_of_one(self, publisher: Publisher) -> None:
        event = self.event()
        await self._publish_all(publisher, [event])
        arrived = await self._arrived(publisher, [event])
        assert [d.id for d in arrived] == [str(event.id)]
        assert arrived[0].key in (None, event.key)

    @pytest.mark.asyncio
    async def test_a_batch_of_several_parts(self, publisher: Publisher) -> None:
        events = [self.event() for _ in range(6)] + [self.event(key=None)]
        parts = [Part(0, 11, events[:3]), Part(5, 12, events[3:4], b"a note"), Part(7, 13, events[4:])]
        outcomes = self._checked(publisher, events, await publisher.publish(Batch("default", parts)))
        assert {outcome.result for outcome in outcomes} == {Result.PUBLISHED}
        assert sorted(d.id for d in await self._arrived(publisher, events)) == sorted(str(e.id) for e in events)

    @pytest.mark.asyncio
    async def test_a_publisher_that_is_prepared_for_a_stream(self, publisher: Publisher) -> None:
        prepared = publisher.prepared(Needs("orders", concurrency=2, strict_keys=True))
        assert isinstance(prepared, Publisher)
        events = [self.event(), self.event(key=None)]
        await prepared.open()
        await self._publish_all(prepared, events[:1])
        # Another stream may use the publisher that was prepared.
        if prepared is not publisher:
            await self._close(prepared)
        await self._publish_all(publisher, events[1:])
        assert sorted(d.id for d in await self._arrived(publisher, events)) == sorted(str(e.id) for e in events)

    @pytest.mark.asyncio
    async def test_the_payload_arrives_byte_for_byte(self, publisher: Publisher) -> None:
        json = [self.event(payload=payload) for payload in PAYLOADS]
        binary = [self.event(payload=payload, content_type="application/octet-stream") for payload in PAYLOADS]
        await self._publish_all(publisher, json + binary)
        arrived = {d.id: d.payload for d in await self._arrived(publisher, json + binary)}
        for event in json + binary:
            assert arrived[str(event.id)] == event.payload, f"changed: {event.payload[:60]!r} ({event.content_type})"

    @pytest.mark.asyncio
    async def test_a_key_keeps_its_order_within_a_batch(self, publisher: Publisher) -> None:
        keys = [unique_key() for _ in range(10)]
        events = [self.event(key=key) for _ in range(20) for key in keys]
        await self._publish_all(publisher, events)
        await self._assert_key_order(publisher, events)

    @pytest.mark.asyncio
    async def test_a_key_keeps_its_order_over_batches(self, publisher: Publisher) -> None:
        key = unique_key()
        events = [self.event(key=key) for _ in range(12)]
        for start in range(0, 12, 3):
            await self._publish_all(publisher, events[start : start + 3])
        await self._assert_key_order(publisher, events)

    @pytest.mark.asyncio
    async def test_concurrent_calls_do_not_mix(self, publisher: Publisher) -> None:
        calls = []
        for _ in range(publisher.features.calls):
            keys = [unique_key(), unique_key(), None]
            calls.append([self.event(key=key) for _ in range(10) for key in keys])
        await asyncio.gather(*(self._publish_all(publisher, events) for events in calls))
        every = [event for events in calls for event in events]
        assert len(await self._arrived(publisher, every)) == len(every)
        await self._assert_key_order(publisher, every)

    @pytest.mark.asyncio
    async def test_a_rejected_event_says_why(self, publisher: Publisher) -> None:
        self._needs_rejection()
        bad = self.rejecting_event(unique_key())
        (outcome,) = await self._publish(publisher, [bad])
        assert outcome.result is Result.REJECTED
        assert outcome.error, "an operator needs a sentence"
        assert len(outcome.error) <= ERROR_LENGTH
        if bad.payload:
            assert bad.payload.decode(errors="replace") not in outcome.error, "the error contains the payload"
        assert not await self._arrived(publisher, [bad])

    @pytest.mark.asyncio
    async def test_a_rejected_event_harms_no_neighbour(self, publisher: Publisher) -> None:
        self._needs_rejection()
        before = [self.event(), self.event(key=None)]
        after = [self.event(key=None), self.event()]
        bad = [self.rejecting_event(unique_key()), self.rejecting_event(None)]
        outcomes = await self._publish(publisher, [*before, *bad, *after])
        assert [o.result for o in outcomes[2:4]] == [Result.REJECTED, Result.REJECTED]
        assert {o.result for o in (*outcomes[:2], *outcomes[4:])} == {Result.PUBLISHED}
        arrived = await self._arrived(publisher, [*before, *bad, *after])
        assert sorted(d.id for d in arrived) == sorted(str(e.id) for e in (*before, *after))

    @pytest.mark.asyncio
    async def test_nothing_of_a_key_is_sent_after_its_rejected_event(self, publisher: Publisher) -> None:
        self._needs_rejection()
        if not publisher.features.strict_keys:
            pytest.skip("the publisher does not declare strict_keys")
        key, other = unique_key(), unique_key()
        events = [
            self.event(key=key),
            self.event(key=other),
            self.rejecting_event(key),
            self.event(key=other),
        ]
        events += [self.event(key=key), self.event(key=key), self.event(key=other)]
        outcomes = await self._publish(publisher, events)
        untried = [4, 5]
        assert [o.result for o in outcomes] == [
            Result.REJECTED if i == 2 else Result.UNTRIED if i in untried else Result.PUBLISHED for i in range(7)
        ]
        assert not any(outcomes[i].is_outage for i in untried), "a rejection is no outage"
        arrived = {d.id for d in await self._arrived(publisher, events)}
        assert arrived == {str(events[i].id) for i in (0, 1, 3, 6)}
        # The key is free again for the next call.
        await self._publish_all(publisher, [events[i] for i in untried])
        await self._assert_key_order(publisher, [e for i, e in enumerate(events) if i != 2])

    @pytest.mark.asyncio
    async def test_an_outage_loses_nothing_and_charges_nothing(self, publisher: Publisher) -> None:
        self._needs_outage()
        keys = [unique_key(), unique_key(), None]
        events = [self.event(key=key) for _ in range(5) for key in keys]
        await self.go_down()
        call = asyncio.create_task(self._publish(publisher, events))
        await asyncio.wait({call}, timeout=self.waiting_seconds)
        if call.done():
            assert any(o.is_outage for o in call.result()), "an outage must open the circuit"
        await self.come_back()
        async with asyncio.timeout(self.limit_seconds):
            rest = self._unpublished(events, await call)
            while rest:
                still = self._unpublished(rest, await self._publish(publisher, rest))
                if len(still) == len(rest):
                    # Nothing tells a test that a real server is ready again.
                    await asyncio.sleep(0.05)
                rest = still
        assert {d.id for d in await self._arrived(publisher, events)} == {str(e.id) for e in events}
        await self._assert_key_order(publisher, events)

    @pytest.mark.asyncio
    async def test_close_ends_a_call_that_waits_for_the_destination(self, publisher: Publisher) -> None:
        self._needs_outage()
        events = [self.event(), self.event(key=None)]
        await self.go_down()
        call = await self._begin(publisher, events)
        await self._close(publisher)
        assert self._unpublished(events, await self._end(call)) == events
        await self.come_back()

    @pytest.mark.asyncio
    async def test_close_answers_for_every_event_of_a_call(self, publisher: Publisher) -> None:
        key = unique_key()
        events = [self.event(key=key if i % 2 else None) for i in range(40)]
        call = await self._begin(publisher, events)
        await self._close(publisher)
        rest = self._unpublished(events, await self._end(call))
        published = [e for e in events if e not in rest]
        assert {str(e.id) for e in published} <= {d.id for d in await self._arrived(publisher, events)}
        await publisher.open()
        await self._publish_all(publisher, rest)
        await self._assert_key_order(publisher, events)

    @pytest.mark.asyncio
    async def test_closed_twice_and_used_after_it(self, publisher: Publisher) -> None:
        await self._close(publisher)
        await self._close(publisher)
        events = [self.event(), self.event(key=None)]
        assert self._unpublished(events, await self._publish(publisher, events)) == events
        assert await self._publish(publisher, []) == []
        assert not await self._arrived(publisher, events)

    @pytest.mark.asyncio
    async def test_opens_again_after_close(self, publisher: Publisher) -> None:
        key = unique_key()
        events = [self.event(key=key) for _ in range(6)]
        await self._publish_all(publisher, events[:3])
        await self._close(publisher)
        await publisher.open()
        await self._publish_all(publisher, events[3:])
        await self._assert_key_order(publisher, events)

    def _needs_rejection(self) -> None:
        if not self.can_reject:
            pytest.skip("can_reject is not declared: no event is known that this destination rejects")

    def _needs_outage(self) -> None:
        if not self.can_go_down:
            pytest.skip("can_go_down is not declared: this destination cannot be cut off")

    async def _publish(self, publisher: Publisher, events: Sequence[Event]) -> list[Outcome]:
        try:
            outcomes = await publisher.publish(Batch.of(events))
        except Exception as error:
            pytest.fail(f"publish raised {error!r}: an error of an event belongs into its outcome")
        return self._checked(publisher, events, outcomes)

    def _checked(self, publisher: Publisher, events: Sequence[Event], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The rules for the outcomes of every call."""
        assert len(outcomes) == len(events), "one outcome per event"
        strict = publisher.features.strict_keys
        failed_keys = set()
        for event, outcome in zip(events, outcomes, strict=True):
            assert isinstance(outcome, Outcome)
            if outcome.after_seconds is not None:
                assert outcome.result is Result.RETRY or outcome.is_outage, f"a pause after {outcome.result}"
                assert outcome.after_seconds >= 0, "a pause cannot be negative"
            assert outcome.result is Result.RETRY or not outcome.ambiguous, f"an ambiguous {outcome.result}"
            if event.key in failed_keys:
                assert outcome.result is Result.UNTRIED, f"{outcome.result} behind a failed event of its key"
            holds_its_key = {Result.RETRY, Result.UNTRIED} | ({Result.REJECTED} if strict else set())
            if event.key is not None and outcome.result in holds_its_key:
                failed_keys.add(event.key)
        return list(outcomes)

    async def _publish_all(self, publisher: Publisher, events: Sequence[Event]) -> None:
        outcomes = await self._publish(publisher, events)
        failures = [outcome for outcome in outcomes if outcome.result is not Result.PUBLISHED]
        assert not failures, f"{len(failures)} of {len(events)} events were not published: {failures[0]}"

    def _unpublished(self, events: Sequence[Event], outcomes: Sequence[Outcome]) -> list[Event]:
        """The events that were not published. Fails when one was charged, because none is to blame."""
        rest = []
        for event, outcome in zip(events, outcomes, strict=True):
            if outcome.result is not Result.PUBLISHED:
                is_free = outcome.result is Result.UNTRIED or not outcome.charged
                assert is_free, f"the event was charged, and it is not to blame: {outcome}"
                rest.append(event)
        return rest

    async def _begin(self, publisher: Publisher, events: Sequence[Event]) -> "asyncio.Task[list[Outcome]]":
        call = asyncio.create_task(self._publish(publisher, events))
        await asyncio.sleep(0)
        return call

    async def _end(self, call: "asyncio.Task[list[Outcome]]") -> list[Outcome]:
        await asyncio.wait({call}, timeout=self.limit_seconds)
        if not call.done():
            call.cancel()
            pytest.fail("publish still waits though the publisher was closed")
        return call.result()

    async def _close(self, publisher: Publisher) -> None:
        try:
            await asyncio.wait_for(publisher.close(), self.limit_seconds)
        except TimeoutError:
            pytest.fail(f"close took more than {self.limit_seconds:g} s")
        except Exception as error:
            pytest.fail(f"close raised {error!r}")

    async def _arrived(self, publisher: Publisher, events: Iterable[Event]) -> list[Delivery]:
        ours = {str(event.id) for event in events}
        return [delivery for delivery in await self.delivered(publisher) if delivery.id in ours]

    async def _assert_key_order(self, publisher: Publisher, events: Sequence[Event]) -> None:
        """First deliveries of a key follow the order of its events; none is missing."""
        key_of = {str(event.id): event.key for event in events}
        arrived = list(dict.fromkeys(d.id for d in await self._arrived(publisher, events)))
        for key in {event.key for event in events} - {None}:
            wanted = [str(event.id) for event in events if event.key == key]
            assert [id for id in arrived if key_of[id] == key] == wanted, "a key's events arrived in another order"
