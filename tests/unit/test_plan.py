import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.conformance.events import make_event
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Limits, Outcome, outage, rejected, retry
from pillarbox.relay import Fixed, OnDead
from pillarbox.relay.plan import Rules, plan_claims, plan_key_run, plan_turn, split
from pillarbox.relay.retry import Retry
from pillarbox.store import PARKED, Failure, Grant, Hold, HoldMode, KeyRun, Settlement

GRANT = Grant("orders", 0, "ann", 1)
POLICIES = list(OnDead)
HOLD_MODES = {
    OnDead.BLOCK: HoldMode.BLOCKED,
    OnDead.PARK: HoldMode.PARKED,
}


def rules(on_dead: OnDead = OnDead.SKIP, *, max_attempts: int = 3, retry: Retry = Fixed(5.0)) -> Rules:  # noqa: B008
    return Rules(retry, max_attempts, on_dead)


def turn(event: Event, outcome: Outcome, on_dead: OnDead = OnDead.SKIP, max_attempts: int = 3) -> Settlement:
    return plan_turn(GRANT, [event], [outcome], (), rules(on_dead, max_attempts=max_attempts))


class TestClassify:
    def test_a_passing_error_is_charged_and_waits(self) -> None:
        event = make_event(attempts=1)
        assert rules().classify(event, retry("busy")) == (Failure(event, "busy", 2, 5.0), False)

    def test_the_last_attempt_is_deadly(self) -> None:
        event = make_event(attempts=2)
        assert rules().classify(event, retry("busy")) == (Failure(event, "busy", 3), True)

    def test_an_uncharged_error_never_kills(self) -> None:
        event = make_event(attempts=7)
        assert rules().classify(event, retry("stuck", charged=False)) == (Failure(event, "stuck", 7, 5.0), False)

    def test_a_rejected_event_dies_at_once(self) -> None:
        event = make_event()
        assert rules().classify(event, rejected("too large")) == (Failure(event, "too large", 1), True)

    @pytest.mark.parametrize(("own", "attempts", "dies"), [(1, 0, True), (9, 2, False), (9, 8, True), (None, 2, True)])
    def test_an_event_can_have_a_limit_of_its_own(self, own: int | None, attempts: int, dies: bool) -> None:
        event = make_event(attempts=attempts, max_attempts=own)
        assert rules().classify(event, retry("busy"))[1] is dies

    def test_an_outcome_can_have_limits_in_place_of_the_streams(self) -> None:
        busy = retry("busy", limits=Limits(Fixed(0.5), 2))
        assert rules().classify(make_event(), busy)[0].delay == 0.5
        assert rules().classify(make_event(attempts=1), busy)[1]
        assert not rules().classify(make_event(attempts=1, max_attempts=9), busy)[1], "the event's own comes first"
        assert not rules().classify(make_event(attempts=1), retry("busy", limits=Limits()))[1]

    def test_an_attempt_is_not_charged_again_after_the_claim(self) -> None:
        event = make_event(attempts=2)
        failure, dead = rules().classify(event, retry("busy"), charged_before=True)
        assert (failure.attempts, dead) == (2, False)
        failure, dead = rules().classify(event, retry("stuck", charged=False), charged_before=True)
        assert (failure.attempts, dead) == (1, False)

    def test_the_policy_is_asked_with_the_attempts_so_far(self) -> None:
        asked: list[int] = []

        def note(attempts: int) -> float:
            asked.append(attempts)
            return 1.0

        policy = rules(max_attempts=9, retry=note)
        policy.classify(make_event(attempts=3), retry("busy"))
        policy.classify(make_event(attempts=0), retry("stuck", charged=False))
        assert asked == [4, 1], "never with 0"

    @pytest.mark.parametrize("delay", [-3.0, float("nan"), float("inf")])
    def test_a_users_policy_cannot_give_a_delay_that_no_database_takes(self, delay: float) -> None:
        failure, _ = rules(retry=lambda attempts: delay).classify(make_event(), retry("busy"))
        assert failure.delay is not None
        assert 0 <= failure.delay < float("inf")

    @pytest.mark.parametrize(
        ("named", "delay"), [(None, 5.0), (2.0, 5.0), (60.0, 60.0), (float("nan"), 5.0), (-1.0, 5.0)]
    )
    def test_an_outcome_can_name_a_longer_wait_than_the_policy(self, named: float | None, delay: float) -> None:
        failure, _ = rules().classify(make_event(), retry("busy", after_seconds=named))
        assert failure.delay == delay

    def test_a_named_wait_is_one_that_a_database_takes(self) -> None:
        failure, _ = rules().classify(make_event(), retry("busy", after_seconds=float("inf")))
        assert failure.delay is not None
        assert failure.delay < float("inf")

    def test_a_named_wait_holds_the_key_or_the_event(self) -> None:
        busy = retry("busy", after_seconds=60.0)
        assert turn(make_event(key="k"), busy).hold_keys["k"].delay == 60
        assert turn(make_event(key=None), busy).failed[0].delay == 60
        run = KeyRun("k", HoldMode.RETRYING, [make_event(key="k")])
        assert plan_key_run(GRANT, run, [busy], rules()).hold_keys["k"].delay == 60
        assert plan_claims([make_event()], [busy], rules()).failed[0].delay == 60

    def test_a_users_policy_that_raises_does_not_undo_the_turn(self) -> None:
        def broken(attempts: int) -> float:
            raise ZeroDivisionError

        sent, failed = make_event(), make_event()
        planned = plan_turn(GRANT, [sent, failed], [PUBLISHED, retry("busy")], (), rules(retry=broken))
        assert planned.published == [sent]
        assert [failure.event for failure in planned.failed] == [failed]


