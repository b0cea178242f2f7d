"""The pure core against a model of a store: whatever happens, nothing is lost and no key is overtaken."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pillarbox.conformance.events import make_event
from pillarbox.event import Event, Status
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Result, outage, rejected, retry
from pillarbox.relay import Fixed, OnDead
from pillarbox.relay.plan import Rules, plan_key_run, plan_turn, split
from pillarbox.store import PARKED, Failure, Grant, HoldMode, KeyRun, Settlement

GRANT = Grant("orders", 0, "ann", 1)
KEYS = ("a", "b", "c")
MAX_ATTEMPTS = 3
OUTCOMES = {
    "published": PUBLISHED,
    "retry": retry("busy"),
    "uncharged": retry("stuck", charged=False),
    "rejected": rejected("bad"),
    "untried": UNTRIED,
    "outage": outage("refused"),
}
# The legal moves of an event in an ordered stream.
MOVES = {
    Status.PENDING: {Status.PUBLISHED, Status.FAILED, Status.HELD, Status.DEAD},
    Status.FAILED: {Status.PUBLISHED, Status.FAILED, Status.DEAD, Status.PENDING},  # to pending: it has no key
    Status.HELD: {Status.PUBLISHED, Status.FAILED, Status.DEAD},
    Status.DEAD: {Status.PENDING, Status.FAILED},  # by a replay
}


@dataclass
class Row:
    event: Event
    status: Status = Status.PENDING
    attempts: int = 0
    due_at: float | None = None


@dataclass
class HeldKey:
    mode: HoldMode
    due_at: float | None
    dead_head: UUID | None = None


class ModelStore:
    """One shard, as the contract describes it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rows: dict[UUID, Row] = {}
        self.keys: dict[str, HeldKey] = {}
        self.discarded: set[UUID] = set()

    def move(self, row: Row, target: Status) -> None:
        assert target in MOVES[row.status], f"{row.status} -> {target} is not legal"
        row.status = target

    def waiting(self, *statuses: Status, key: str | None = None) -> list[Row]:
        rows = [row for row in self.rows.values() if row.status in statuses and key in (None, row.event.key)]
        return sorted(rows, key=lambda row: row.event.seq)

    def give(self, rows: Sequence[Row]) -> list[Event]:
        return [row.event._replace(attempts=row.attempts, status=row.status) for row in rows]

    def add(self, event: Event) -> None:
        self.rows[event.id] = Row(event)

    def read(self, limit: int) -> list[Event]:
        return self.give(self.waiting(Status.PENDING)[:limit])

    def read_due(self, limit: int) -> KeyRun | None:
        due = [key for key, row in self.keys.items() if row.due_at is not None and row.due_at <= self.now]
        if not due:
            return None
        rows = self.waiting(Status.FAILED, Status.HELD, key=due[0])
        held = self.keys[due[0]]
        return KeyRun(due[0], held.mode, self.give(rows[:limit]), held.dead_head)

    def reenter_due(self) -> None:
        for row in self.waiting(Status.FAILED):
            if row.due_at is not None and row.due_at <= self.now:
                self.move(row, Status.PENDING)
                row.due_at = None

    def move_to_dead(self, failure: Failure) -> None:
        row = self.rows[failure.event.id]
        self.move(row, Status.DEAD)
        row.attempts = failure.attempts

    def settle(self, settlement: Settlement) -> None:
        modes = {key: row.mode for key, row in self.keys.items()}
        for event in settlement.published:
            self.move(self.rows[event.id], Status.PUBLISHED)
            self.rows[event.id].attempts += 1
        for failure in settlement.failed:
            row = self.rows[failure.event.id]
            self.move(row, Status.FAILED)
            row.attempts = failure.attempts
            row.due_at = None if failure.delay is None else self.now + failure.delay
        for failure in settlement.dead:
            self.move_to_dead(failure)
        for event in settlement.held:
            assert event.key is not None
            if modes.get(event.key) is HoldMode.PARKED:
                self.move_to_dead(Failure(event, PARKED, event.attempts))
            elif event.key in modes:
                self.move(self.rows[event.id], Status.HELD)
        for key, hold in settlement.hold_keys.items():
            due_at = None if hold.delay is None else self.now + hold.delay
            self.keys[key] = HeldKey(hold.mode, due_at, hold.dead_head)
        for key in settlement.release_keys:
            if self.keys[key].mode is HoldMode.RETRYING and not self.waiting(Status.FAILED, Status.HELD, key=key):
                del self.keys[key]

    def replay(self, row: Row) -> None:
        key = row.event.key
        self.move(row, Status.FAILED if key in self.keys else Status.PENDING)
        row.attempts = 0
        self._free(row)

    def discard(self, row: Row) -> None:
        self.discarded.add(row.event.id)
        del self.rows[row.event.id]
        self._free(row)

    def _free(self, row: Row) -> None:
        held = self.keys.get(row.event.key or "")
        if held is not None and (held.mode is HoldMode.RETRYING or held.dead_head == row.event.id):
            held.mode, held.due_at, held.dead_head = HoldMode.RETRYING, self.now, None


