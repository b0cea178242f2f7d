"""The rule about an event that kills its worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.conformance.events import make_event
from pillarbox.event import Status
from pillarbox.ids import uuid7
from pillarbox.publisher import UNTRIED, rejected
from pillarbox.relay.crash import ERROR, Calm, CrashRule
from pillarbox.store import Grant

FULL = 2000
SUSPECT = uuid7()
SETTLED = [None, Status.PUBLISHED, Status.DEAD]
WAITING = [Status.PENDING, Status.FAILED, Status.HELD]


def grant(crashes: int, alone: int = 0) -> Grant:
    return Grant("orders", 0, "ann", 1, crashes, SUSPECT, alone, "bob")


class TestTakeOver:
    def test_a_shard_without_crashes_is_not_cautious(self) -> None:
        assert not CrashRule.has_evidence(grant(0))
        rule = CrashRule.after_crash(grant(0), None)
        assert (rule.crashes, rule.suspect, rule.cautious, rule.waits) == (0, None, False, False)

    @pytest.mark.parametrize("status", [*SETTLED, *WAITING])
    def test_after_one_crash_a_suspect_tells_nothing_because_that_owner_was_not_cautious(
        self, status: Status | None
    ) -> None:
        assert not CrashRule.has_evidence(grant(1))
        rule = CrashRule.after_crash(grant(1), status)
        assert (rule.crashes, rule.suspect, rule.cautious) == (1, None, True)

    @pytest.mark.parametrize("status", SETTLED)
    @pytest.mark.parametrize("crashes", [2, 3, 4, 9])
    def test_an_owner_whose_suspect_is_settled_did_not_die_of_this_shard(
        self, crashes: int, status: Status | None
    ) -> None:
        assert CrashRule.has_evidence(grant(crashes))
        rule = CrashRule.after_crash(grant(crashes), status)
        assert (rule.crashes, rule.suspect) == (crashes - 1, None)

    @pytest.mark.parametrize("status", WAITING)
    @pytest.mark.parametrize(("crashes", "suspected"), [(2, False), (3, False), (4, True), (9, True)])
    def test_a_waiting_suspect_is_published_alone_only_if_it_was_the_only_event_of_its_shard(
        self, crashes: int, suspected: bool, status: Status
    ) -> None:
        rule = CrashRule.after_crash(grant(crashes, alone=3), status)
        assert rule.waiting_note == (-3 if suspected else 0)
        assert (rule.crashes, rule.suspect, rule.alone) == (crashes, *((SUSPECT, 2) if suspected else (None, 0)))
        assert rule.waits is suspected

    def test_an_owner_that_died_while_the_suspect_waited_speaks_for_it(self) -> None:
        rule = CrashRule.after_crash(grant(9, alone=-3), Status.PENDING)
        assert (rule.suspect, rule.alone) == (SUSPECT, 0)

    def test_unless_it_died_while_it_published_the_suspect_of_another_shard(self) -> None:
        rule = CrashRule.after_crash(grant(9, alone=-3), Status.PENDING, explained=True)
        assert (rule.suspect, rule.alone) == (SUSPECT, 2)

    @pytest.mark.parametrize("status", WAITING)
    def test_an_owner_may_be_dead_of_the_suspect_that_it_published_alone(self, status: Status) -> None:
        assert CrashRule.may_be_dead_of(grant(9, alone=1), status)
        assert not CrashRule.may_be_dead_of(grant(9, alone=1), Status.PUBLISHED)
        assert not CrashRule.may_be_dead_of(grant(9, alone=0), status)
        assert not CrashRule.may_be_dead_of(grant(9, alone=-1), status)


class TestCharge:
    def test_after_three_crashes_alone_the_suspect_dies_and_those_behind_it_wait(self) -> None:
        events = [make_event(key="k") for _ in range(3)]
        rule = CrashRule(9, events[0].id, alone=3)
        assert not rule.waits
        assert rule.charge(events) == [rejected(ERROR), UNTRIED, UNTRIED]
        assert rule.charge(events) == (), "it dies once"

    def test_before_that_it_is_published_and_noted_as_alone(self) -> None:
        (event,) = [make_event()]
        for alone in range(3):
            rule = CrashRule(9, event.id, alone, counts=True)
            assert rule.waits
            assert rule.charge([event]) == ()
            assert rule.note(event.id) == alone + 2

    def test_only_the_event_that_is_published_next_can_be_the_suspect(self) -> None:
        events = [make_event(key="k") for _ in range(2)]
        rule = CrashRule(9, events[1].id, alone=3)
        assert rule.charge(events) == ()
        assert rule.charge(events[1:]) == [rejected(ERROR)]

    def test_without_a_suspect_nothing_is_charged(self) -> None:
        assert CrashRule(9).charge([make_event()]) == ()

    def test_the_dead_letter_says_that_it_may_have_been_delivered(self) -> None:
        assert "may have been delivered" in ERROR


class TestNote:
    def test_an_owner_without_a_suspect_notes_the_first_event(self) -> None:
        assert CrashRule(1).note(SUSPECT) == 0

    def test_a_suspect_that_is_published_without_evidence_keeps_its_count(self) -> None:
        assert CrashRule(9, SUSPECT, 2).note(SUSPECT) == 3

    def test_another_event_does_not_take_the_place_of_the_suspect(self) -> None:
        assert CrashRule(9, SUSPECT, 2, counts=True).note(uuid7()) is None


class TestCalm:
    def test_beside_other_work_a_suspect_waits_until_enough_events_have_passed(self) -> None:
        calm, rule = Calm(0.0, enough=3), CrashRule(9, SUSPECT)
        for passed in range(3):
            calm.passed = passed
            assert calm.choose([rule], 100.0, busy=True) is None
        calm.passed = 3
        assert calm.choose([rule], 0.0, busy=True) is rule
        assert rule.counts

    def test_without_other_work_it_goes_once_anything_has_passed_or_the_worker_has_lived_for_a_while(self) -> None:
        calm, rule = Calm(10.0, enough=3, seconds=1.0), CrashRule(9, SUSPECT)
        assert calm.choose([rule], 10.9, busy=False) is None
        assert calm.choose([rule], 11.0, busy=False) is rule
        calm.passed = 1
        assert calm.choose([rule], 10.0, busy=False) is rule
        assert rule.counts

    def test_if_only_suspects_are_left_and_nothing_has_passed_one_goes_without_evidence(self) -> None:
        calm, rules = Calm(0.0), [CrashRule(9, SUSPECT), CrashRule(9, uuid7())]
        chosen = calm.choose(rules, 0.0, busy=False)
        assert chosen is not None
        assert not chosen.counts

    def test_no_suspect_is_chosen_of_none(self) -> None:
        assert Calm(0.0, passed=1000).choose([], 1000.0, busy=False) is None


def test_after_three_crashes_a_shard_is_read_one_by_one() -> None:
    assert [CrashRule(crashes).limit(FULL) for crashes in range(6)] == [FULL, 125, 15, 1, 1, 1]
    assert CrashRule(10_000).limit(FULL) == 1
    assert CrashRule(1).limit(7) == 7, "never more than without crashes"
    assert [CrashRule(crashes).cautious for crashes in range(3)] == [False, True, True]


def test_caution_ends_step_by_step_as_events_are_settled() -> None:
    rule = CrashRule(7)
    limits, told = [], []
    while rule.cautious:
        assert not rule.settled(0)
        limits.append(rule.limit(FULL))
        if rule.settled(rule.limit(FULL)):
            told.append(rule.crashes)
    assert limits == [1] * 15 + [15] * 9 + [125] * 8
    assert told == [2, 1, 0]
    assert not rule.settled(1)


@given(st.integers(0, 6000), st.integers(0, 3))
def test_an_event_that_kills_its_owner_is_soon_published_alone(place: int, crashes: int) -> None:
    settled, killed = 0, 0
    while True:
        rule = CrashRule(crashes)
        while settled + rule.limit(FULL) <= place:
            read = rule.limit(FULL)
            settled += read
            if rule.settled(read):
                crashes = rule.crashes
        if rule.limit(FULL) == 1:
            break
        killed, crashes = killed + 1, crashes + 1
    assert settled == place
    assert killed <= 5