class TestSplit:
    def test_events_of_held_keys_are_held(self) -> None:
        events = [make_event(key=key) for key in ("a", "b", None, "a", "c")]
        free, held = split(events, {"a", "x"})
        assert [event.key for event in free] == ["b", None, "c"]
        assert [event.key for event in held] == ["a", "a"]

    def test_without_held_keys_nothing_is_held(self) -> None:
        events = [make_event(key=None), make_event()]
        assert split(events, set()) == (events, ())


class TestTurn:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_published(self, policy: OnDead) -> None:
        event = make_event(key="k")
        assert turn(event, PUBLISHED, policy) == Settlement(GRANT, published=[event])

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("outcome", [UNTRIED, outage("refused")])
    def test_untried_and_outage_change_nothing(self, policy: OnDead, outcome: Outcome) -> None:
        assert not turn(make_event(key="k", attempts=2), outcome, policy)

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize(("charged", "attempts"), [(True, 2), (False, 1)])
    def test_a_retry_holds_the_key(self, policy: OnDead, charged: bool, attempts: int) -> None:
        event = make_event(key="k", attempts=1)
        planned = turn(event, retry("busy", charged=charged), policy)
        assert planned.failed == [Failure(event, "busy", attempts, None)], "the instant stands with the key alone"
        assert planned.hold_keys == {"k": Hold(HoldMode.RETRYING, 5.0)}
        assert not any((planned.published, planned.dead, planned.held, planned.release_keys))

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize(("outcome", "attempts"), [(rejected("bad"), 0), (retry("busy"), 2)])
    def test_a_death_follows_the_policy(self, policy: OnDead, outcome: Outcome, attempts: int) -> None:
        event = make_event(key="k", attempts=attempts)
        planned = turn(event, outcome, policy)
        assert planned.dead == [Failure(event, outcome.error or "", attempts + 1)]
        hold = {} if policy is OnDead.SKIP else {"k": Hold(HOLD_MODES[policy], None, event.id)}
        assert planned.hold_keys == hold
        assert not any((planned.published, planned.failed, planned.held, planned.release_keys))

    @pytest.mark.parametrize("policy", POLICIES)
    def test_an_event_without_key_waits_by_itself(self, policy: OnDead) -> None:
        event = make_event(key=None)
        planned = turn(event, retry("busy"), policy)
        assert planned.failed == [Failure(event, "busy", 1, 5.0)]
        assert not planned.hold_keys
        assert not turn(event, rejected("bad"), policy).hold_keys

    def test_a_batch_is_planned_event_by_event(self) -> None:
        names = ["ok", "busy", "busy", "bad", None, "held"]
        ok, busy, behind, bad, keyless, held = [make_event(key=name) for name in names]
        outcomes = [PUBLISHED, retry("busy"), UNTRIED, rejected("bad"), PUBLISHED]
        planned = plan_turn(GRANT, [ok, busy, behind, bad, keyless], outcomes, [held], rules(OnDead.BLOCK))
        assert planned.published == [ok, keyless]
        assert [failure.event for failure in planned.failed] == [busy]
        assert [failure.event for failure in planned.dead] == [bad]
        assert planned.held == [held]
        assert planned.hold_keys == {"busy": Hold(HoldMode.RETRYING, 5.0), "bad": Hold(HoldMode.BLOCKED, None, bad.id)}
        named = [*planned.published, *planned.held, *(failure.event for failure in (*planned.failed, *planned.dead))]
        assert behind not in named, "what was not tried stays as it is"

    def test_whether_to_keep_published_events_is_passed_on(self) -> None:
        delete = Rules(Fixed(), 5, OnDead.SKIP, keep_published=False)
        event = make_event()
        assert not plan_turn(GRANT, [event], [PUBLISHED], (), delete).keep_published
        assert not plan_key_run(GRANT, KeyRun("k", HoldMode.RETRYING, [event]), [PUBLISHED], delete).keep_published
        assert not plan_claims([event], [PUBLISHED], delete).keep_published

    def test_a_publisher_that_forgets_an_outcome_is_found_out(self) -> None:
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            plan_turn(GRANT, [make_event(), make_event()], [PUBLISHED], (), rules())