class Destination:
    """Answers at random, and keeps the prefix of each key."""

    def __init__(self) -> None:
        self.deliveries: list[Event] = []

    def publish(self, events: Sequence[Event], answers: Sequence[str], *, down: bool) -> list[Outcome]:
        outcomes: list[Outcome] = []
        broken: set[str] = set()
        for event, answer in zip(events, answers, strict=False):
            outcome = OUTCOMES["outage" if down else answer]
            if event.key in broken:
                outcome = UNTRIED
            if outcome.result is Result.PUBLISHED:
                self.deliveries.append(event)
            elif event.key is not None:
                broken.add(event.key)
            outcomes.append(outcome)
        return outcomes


answers = st.lists(
    st.sampled_from(["published"] * 4 + ["retry", "retry", "uncharged", "rejected", "untried", "outage"]),
    min_size=12,
    max_size=12,
)


class PolicyMachine(RuleBasedStateMachine):
    """One shard of one stream, its worker, its operator and its destination."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ModelStore()
        self.destination = Destination()
        self.written: dict[UUID, int] = {}
        self.charges: dict[UUID, int] = {}
        self.replayed: set[UUID] = set()
        self.died_after: dict[UUID, int] = {}  # deliveries at the time of an event's death
        self.down = False

    @initialize(policy=st.sampled_from(list(OnDead)), delay=st.sampled_from([0.0, 5.0]))
    def choose(self, policy: OnDead, delay: float) -> None:
        self.stream_rules = Rules(Fixed(delay), MAX_ATTEMPTS, policy)

    @rule(keys=st.lists(st.sampled_from([*KEYS, None]), min_size=1, max_size=6))
    def write(self, keys: list[str | None]) -> None:
        for key in keys:
            event = make_event(key=key, seq=len(self.written) + 1)
            self.written[event.id] = event.seq
            self.charges[event.id] = 0
            self.store.add(event)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.store.now += seconds
        self.store.reenter_due()

    @rule(down=st.sampled_from([False, False, False, True]))
    def change_the_weather(self, down: bool) -> None:
        self.down = down

    @rule(answers=answers, limit=st.integers(1, 12), crash=st.booleans(), crashes=st.integers(0, 3))
    def turn(self, answers: list[str], limit: int, crash: bool, crashes: int) -> None:
        """Read, publish and settle. A worker that crashes has published, and settles nothing."""
        crash = crash and crashes == 0
        held_keys = set(self.store.keys)
        run = self.store.read_due(limit)
        if run is not None:
            outcomes = self._publish(run.events if run.mode is HoldMode.RETRYING else [], answers)
            if crash:
                return
            self._settle(run.events, outcomes, plan_key_run(GRANT, run, outcomes, self.stream_rules))
            held_keys = set(self.store.keys)
        free, held = split(self.store.read(limit), held_keys)
        outcomes = self._publish(free, answers)
        if not crash:
            self._settle(free, outcomes, plan_turn(GRANT, free, outcomes, held, self.stream_rules))

    def _publish(self, events: Sequence[Event], answers: Sequence[str]) -> list[Outcome]:
        assert len(events) <= len(answers)
        return self.destination.publish(events, answers, down=self.down)

    def _settle(self, events: Sequence[Event], outcomes: Sequence[Outcome], settlement: Settlement) -> None:
        for event, outcome in zip(events, outcomes, strict=False):
            tried = outcome.result in (Result.PUBLISHED, Result.REJECTED, Result.RETRY)
            self.charges[event.id] += tried and outcome.charged
        self.store.settle(settlement)
        for failure in settlement.dead:
            self.died_after[failure.event.id] = len(self.destination.deliveries)

    @precondition(lambda self: self.store.waiting(Status.DEAD))
    @rule(data=st.data(), replay=st.booleans())
    def operate(self, data: st.DataObject, replay: bool) -> None:
        dead = self.store.waiting(Status.DEAD)
        row = dead[data.draw(st.integers(0, len(dead) - 1))]
        if replay:
            self.replayed.add(row.event.id)
            self.charges[row.event.id] = 0
            self.store.replay(row)
        else:
            self.store.discard(row)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.written.keys() == self.store.rows.keys() | self.store.discarded
        delivered = {event.id for event in self.destination.deliveries}
        for row in self.store.rows.values():
            assert row.status is not Status.PUBLISHED or row.event.id in delivered

    @invariant()
    def no_key_is_overtaken(self) -> None:
        """The first deliveries of a key come in order. Events that they skip are dead or were replayed."""
        for key in KEYS:
            first = list(dict.fromkeys(event.id for event in self.destination.deliveries if event.key == key))
            in_order = [self.written[each] for each in first if each not in self.replayed]
            assert in_order == sorted(in_order)
            for row in self.store.rows.values():
                behind = in_order and row.event.key == key and row.event.seq < in_order[-1]
                if behind and row.event.id not in first and row.event.id not in self.replayed:
                    assert row.status is Status.DEAD, f"{row} was passed over by {in_order[-1]}"

    @invariant()
    def a_blocked_key_waits_for_its_operator(self) -> None:
        if self.stream_rules_are(OnDead.BLOCK):
            for row in self.store.waiting(Status.DEAD):
                since = self.destination.deliveries[self.died_after[row.event.id] :]
                later = [event.seq for event in since if event.key == row.event.key and event.seq > row.event.seq]
                assert row.event.key is None or not later, f"{later} went past {row}, which is dead"

    def stream_rules_are(self, policy: OnDead) -> bool:
        return bool(self.written) and self.stream_rules.on_dead is policy

    @invariant()
    def only_what_is_charged_counts(self) -> None:
        for row in self.store.rows.values():
            assert row.attempts == self.charges[row.event.id]
            if row.status is not Status.PUBLISHED:
                assert row.attempts <= MAX_ATTEMPTS

    @invariant()
    def a_held_event_has_a_held_key(self) -> None:
        for row in self.store.waiting(Status.HELD):
            assert row.event.key in self.store.keys
        for row in self.store.waiting(Status.FAILED):
            assert (row.due_at is None) == (row.event.key is not None)
            assert row.event.key is None or row.event.key in self.store.keys

    @invariant()
    def a_key_that_is_retried_comes_due(self) -> None:
        for row in self.store.keys.values():
            assert row.mode is not HoldMode.RETRYING or row.due_at is not None

    @invariant()
    def a_key_that_waits_for_an_operator_waits_for_a_dead_letter(self) -> None:
        for row in self.store.keys.values():
            if row.mode is not HoldMode.RETRYING:
                assert row.dead_head is not None
                assert self.store.rows[row.dead_head].status is Status.DEAD

    @invariant()
    def only_the_policy_of_the_stream_holds_keys_for_good(self) -> None:
        if self.store.keys:
            legal = {OnDead.SKIP: set(), OnDead.BLOCK: {HoldMode.BLOCKED}, OnDead.PARK: {HoldMode.PARKED}}
            modes = {row.mode for row in self.store.keys.values()}
            assert modes <= legal[self.stream_rules.on_dead] | {HoldMode.RETRYING}

    def teardown(self) -> None:
        """When everything works again, each event ends up published, dead, or behind a blocked key."""
        self.down = False
        for _ in range(4 * len(self.written) + 8):
            self.store.now += 10
            self.store.reenter_due()
            self.turn(["published"] * 12, 12, False, 1)
        blocked = {key for key, row in self.store.keys.items() if row.mode is not HoldMode.RETRYING}
        for row in self.store.rows.values():
            settled = row.status in (Status.PUBLISHED, Status.DEAD)
            assert settled or row.event.key in blocked, f"{row} waits for ever"
        assert self.store.keys.keys() == blocked, "a key is held and nothing of it waits"
        self.nothing_is_lost()
        self.no_key_is_overtaken()


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
