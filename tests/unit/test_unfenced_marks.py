"""Marks without a fence, in every order of events: a stale owner marks late what it published, a new owner reads the
same events and settles them otherwise, and an operator acts in between. The plans are the engine's own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pytest

from pillarbox.conformance.events import make_event
from pillarbox.event import Event, Status
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, rejected, retry
from pillarbox.relay import Fixed, OnDead
from pillarbox.relay.plan import Rules, plan_key_run, plan_turn, split
from pillarbox.store import PARKED, Failure, Grant, Hold, HoldMode, KeyRun, Settlement

KEY = "k"
EVENTS = tuple(make_event(key=KEY, seq=seq) for seq in (1, 2))
NUMBERS = {event.id: number for number, event in enumerate(EVENTS)}
BOB = Grant("orders", 0, "bob", 2)
UNSETTLED = (Status.PENDING, Status.FAILED, Status.HELD)
WAITING = (Status.FAILED, Status.HELD)
BUSY, REFUSED = retry("busy"), rejected("bad")
ROUNDS = 3


@dataclass(frozen=True)
class Row:
    status: Status = Status.PENDING
    seq: int = 0


@dataclass(frozen=True)
class World:
    """The store, the destination and the three actors at one moment."""

    rows: tuple[Row, ...] = tuple(Row(seq=event.seq) for event in EVENTS)
    hold: Hold | None = None
    owner: str = "ann"
    delivered: tuple[int, ...] = ()
    # Ann owns the shard at first and has read the events. She stops anywhere.
    ann_step: int = 0
    ann_sent: int = 0
    ann_owns: bool = False
    # Bob takes the shard over.
    bob_step: str = "take"
    bob_rounds: int = ROUNDS
    bob_read: tuple[tuple[int, Row], ...] = ()
    bob_due: Hold | None = None
    bob_holds: bool = False  # whether he knows that the key is held
    bob_plan: Settlement | None = field(default=None, compare=False)
    bob_outcomes: tuple[Outcome, ...] = ()
    replayed: tuple[tuple[int, int], ...] = ()  # each with the number of deliveries before it
    discarded: tuple[int, ...] = ()

    def set(self, number: int, status: Status, seq: int | None = None) -> "World":
        rows = list(self.rows)
        rows[number] = Row(status, rows[number].seq if seq is None else seq)
        return replace(self, rows=tuple(rows))

    def find(self, *states: Status) -> tuple[tuple[int, Row], ...]:
        found = [
            (number, row)
            for number, row in enumerate(self.rows)
            if row.status in states and number not in self.discarded
        ]
        return tuple(sorted(found, key=lambda each: each[1].seq))

    @property
    def bob_events(self) -> list[Event]:
        return [EVENTS[number]._replace(seq=row.seq, status=row.status) for number, row in self.bob_read]


@dataclass(frozen=True)
class Design:
    """The store's rules. A planted bug breaks one of them."""

    on_dead: OnDead
    checks_state: bool = True  # a mark changes only what is pending
    checks_place: bool = True  # and what has the place at which it was read
    acknowledged: bool = True  # a mark comes after the acknowledgement
    finds_head: bool = True  # a key is held only for a head that is there

    @property
    def rules(self) -> Rules:
        return Rules(Fixed(0.0), 100, self.on_dead)

    def steps(self, world: World) -> Iterator[World]:
        yield from self.ann(world)
        yield from self.bob(world)
        yield from self.operator(world)

    def ann(self, world: World) -> Iterator[World]:
        """Publish the events, look at the lease, then mark one after the other."""
        count = len(EVENTS)
        send, look, mark = range(count), count, range(count + 1, 2 * count + 1)
        if not self.acknowledged:
            look, mark, send = 0, range(1, count + 1), range(count + 1, 2 * count + 1)
        step = world.ann_step
        after = replace(world, ann_step=step + 1)
        if step in send:
            # She sends nothing when her lease may have run out.
            if world.owner == "ann":
                sent = send.index(step)
                yield replace(after, delivered=(*world.delivered, sent), ann_sent=sent + 1)
            elif self.acknowledged:
                yield replace(world, ann_step=look)
        elif step == look:
            if world.owner == "ann":
                yield replace(after, ann_owns=True)
        elif step in mark and world.ann_owns:
            number = mark.index(step)
            if number < world.ann_sent or not self.acknowledged:
                yield self.mark(after, number)

    def mark(self, world: World, number: int) -> World:
        row = world.rows[number]
        as_read = row.status is Status.PENDING or not self.checks_state
        in_place = row.seq == EVENTS[number].seq or not self.checks_place
        there = number not in world.discarded and (row.status is not Status.DEAD or not self.checks_state)
        return world.set(number, Status.PUBLISHED) if as_read and in_place and there else world

    def bob(self, world: World) -> Iterator[World]:
        """Take the shard, then run turns: read, publish with any outcome, settle."""
        if world.bob_step == "take":
            yield replace(world, owner="bob", bob_step="read")
        elif world.bob_step == "read" and world.bob_rounds:
            yield self.read(world)
        elif world.bob_step == "publish":
            for answers in product((PUBLISHED, BUSY, REFUSED), repeat=len(self.sendable(world))):
                yield self.publish(world, answers)
        elif world.bob_step == "settle" and world.bob_plan is not None:
            settled = self.settle(world, world.bob_plan)
            rounds = world.bob_rounds - 1
            yield replace(settled, bob_step="read", bob_rounds=rounds, bob_plan=None, bob_outcomes=(), bob_read=())

    def read(self, world: World) -> World:
        due = world.hold if world.hold is not None and world.hold.delay is not None else None
        read = world.find(*WAITING) if due else world.find(Status.PENDING)
        return replace(world, bob_step="publish", bob_read=read, bob_due=due, bob_holds=world.hold is not None)

    def sendable(self, world: World) -> Sequence[Event]:
        if world.bob_due is not None:
            return world.bob_events if world.bob_due.mode is HoldMode.RETRYING else ()
        return split(world.bob_events, [KEY] if world.bob_holds else [])[0]

    def publish(self, world: World, answers: Sequence[Outcome]) -> World:
        """Send in order. After the first that is not taken the key's others are untried."""
        events = self.sendable(world)
        outcomes: list[Outcome] = []
        delivered = list(world.delivered)
        for event, answer in zip(events, answers, strict=True):
            stopped = bool(outcomes) and outcomes[-1] != PUBLISHED
            outcomes.append(UNTRIED if stopped else answer)
            if outcomes[-1] == PUBLISHED:
                delivered.append(NUMBERS[event.id])
        if world.bob_due is not None:
            run = KeyRun(KEY, world.bob_due.mode, world.bob_events, world.bob_due.dead_head)
            plan = plan_key_run(BOB, run, outcomes, self.rules)
        else:
            held = split(world.bob_events, [KEY] if world.bob_holds else [])[1]
            plan = plan_turn(BOB, events, outcomes, held, self.rules)
        return replace(
            world, bob_step="settle", bob_plan=plan, bob_outcomes=tuple(outcomes), delivered=tuple(delivered)
        )

    def settle(self, world: World, plan: Settlement) -> World:
        """One transaction: it meets no mark half-way, because the server runs it again."""
        mode = world.hold.mode if world.hold is not None else None
        hold = world.hold
        if KEY in plan.hold_keys:
            own = {NUMBERS[failure.event.id] for failure in (*plan.failed, *plan.dead)}
            head = plan.hold_keys[KEY].dead_head
            heads = own if head is None else own | {NUMBERS[head]}
            there = {number for number, _ in world.find(*UNSETTLED)} & own
            there |= {number for number, _ in world.find(Status.DEAD)}
            if heads <= there or not self.finds_head:
                hold = plan.hold_keys[KEY]
        dead = list(plan.dead)
        if mode is HoldMode.PARKED:
            dead += [Failure(event, PARKED, 0) for event in plan.held]
        moves = [(event, Status.PUBLISHED) for event in plan.published]
        moves += [(failure.event, Status.FAILED) for failure in plan.failed]
        moves += [(failure.event, Status.DEAD) for failure in dead]
        moves += [(event, Status.HELD) for event in plan.held if mode not in (None, HoldMode.PARKED)]
        for event, status in moves:
            number = NUMBERS[event.id]
            from_ = (Status.PENDING,) if status is Status.HELD else UNSETTLED
            if world.rows[number].status in from_ and number not in world.discarded:
                world = world.set(number, status)
        released = KEY in plan.release_keys and hold is not None and hold.mode is HoldMode.RETRYING
        if released and not world.find(*WAITING):
            hold = None
        return replace(world, hold=hold)

    def operator(self, world: World) -> Iterator[World]:
        for number, _ in world.find(Status.DEAD):
            hold = world.hold
            if hold is not None and (hold.mode is HoldMode.RETRYING or hold.dead_head == EVENTS[number].id):
                hold = Hold(HoldMode.RETRYING, 0.0)
            yield replace(world, discarded=(*world.discarded, number), hold=hold)
            if number not in dict(world.replayed):
                again = (*world.replayed, (number, len(world.delivered)))
                back = world.set(number, Status.FAILED) if hold is not None else self.at_the_end(world, number)
                yield replace(back, replayed=again, hold=hold)

    def at_the_end(self, world: World, number: int) -> World:
        return world.set(number, Status.PENDING, 1 + max(row.seq for row in world.rows))