class TestKeyRun:
    def run(self, *outcomes: Outcome, policy: OnDead = OnDead.SKIP, attempts: int = 1) -> tuple[KeyRun, Settlement]:
        run = KeyRun("k", HoldMode.RETRYING, [make_event(key="k", attempts=attempts) for _ in outcomes])
        return run, plan_key_run(GRANT, run, outcomes, rules(policy))

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_key_whose_run_succeeds_may_be_released(self, policy: OnDead) -> None:
        run, planned = self.run(PUBLISHED, PUBLISHED, policy=policy)
        assert planned == Settlement(GRANT, published=run.events, release_keys=["k"])

    def test_a_key_with_nothing_left_may_be_released(self) -> None:
        assert self.run()[1] == Settlement(GRANT, published=[], release_keys=["k"])

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("outcome", [UNTRIED, outage("refused")])
    def test_untried_and_outage_keep_the_key_due(self, policy: OnDead, outcome: Outcome) -> None:
        run, planned = self.run(PUBLISHED, outcome, UNTRIED, policy=policy)
        assert planned == Settlement(GRANT, published=run.events[:1])
        assert not self.run(outcome, UNTRIED, policy=policy)[1]

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize(("charged", "attempts"), [(True, 2), (False, 1)])
    def test_a_new_failure_sets_the_instant_of_the_key(self, policy: OnDead, charged: bool, attempts: int) -> None:
        run, planned = self.run(PUBLISHED, retry("busy", charged=charged), UNTRIED, policy=policy)
        assert planned.published == run.events[:1]
        assert planned.failed == [Failure(run.events[1], "busy", attempts, None)]
        assert planned.hold_keys == {"k": Hold(HoldMode.RETRYING, 5.0)}
        assert not any((planned.dead, planned.release_keys))

    @pytest.mark.parametrize(
        ("policy", "mode", "delay"),
        [
            (OnDead.SKIP, HoldMode.RETRYING, 0.0),
            (OnDead.BLOCK, HoldMode.BLOCKED, None),
            (OnDead.PARK, HoldMode.PARKED, 0.0),
        ],
    )
    @pytest.mark.parametrize(("outcome", "attempts"), [(rejected("bad"), 1), (retry("busy"), 2)])
    def test_a_death_follows_the_policy(
        self, policy: OnDead, mode: HoldMode, delay: float | None, outcome: Outcome, attempts: int
    ) -> None:
        run, planned = self.run(PUBLISHED, outcome, UNTRIED, policy=policy, attempts=attempts)
        assert planned.published == run.events[:1]
        assert planned.dead == [Failure(run.events[1], outcome.error or "", attempts + 1)]
        head = None if policy is OnDead.SKIP else run.events[1].id
        assert planned.hold_keys == {"k": Hold(mode, delay, head)}
        assert not planned.failed

    def test_the_events_of_a_parked_key_die_until_nothing_is_left(self) -> None:
        events = [make_event(key="k", attempts=n) for n in (2, 0)]
        head = make_event(key="k").id
        planned = plan_key_run(GRANT, KeyRun("k", HoldMode.PARKED, events, head), (), rules(OnDead.PARK))
        assert planned.dead == [Failure(events[0], PARKED, 2), Failure(events[1], PARKED, 0)], "nothing is charged"
        assert planned.hold_keys == {"k": Hold(HoldMode.PARKED, 0.0, head)}, "and waits for the same head"
        empty = plan_key_run(GRANT, KeyRun("k", HoldMode.PARKED, [], head), (), rules(OnDead.PARK))
        assert empty.hold_keys == {"k": Hold(HoldMode.PARKED, None, head)}


