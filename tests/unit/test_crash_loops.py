"""The rule about an event that kills its worker, in lives of a worker that is killed again and again."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID, uuid5

import pytest

from pillarbox.conformance.events import make_event
from pillarbox.event import Event, Status
from pillarbox.publisher import UNTRIED
from pillarbox.relay.crash import Calm, CrashRule
from pillarbox.store import Grant

SHARDS = 16
SLOTS = 4
BATCH = 2000
ROUND_SECONDS = 0.01
EVENT_SECONDS = 0.00002
IDLE_SECONDS = 0.5
SEEDS = 4
_NAMES = UUID(int=7)

# From the seconds and the events of a life so far to whether it ends here.
Killer = Callable[[float, int], bool]


class Killed(Exception):
    """The worker's process is gone."""


@dataclass
class Lease:
    """What the store keeps of a shard."""

    crashes: int = 0
    suspect: UUID | None = None
    alone: int = 0


@dataclass
class World:
    """An outbox, what was delivered, and the lives of one worker after another."""

    events: list[list[Event]]
    poisons: set[UUID] = field(default_factory=set)
    leases: list[Lease] = field(default_factory=lambda: [Lease() for _ in range(SHARDS)])
    delivered: list[UUID] = field(default_factory=list)
    dead: list[UUID] = field(default_factory=list)
    most_alone: int = 0
    crashes: int = 0
    alive_seconds: float = 0.0

    @classmethod
    def of(cls, count: int, shards: int = SHARDS) -> "World":
        events = [make_event(id=uuid5(_NAMES, str(number))) for number in range(count)]
        return cls([events[shard::shards] if shard < shards else [] for shard in range(SHARDS)])

    @property
    def left(self) -> int:
        return sum(map(len, self.events))

    def live(self, killer: Killer) -> None:
        """One life: until everything is published, or it is killed."""
        try:
            _Life(self, killer).run()
        except Killed:
            self.crashes += 1
            for lease in self.leases:
                lease.crashes += 1


class _Life:
    """A worker: as relay/ordered does it, without its I/O."""

    def __init__(self, world: World, killer: Killer) -> None:
        self._world = world
        self._killer = killer
        self._seconds = 0.0
        self._events = 0
        self._calm = Calm(0.0)
        self._rules = [CrashRule() for _ in range(SHARDS)] if not world.crashes else self._take_over()

    def _take_over(self) -> list[CrashRule]:
        found = []
        for shard, lease in enumerate(self._world.leases):
            grant = Grant("orders", shard, "ann", 1, lease.crashes, lease.suspect, lease.alone, "bob")
            waits = any(event.id == lease.suspect for event in self._world.events[shard])
            found.append((grant, Status.PENDING if waits else None))
        explained = any(CrashRule.may_be_dead_of(grant, status) for grant, status in found)
        rules = [CrashRule.after_crash(grant, status, explained=explained) for grant, status in found]
        self._world.leases = [Lease(rule.crashes, rule.suspect, rule.waiting_note) for rule in rules]
        return rules

    def run(self) -> None:
        while self._world.left:
            ready = [shard for shard in range(SHARDS) if self._world.events[shard]]
            random.shuffle(ready)
            suspects = [shard for shard in ready if self._rules[shard].waits]
            others = [shard for shard in ready if not self._rules[shard].waits]
            chosen = self._calm.choose([self._rules[shard] for shard in suspects], self._seconds, busy=bool(others))
            if chosen is not None:
                self._turn([shard for shard in suspects if self._rules[shard] is chosen])
            elif others:
                self._turn(others[:SLOTS])
            else:
                self._wait(IDLE_SECONDS)

    def _wait(self, seconds: float) -> None:
        self._seconds += seconds
        self._world.alive_seconds += seconds
        if self._killer(self._seconds, self._events):
            raise Killed

    def _turn(self, shards: list[int]) -> None:
        world = self._world
        batches = {shard: world.events[shard][: self._rules[shard].limit(BATCH)] for shard in shards}
        for shard, batch in list(batches.items()):
            rule, lease = self._rules[shard], world.leases[shard]
            if rule.charge(batch):
                world.dead.append(batch[0].id)
                del world.events[shard][0], batches[shard]
                continue
            alone = rule.note(batch[0].id)
            if rule.cautious and alone is not None:
                lease.suspect, lease.alone = batch[0].id, alone
                world.most_alone = max(world.most_alone, alone - 1)
        flying = [event for batch in batches.values() for event in batch]
        random.shuffle(flying)
        self._wait(ROUND_SECONDS)
        for event in flying:
            self._events += 1
            if event.id in world.poisons:
                raise Killed
            world.delivered.append(event.id)
            self._wait(EVENT_SECONDS)
        for shard, batch in batches.items():
            rule = self._rules[shard]
            del world.events[shard][: len(batch)]
            self._calm.passed += len(batch)
            if batch[0].id == rule.suspect:
                rule.forget()
            if rule.settled(len(batch)):
                world.leases[shard] = Lease(rule.crashes)


