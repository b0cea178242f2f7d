"""The window of a consumer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pillarbox.conformance.events import make_event
from pillarbox.consumer.window import Queue, Track, Window, events_of
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Result, outage, rejected, retry
from pillarbox.source import Lane

LIMIT = 10


@pytest.fixture
def window() -> Window:
    return Window(LIMIT, 1_000_000)


def lane(window: Window, name: str = "orders/0") -> Track:
    made = Lane(name)
    window.assign(made)
    return window.tracks[made]


def add(window: Window, track: Track, *keys: str | None, first: int = 0, size: int = 10, refusal: str = "") -> None:
    for position, key in enumerate(keys, first):
        window.add(track, position, make_event(key=key), size, None, refusal)


def keys(queues: Sequence[Queue]) -> list[str | None]:
    return [event.key for event in events_of(queues)]


def test_a_lane_is_settled_up_to_its_first_unfinished_message(window: Window) -> None:
    track = lane(window)
    add(window, track, "a", "b", "c")
    assert window.settle(track) is None
    a, b, c = window.take(1), window.take(1), window.take(1)
    window.finish(b, [PUBLISHED])
    window.finish(c, [PUBLISHED])
    assert window.settle(track) is None
    window.finish(a, [PUBLISHED])
    assert window.settle(track) == 2
    assert window.settle(track) is None
    assert track.first is None


def test_positions_may_have_holes(window: Window) -> None:
    track = lane(window)
    for position in (3, 7, 100):
        add(window, track, None, first=position)
    first, rest = window.take(1), window.take(5)
    window.finish(rest, [PUBLISHED] * 2)
    assert window.settle(track) is None
    window.finish(first, [PUBLISHED])
    assert window.settle(track) == 100


def test_a_key_is_in_one_call_at_a_time(window: Window) -> None:
    track = lane(window)
    add(window, track, "a", "a", "b", "a", None)
    first = window.take(1)
    assert keys(first) == ["a"]
    assert keys(window.take(10)) == ["b", None]
    window.finish(first, [PUBLISHED])
    assert keys(window.take(10)) == ["a", "a"]


def test_a_failed_key_waits_alone(window: Window) -> None:
    track = lane(window)
    add(window, track, "a", "a", "b")
    call = window.take(10)
    (decision,) = window.finish(call, [retry("busy"), UNTRIED, PUBLISHED])
    assert decision.entry.position == 0
    assert decision.outcome.error == "busy"
    window.wait(decision.queue, 5.0)
    assert (window.held, window.next_due) == (1, 5.0)
    add(window, track, "a", "b", first=3)
    window.wake_due(4.9)
    assert keys(window.take(10)) == ["b"]
    window.wake_due(5.0)
    assert (window.held, window.next_due) == (0, None)
    again = window.take(10)
    assert [queue.taken for queue in again] == [3]
    assert window.settle(track) is None


def test_a_dead_event_lets_its_key_go_on(window: Window) -> None:
    track = lane(window)
    add(window, track, "a", "a")
    (decision,) = window.finish(window.take(10), [rejected("no"), UNTRIED])
    assert not window.has_ready
    window.done(decision.queue)
    assert window.settle(track) == 0
    assert keys(window.take(10)) == ["a"]


def test_a_later_event_of_a_key_may_be_published_before_the_dead_one_is_kept(window: Window) -> None:
    track = lane(window)
    add(window, track, "a", "a", "a")
    (decision,) = window.finish(window.take(10), [rejected("no"), PUBLISHED, rejected("no")])
    assert window.settle(track) is None
    window.done(decision.queue)
    assert window.settle(track) == 1
    assert [queue.head.position for queue in window.take(10)] == [2]


def test_a_message_that_cannot_be_handled_goes_alone(window: Window) -> None:
    track = lane(window)
    add(window, track, "a")
    add(window, track, "a", first=1, refusal="not JSON")
    add(window, track, "a", first=2)
    first = window.take(10)
    assert [queue.taken for queue in first] == [1]
    assert not first[0].head.refusal
    window.finish(first, [PUBLISHED])
    (queue,) = window.take(10)
    assert (queue.taken, queue.head.refusal) == (1, "not JSON")
    window.done(queue)
    assert not window.has_refused
    assert [queue.taken for queue in window.take(10)] == [1]


def test_results_of_a_lane_that_is_gone_are_dropped(window: Window) -> None:
    track, other = lane(window), lane(window, "orders/1")
    add(window, track, "a", "a", "b", "c")
    add(window, other, "a")
    add(window, track, "d", first=4, refusal="not JSON")
    queues = window.take(4)
    waiting = [queue for queue in queues if queue.key == "b"]
    window.finish([queue for queue in queues if queue.key == "b"], [retry("busy")])
    window.wait(waiting[0], 5.0)
    window.drop(track.lane)
    assert (window.held, window.next_due, window.has_refused) == (0, None, False)
    rest = [queue for queue in queues if queue.key in ("a", "c")]
    assert window.finish(rest, [retry("busy"), UNTRIED, PUBLISHED]) == []
    assert track.busy == 0
    assert keys(window.take(10)) == ["a"]
    assert window.drop(track.lane) is None


def test_nothing_of_a_leaving_lane_begins(window: Window) -> None:
    track = lane(window)
    add(window, track, "a", "b")
    running = window.take(1)
    assert window.leave(track.lane) is track
    assert window.take(10) == []
    window.finish(running, [PUBLISHED])
    assert window.settle(track) == 0
    assert track.busy == 0


@pytest.mark.parametrize(("count", "size"), [(LIMIT, 10), (5, 210_000)])
def test_a_lane_is_full_at_its_limit_and_has_room_at_half(window: Window, count: int, size: int) -> None:
    track = lane(window)
    add(window, track, *[f"k{n}" for n in range(count - 1)], size=size)
    assert not window.is_full(track)
    add(window, track, "last", first=count, size=size)
    assert window.is_full(track)
    assert not window.has_room(track)
    for _ in range(count - count // 2):
        window.finish(window.take(1), [PUBLISHED])
    window.settle(track)
    assert window.has_room(track)


@dataclass
class LaneModel:
    """What a lane must look like, told by lists alone."""

    track: Track
    positions: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    settled: int = -1
    order: dict[str, list[int]] = field(default_factory=dict)  # positions of each key that are done, as they were done


RESULTS = st.sampled_from([PUBLISHED, PUBLISHED, PUBLISHED, retry("busy"), rejected("no"), outage("down"), UNTRIED])


class WindowMachine(RuleBasedStateMachine):
    """Messages come, calls end in any order with any outcome that the contract allows, lanes go."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(LIMIT, 1_000_000)
        self.lanes: list[LaneModel] = []
        self.calls: list[list[Queue]] = []
        self.by_id: dict[UUID, tuple[LaneModel, int]] = {}
        self.now = 0.0
        self.position = 0

    @initialize()
    def begin_with_a_lane(self) -> None:
        self.assign()

    @rule()
    def assign(self) -> None:
        self.lanes.append(LaneModel(lane(self.window, f"lane-{len(self.lanes)}")))

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), names=st.lists(st.sampled_from(["a", "b", "c", None]), max_size=8), hole=st.integers(1, 3))
    def receive(self, data: st.DataObject, names: list[str | None], hole: int) -> None:
        model = data.draw(st.sampled_from(self.lanes))
        for name in names:
            self.position += hole
            event = make_event(key=name)
            self.window.add(model.track, self.position, event, 10)
            model.positions.append(self.position)
            self.by_id[event.id] = (model, self.position)

    @rule(limit=st.integers(1, 6))
    def begin(self, limit: int) -> None:
        queues = self.window.take(limit)
        events = list(events_of(queues))
        assert len(events) <= limit
        if queues:
            self.calls.append(queues)
        busy = [(id(queue.track), queue.key) for call in self.calls for queue in call if queue.key is not None]
        assert len(busy) == len(set(busy)), "a key is in two calls"

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        queues = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        outcomes: list[Outcome] = []
        for queue in queues:
            stopped = False
            for entry in queue.entries[: queue.taken]:
                outcome = UNTRIED if stopped else data.draw(RESULTS)
                stopped |= outcome.result is not Result.PUBLISHED
                outcomes.append(outcome)
                if outcome is PUBLISHED and not queue.track.gone:
                    self._is_done(entry.event)
        for queue, _, outcome in self.window.finish(queues, outcomes):
            if outcome.result is Result.REJECTED:
                self._is_done(queue.head.event)
                self.window.done(queue)
            elif outcome.result is Result.RETRY:
                self.window.wait(queue, self.now + 1)
            else:
                self.window.again(queue)

    def _is_done(self, event: Event) -> None:
        model, position = self.by_id[event.id]
        model.done.add(position)
        if event.key is not None:
            model.order.setdefault(event.key, []).append(position)

    @rule()
    def time_passes(self) -> None:
        self.now += 1
        self.window.wake_due(self.now)

    @precondition(lambda self: len(self.lanes) > 1)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        model = self.lanes.pop(data.draw(st.integers(0, len(self.lanes) - 1)))
        self.window.drop(model.track.lane)

    @invariant()
    def settles_up_to_the_first_unfinished(self) -> None:
        for model in self.lanes:
            position = self.window.settle(model.track)
            unfinished = [each for each in model.positions if each not in model.done]
            wanted = [each for each in model.positions if not unfinished or each < unfinished[0]]
            assert model.settled <= (wanted[-1] if wanted else -1)
            if position is not None:
                model.settled = position
            assert model.settled == (wanted[-1] if wanted else -1)

    @invariant()
    def a_key_keeps_its_order(self) -> None:
        for model in self.lanes:
            for positions in model.order.values():
                assert positions == sorted(positions)

    def teardown(self) -> None:
        """Nothing is forgotten: when all goes well from now on, everything ends."""
        for queues in self.calls:
            events = list(events_of(queues))
            for queue in queues:
                if not queue.track.gone:
                    for entry in queue.entries[: queue.taken]:
                        self._is_done(entry.event)
            self.window.finish(queues, [PUBLISHED] * len(events))
        self.window.wake_due(self.now + 1)
        while queues := self.window.take(3):
            for event in events_of(queues):
                self._is_done(event)
            self.window.finish(queues, [PUBLISHED] * len(list(events_of(queues))))
        for model in self.lanes:
            assert model.done == set(model.positions)
            assert not model.track.queues
            assert model.track.busy == 0
        assert self.window.held == 0
        self.settles_up_to_the_first_unfinished()
        self.a_key_keeps_its_order()


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 7))
@settings(deadline=None)
def test_all_is_taken_once_and_in_order(names: list[str], limit: int) -> None:
    window = Window(LIMIT, 1_000_000)
    track = lane(window)
    add(window, track, *names)
    taken: dict[str, list[int]] = {}
    while queues := window.take(limit):
        for queue in queues:
            taken.setdefault(queue.key or "", []).extend(entry.position for entry in queue.entries[: queue.taken])
        window.finish(queues, [PUBLISHED] * sum(queue.taken for queue in queues))
    assert taken == {name: [n for n, each in enumerate(names) if each == name] for name in set(names)}
