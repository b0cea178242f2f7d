"""Handlers that take a list of events."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pillarbox import Event, Handlers, Outage, Reject
from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError
from pillarbox.publisher import PUBLISHED, UNTRIED, Limits, Outcome, Result
from pillarbox.publishers import _rounds
from pillarbox.relay import Fixed

Function = Callable[[list[Event]], Any]


def as_async(function: Function) -> Function:
    async def handler(events: list[Event]) -> Any:
        return function(events)

    return handler


BOTH = pytest.mark.parametrize("kind", [as_async, lambda f: f], ids=["async", "plain"])


async def published(handlers: Handlers, events: Sequence[Event]) -> Sequence[Outcome]:
    await handlers.open()
    try:
        return await handlers.publish(Batch.of(events))
    finally:
        await handlers.close()


def of(key: str | None, *types: str) -> list[Event]:
    return [make_event(key=key, type=type_) for type_ in types]


@BOTH
@pytest.mark.asyncio
async def test_a_function_gets_the_events_of_many_keys_in_order(kind: Callable[[Function], Function]) -> None:
    handlers, calls = Handlers(), []
    handlers.on_batch("made", size=5)(kind(lambda events: calls.append([*events])))
    events = [make_event(key=f"k{number % 3}", type="made") for number in range(11)] + [
        make_event(key=None, type="made")
    ]
    assert await published(handlers, events) == [PUBLISHED] * 12
    assert sorted(event.seq for call in calls for event in call) == [event.seq for event in events]
    assert all(len(call) <= 5 for call in calls)
    assert max(map(len, calls)) == 5
    assert broken_order(events, [event for call in calls for event in call]) is None


@BOTH
@pytest.mark.asyncio
async def test_only_the_culprit_is_charged(kind: Callable[[Function], Function]) -> None:
    handlers, applied = Handlers(), []
    limits = Limits(Fixed("30s"), 3)
    first, bad, behind, other, dead = *of("a", "made", "made", "made"), *of("b", "made"), *of("c", "made")

    def work(events: list[Event]) -> None:
        if bad in events:
            raise RuntimeError("no card")
        if dead in events:
            raise Reject("never")
        applied.extend(events)

    handlers.on_batch("made", retry=limits.retry, max_attempts=limits.max_attempts)(kind(work))
    outcomes = await published(handlers, [first, bad, behind, other, dead])
    assert [outcome.result for outcome in outcomes] == [
        Result.PUBLISHED,
        Result.RETRY,
        Result.UNTRIED,
        Result.PUBLISHED,
        Result.REJECTED,
    ]
    assert outcomes[1] == Outcome(Result.RETRY, "RuntimeError: no card", limits=limits)
    assert outcomes[2] == UNTRIED
    assert sorted(event.seq for event in applied) == [first.seq, other.seq]


@BOTH
@pytest.mark.asyncio
async def test_an_outage_charges_nobody_and_tries_nobody_again(kind: Callable[[Function], Function]) -> None:
    handlers, calls = Handlers(), []

    def work(events: list[Event]) -> None:
        calls.append(len(events))
        raise Outage("the database is away")

    handlers.on_batch("made")(kind(work))
    outcomes = await published(handlers, [*of("a", "made", "made"), *of("b", "made", "other")])
    assert all(outcome.is_outage for outcome in outcomes[:3])
    assert outcomes[3] == UNTRIED
    assert calls == [3]


@pytest.mark.asyncio
async def test_a_batch_that_takes_too_long_is_tried_one_by_one() -> None:
    handlers, applied = Handlers(timeout="20ms"), []

    @handlers.on_batch("made")
    async def work(events: list[Event]) -> None:
        if len(events) > 1:
            await asyncio.Event().wait()
        applied.extend(events)

    events = [make_event(type="made") for _ in range(4)]
    assert await published(handlers, events) == [PUBLISHED] * 4
    assert sorted(event.seq for event in applied) == [event.seq for event in events]


@pytest.mark.asyncio
async def test_payloads_of_all_events_stay_out_of_the_error() -> None:
    handlers = Handlers()

    @handlers.on_batch("made")
    def work(events: list[Event]) -> None:
        raise ValueError(f"cannot read {events[-1].payload.decode()}")

    (outcome,) = await published(handlers, [make_event(type="made", payload=b'{"card": "4111"}')])
    assert outcome.error == "ValueError: cannot read [payload]"


@pytest.mark.asyncio
async def test_a_key_with_both_kinds_and_a_type_without_handler() -> None:
    handlers, applied = Handlers(unknown="skip"), []
    handlers.on_batch("made")(lambda events: applied.extend(events))
    handlers.on("paid")(applied.append)
    events = of("a", "made", "made", "paid", "unknown", "made", "paid")
    assert await published(handlers, events) == [PUBLISHED] * 6
    assert applied == [event for event in events if event.type != "unknown"]


def test_few_lists_are_in_work_at_once_so_that_the_next_one_is_longer() -> None:
    handlers = Handlers(concurrency=40)
    handlers.on_batch("made")(print)
    assert handlers.features.calls == 4
    handlers.on("paid")(print)
    assert handlers.features.calls == 40


def test_wrong_arguments_are_refused() -> None:
    def two_arguments(events: list[Event], tx: object) -> None: ...

    with pytest.raises(ConfigError, match="size=0: a batch has room for 1 event or more"):
        Handlers().on_batch("a", size=0)
    with pytest.raises(ConfigError, match=r'on_batch\(\) names no event type; write @handlers.on_batch\("order'):
        Handlers().on_batch()
    with pytest.raises(ConfigError, match="cannot be called with a list of events as its only argument"):
        Handlers().on_batch("a")(two_arguments)  # type: ignore[type-var]


def broken_order(events: Sequence[Event], applied: Sequence[Event]) -> str | None:
    """The key whose events were not applied as a prefix, in order; None: all were."""
    written: dict[str | None, list[Event]] = defaultdict(list)
    for event in events:
        written[event.key].append(event)
    for key, own in written.items():
        seen = [event for event in applied if event.key == key]
        if key is not None and seen != own[: len(seen)]:
            return key
    return None


def histories() -> Iterator[tuple[list[Event], set[int]]]:
    """Events of few keys and types in any order, and the ones that fail."""
    chance = random.Random(7)
    for _ in range(60):
        types = ["made", "changed", "paid", "closed"]
        events = [make_event(key=f"k{chance.randrange(4)}", type=chance.choice(types)) for _ in range(24)]
        yield events, {event.seq for event in events if chance.random() < 0.08}


async def disorder() -> list[str]:
    """Keys out of order over many histories: two types in batches, two alone, async and plain."""
    broken = []
    for events, bad in histories():
        handlers = Handlers(concurrency=4)
        applied: list[Event] = []

        def together(given: list[Event], bad: set[int] = bad, applied: list[Event] = applied) -> None:
            if any(event.seq in bad for event in given):
                raise RuntimeError("bad")
            applied.extend(given)

        async def alone(event: Event, together: Any = together) -> None:
            await asyncio.sleep(0)
            together([event])

        handlers.on_batch("made", size=3)(together)
        handlers.on_batch("changed")(as_async(together))
        handlers.on("paid", "closed")(alone)
        outcomes = await published(handlers, events)
        done = [event.seq for event, outcome in zip(events, outcomes, strict=True) if outcome == PUBLISHED]
        assert sorted(event.seq for event in applied) == done, "the outcomes do not say what was applied"
        if (key := broken_order(events, applied)) is not None:
            broken.append(key)
    return broken


@pytest.mark.asyncio
async def test_a_key_keeps_its_order_through_both_kinds() -> None:
    assert await disorder() == []


@pytest.mark.asyncio
async def test_the_test_of_order_finds_a_batch_that_skips_other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    # The planted bug: a batch takes all events of its handler, also those behind another handler's.
    monkeypatch.setattr(_rounds, "takewhile", filter)
    assert await disorder()