def never(seconds: float, events: int) -> bool:
    return False


def after(seconds: float) -> Killer:
    return lambda now, events: now >= seconds


def seeded(test: Callable[[], None]) -> Callable[[int], None]:
    """Run a test with several seeds. They are set in the test itself: a plugin sets its own one right before it."""

    def run(seed: int) -> None:
        random.seed(seed)
        test()

    run.__name__ = test.__name__
    return pytest.mark.parametrize("seed", range(SEEDS))(run)


@seeded
def test_kills_at_any_moment_charge_nobody_and_cost_little() -> None:
    calm = World.of(20_000)
    calm.live(never)
    world = World.of(20_000)
    while world.left:
        world.live(after(random.expovariate(1 / 0.25)))
    assert not world.dead
    # A crash costs a moment of caution: 0.6 s at the most in 60 seeds.
    assert world.alive_seconds < calm.alive_seconds + 1.0 * (world.crashes + 1)


@seeded
def test_kills_at_the_first_event_charge_nobody() -> None:
    world = World.of(2_000)
    for _ in range(25):
        world.live(lambda seconds, events: events > 0)
    assert (world.most_alone, world.dead, world.left) == (0, [], 2_000)
    world.live(never)
    assert (world.dead, world.left) == ([], 0)


@seeded
def test_kills_at_the_same_event_of_each_life_charge_nobody() -> None:
    place = random.randint(1, 20)
    world = World.of(2_000)
    for _ in range(60):
        world.live(lambda seconds, events: events >= place)
    assert not world.dead
    world.live(never)
    assert (world.dead, world.left) == ([], 0)


@seeded
def test_a_poison_is_found_and_dies_alone() -> None:
    world = World.of(2_000)
    (poison,) = world.poisons = {random.choice([event.id for events in world.events for event in events])}
    while world.left:
        world.live(never)
        assert world.crashes < 10
    assert world.dead == [poison]
    assert len(set(world.delivered)) == 1_999


@seeded
def test_two_poisons_in_two_shards_are_found() -> None:
    world = World.of(2_000)
    one, two = random.sample(range(SHARDS), 2)
    world.poisons = {random.choice(world.events[shard]).id for shard in (one, two)}
    while world.left:
        world.live(never)
        assert world.crashes < 25
    assert set(world.dead) == world.poisons
    assert len(set(world.delivered)) == 1_998


@seeded
def test_a_poison_without_neighbours_is_found() -> None:
    world = World.of(1)
    world.poisons = {event.id for events in world.events for event in events}
    while world.left:
        world.live(never)
        assert world.crashes < 10
    assert set(world.dead) == world.poisons


@seeded
def test_poisons_with_nothing_but_poisons_beside_them_are_found() -> None:
    world = World.of(3)
    world.poisons = {event.id for events in world.events for event in events}
    while world.left:
        world.live(never)
        assert world.crashes < 60
    assert set(world.dead) == world.poisons


@seeded
def test_a_poison_is_found_though_the_worker_is_killed_for_other_reasons_too() -> None:
    world = World.of(10_000)
    (poison,) = world.poisons = {random.choice([event.id for events in world.events for event in events])}
    while world.left:
        world.live(after(random.expovariate(1 / 2.0)))
        assert world.crashes < 60
    assert world.dead == [poison]


def test_those_behind_a_dead_event_wait_for_the_next_turn() -> None:
    events = [make_event(key="k") for _ in range(3)]
    assert list(CrashRule(9, events[0].id, 3).charge(events))[1:] == [UNTRIED, UNTRIED]
