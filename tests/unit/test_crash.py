"""The rule about an event that kills its worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.conformance.events import make_event
from pillarbox.event import Status
from pillarbox.ids import uuid7
from pillarbox.publisher import UNTRIED, retry
from pillarbox.relay.crash import ERROR, CrashRule
from pillarbox.store import Grant

FULL = 2000
SUSPECT = uuid7()
SETTLED = [None, Status.PUBLISHED, Status.DEAD]
WAITING = [Status.PENDING, Status.FAILED, Status.HELD]


def grant(crashes: int) -> Grant:
    return Grant("orders", 0, "ann", 1, crashes, SUSPECT)


class TestTakeOver:
    def test_a_shard_without_crashes_is_not_cautious(self) -> None:
        assert not CrashRule.has_evidence(grant(0))
        rule = CrashRule.after_crash(grant(0), None)
        assert (rule.crashes, rule.suspect, rule.cautious, rule.one_by_one) == (0, None, False, False)

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
    @pytest.mark.parametrize(("crashes", "charged"), [(2, False), (3, False), (4, True), (9, True)])
    def test_a_waiting_suspect_is_charged_only_if_it_was_published_alone(
        self, crashes: int, charged: bool, status: Status
    ) -> None:
        rule = CrashRule.after_crash(grant(crashes), status)
        assert (rule.crashes, rule.suspect) == (crashes, SUSPECT if charged else None)


class TestCharge:
    def test_the_suspect_fails_instead_of_being_published_and_those_behind_it_wait(self) -> None:
        events = [make_event(key="k") for _ in range(3)]
        rule = CrashRule(4, events[0].id)
        assert rule.charge(events) == [retry(ERROR), UNTRIED, UNTRIED]
        assert rule.charge(events) == (), "one crash is charged once"

    def test_only_the_event_that_is_published_next_can_be_the_suspect(self) -> None:
        events = [make_event(key="k") for _ in range(2)]
        rule = CrashRule(4, events[1].id)
        assert rule.charge(events) == ()
        assert rule.charge(events[1:]) == [retry(ERROR)]

    def test_without_a_suspect_nothing_is_charged(self) -> None:
        assert CrashRule(4).charge([make_event()]) == ()


def test_after_three_crashes_a_shard_is_read_one_by_one() -> None:
    assert [CrashRule(crashes).limit(FULL) for crashes in range(6)] == [FULL, 125, 15, 1, 1, 1]
    assert CrashRule(10_000).limit(FULL) == 1
    assert CrashRule(1).limit(7) == 7, "never more than without crashes"
    assert [CrashRule(crashes).one_by_one for crashes in range(5)] == [False, False, False, True, True]
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
        if rule.one_by_one:
            break
        killed, crashes = killed + 1, crashes + 1
    assert settled == place
    assert killed <= 5