def check_step(before: World, after: World) -> None:
    """Invariants of a step."""
    for number, row in enumerate(after.rows):
        if row.status is Status.PUBLISHED:
            assert number in after.delivered, "published, and the destination does not have it"
    by_ann = before.ann_step != after.ann_step
    for old, new in zip(before.rows, after.rows, strict=True):
        if by_ann and old != new:
            assert old.status is Status.PENDING, f"a mark changed what the new owner or an operator says: {old}"
    first = [number for number in dict.fromkeys(after.delivered) if number not in dict(after.replayed)]
    assert first == sorted(first), "out of order"
    if after.hold is not None and after.hold.dead_head is not None:
        head = NUMBERS[after.hold.dead_head]
        assert after.rows[head].status is Status.DEAD, "the key waits for a dead letter that is not there"
        assert head not in after.discarded, "the key waits for a dead letter that is not there"
    if after.find(*WAITING):
        assert after.hold is not None, "an event waits for a key that is not held"


def check_end(world: World, design: Design) -> None:
    """When the destination takes everything, each event comes to its end and no key stays held for nothing."""
    if world.bob_step == "take":
        world = replace(world, owner="bob", bob_step="read")
    for _ in range(8):
        if world.bob_step == "read":
            world = design.read(replace(world, bob_rounds=9))
        if world.bob_step == "publish":
            world = design.publish(world, [PUBLISHED] * len(design.sendable(world)))
        assert world.bob_plan is not None
        world = replace(design.settle(world, world.bob_plan), bob_step="read", bob_plan=None)
    for number, row in enumerate(world.rows):
        ended = row.status in (Status.PUBLISHED, Status.DEAD) or number in world.discarded
        assert ended or (world.hold is not None and world.hold.dead_head is not None), f"{row} waits for ever"
    if world.hold is not None:
        assert world.hold.dead_head is not None, "a key is held and nothing of it waits"
    for number, before in world.replayed:
        done = world.rows[number].status is Status.PUBLISHED and number not in world.discarded
        assert not done or number in world.delivered[before:], "a replay sent nothing"


def explore(design: Design) -> int:
    """Every reachable state; returns their number."""
    start = World()
    seen, left = {start}, [start]
    while left:
        world = left.pop()
        check_end(world, design)
        for after in design.steps(world):
            check_step(world, after)
            if after not in seen:
                seen.add(after)
                left.append(after)
    return len(seen)


@pytest.mark.parametrize("on_dead", list(OnDead))
def test_a_late_mark_breaks_no_promise(on_dead: OnDead) -> None:
    assert explore(Design(on_dead)) > 1000


@pytest.mark.parametrize(
    ("bug", "sentence"),
    [
        (Design(OnDead.BLOCK, checks_state=False), "a mark changed what"),
        (Design(OnDead.SKIP, checks_place=False), "a replay sent nothing"),
        (Design(OnDead.SKIP, acknowledged=False), "the destination does not have it"),
        (Design(OnDead.BLOCK, finds_head=False), "a dead letter that is not there"),
        (Design(OnDead.PARK, finds_head=False), "a dead letter that is not there"),
    ],
)
def test_a_planted_bug_is_found(bug: Design, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        explore(bug)
