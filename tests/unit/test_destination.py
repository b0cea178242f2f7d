"""Whose fault an ambiguous refusal is: the event's, or the destination's."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.event import Event
from pillarbox.observe import Observer, Observers
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Publisher, Result, rejected, retry
from pillarbox.relay import destination as module
from pillarbox.relay.breaker import Circuit
from pillarbox.relay.destination import Destination
from pillarbox.relay.subject import stream_named

pytestmark = pytest.mark.asyncio

FULL = retry("the queue is full", ambiguous=True)
AWAY = Outcome(Result.UNTRIED, "the queue is full")


class Answers(Publisher):
    """Gives each event the outcome that its type has here."""

    description = "answers"

    def __init__(self) -> None:
        self.outcomes = {"ok": PUBLISHED, "full": FULL, "bad": rejected("no such customer"), "busy": retry("busy")}

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [self.outcomes.get(event.type, PUBLISHED) for event in batch]


class Waits(Publisher):
    """Waits by itself until its destination is back."""

    description = "waits"

    def __init__(self) -> None:
        self.is_back = asyncio.Event()
        self.down: str | None = "nothing is confirmed (refused)"

    @property
    def silence(self) -> str | None:
        return self.down

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        await self.is_back.wait()
        return [PUBLISHED] * len(batch)


class Told(Observer):
    """What an observer learns of circuits."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.changed = asyncio.Event()

    def circuit_changed(self, stream: str, state: str) -> None:
        self.states.append(state)
        self.changed.set()


class Desk:
    """A destination, and what it answers."""

    def __init__(self) -> None:
        self.to = Answers()
        self.destination = Destination(stream_named("orders"), self.to, Observers())

    def circuit(self) -> Circuit:
        return self.destination.breaker.state

    async def send(self, *events: Event | str) -> list[Outcome]:
        made = [make_event(type=each) if isinstance(each, str) else each for each in events]
        return list(await self.destination.publish(Batch.of(made)))

    def probe(self) -> None:
        """The wait of the circuit is over."""
        assert self.destination.breaker.allows(time.monotonic() + 1000)
        assert self.circuit() is Circuit.HALF_OPEN


@pytest.fixture
def desk() -> Desk:
    return Desk()


async def test_four_events_are_at_fault_themselves_and_the_fifth_shows_an_outage(desk: Desk) -> None:
    for _ in range(4):
        assert await desk.send("full") == [FULL]
        assert desk.circuit() is Circuit.CLOSED
    assert await desk.send("full") == [AWAY]
    assert desk.circuit() is Circuit.OPEN


async def test_five_events_of_one_call_are_enough(desk: Desk) -> None:
    assert await desk.send(*["full"] * 5, "bad") == [AWAY] * 5 + [rejected("no such customer")]
    assert desk.circuit() is Circuit.OPEN


async def test_one_event_that_is_refused_often_is_at_fault_itself(desk: Desk) -> None:
    event = make_event(type="full")
    for _ in range(20):
        assert await desk.send(event) == [FULL]
    assert desk.circuit() is Circuit.CLOSED


@pytest.mark.parametrize("confirmed", [["ok"], ["ok", "full"], ["full"] * 9 + ["ok"]])
async def test_a_confirmed_event_between_them_shows_that_the_destination_works(
    desk: Desk, confirmed: Sequence[str]
) -> None:
    await desk.send(*["full"] * 4)
    assert AWAY not in await desk.send(*confirmed)
    assert await desk.send(*["full"] * 4) == [FULL] * 4
    assert desk.circuit() is Circuit.CLOSED


async def test_other_failures_between_them_show_nothing(desk: Desk) -> None:
    await desk.send(*["full"] * 4, "bad", "busy")
    desk.to.outcomes["later"] = UNTRIED
    await desk.send("bad", "busy", "later")
    assert await desk.send("busy", "full") == [retry("busy"), AWAY]
    assert desk.circuit() is Circuit.OPEN


async def test_the_event_of_a_probe_is_set_aside_uncharged(desk: Desk) -> None:
    """Else the same event would be the probe for ever, though it may be at fault itself."""
    await desk.send(*["full"] * 5)
    desk.probe()
    (outcome,) = await desk.send("full")
    assert (outcome.result, outcome.charged, outcome.error) == (Result.RETRY, False, "the queue is full")
    assert desk.circuit() is Circuit.OPEN
    desk.probe()
    assert await desk.send("ok") == [PUBLISHED]
    assert desk.circuit() is Circuit.CLOSED
    assert await desk.send("full") == [FULL], "counted anew"


async def test_a_call_under_way_when_the_circuit_opened_is_not_charged(desk: Desk) -> None:
    await desk.send(*["full"] * 5)
    assert await desk.send("full", "full") == [AWAY, AWAY]
    assert desk.circuit() is Circuit.OPEN


async def test_the_pause_that_it_asks_for_is_kept(desk: Desk) -> None:
    desk.to.outcomes["full"] = retry("the queue is full", after_seconds=60, ambiguous=True)
    await desk.send(*["full"] * 5)
    assert 59 < desk.destination.breaker.seconds_left(time.monotonic()) <= 60


async def test_a_publisher_that_waits_by_itself_is_seen_as_an_open_circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    to, told = Waits(), Told()
    destination = Destination(stream_named("orders"), to, Observers([told]))
    assert (destination.error, destination.circuit) == (None, Circuit.CLOSED), "no call waits"

    call = asyncio.create_task(destination.publish(Batch.of([make_event()])))
    await told.changed.wait()
    assert (destination.error, destination.circuit) == (to.down, Circuit.OPEN)
    assert destination.breaker.state is Circuit.CLOSED, "later calls wait in the publisher too"

    to.is_back.set()
    assert await call == [PUBLISHED]
    assert (destination.error, destination.circuit) == (None, Circuit.CLOSED)
    assert told.states == ["open", "closed"]