class TestClaims:
    def test_each_event_is_settled_by_itself(self) -> None:
        ok, busy, last, bad, stopped, down, blameless = [
            make_event(attempts=n, max_attempts=3) for n in (1, 1, 3, 1, 1, 1, 3)
        ]
        outcomes = [
            PUBLISHED,
            retry("busy"),
            retry("busy"),
            rejected("bad"),
            UNTRIED,
            outage("refused"),
            retry("stuck", charged=False),
        ]
        planned = plan_claims([ok, busy, last, bad, stopped, down, blameless], outcomes, rules(max_attempts=9))
        assert planned.published == [ok]
        assert planned.failed == [Failure(busy, "busy", 1, 5.0), Failure(blameless, "stuck", 2, 5.0)]
        assert planned.dead == [Failure(last, "busy", 3), Failure(bad, "bad", 1)]
        assert planned.refund == [stopped, down], "given back uncharged"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", None]),
            st.sampled_from([PUBLISHED, UNTRIED, retry("r"), rejected("x"), retry("u", charged=False), outage("o")]),
            st.integers(0, 4),
        )
    ),
    st.sampled_from(POLICIES),
)
def test_no_event_is_planned_twice_and_no_untried_event_is_planned(
    batch: list[tuple[str | None, Outcome, int]], policy: OnDead
) -> None:
    events = [make_event(key=key, attempts=attempts) for key, _, attempts in batch]
    outcomes = [outcome for _, outcome, _ in batch]
    planned = plan_turn(GRANT, events, outcomes, (), rules(policy))
    named = [*planned.published, *(failure.event for failure in (*planned.failed, *planned.dead))]
    assert len({event.id for event in named}) == len(named)
    told = [event for event, outcome in zip(events, outcomes, strict=True) if outcome.result != UNTRIED.result]
    assert {event.id for event in named} == {event.id for event in told}
    for failure in planned.failed:
        assert (failure.event.key in planned.hold_keys) == (failure.event.key is not None)
