"""Each invariant catches a mutation of a correct history and flags nothing that is exempt."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from proof.card import card
from proof.checker import INVARIANTS, Report, check
from proof.history import Attempted, Change, Delivery, Effect, Fault, History, Requested, Scrape, Trace, Witness
from tests.proof.world import CLOCK, STREAM, World


def broken(report: Report) -> set[str]:
    return {finding.invariant for finding in report.findings}


def passes(history: History) -> Report:
    report = check(history)
    assert report.findings == []
    return report


def calm() -> World:
    """Twelve events with three keys or none, delivered by one worker, and requests with two idempotency keys."""
    world = World()
    for key, body, status in (
        *(("k1", "usual", 409), ("k1", "usual", 402), ("k1", "usual", 201), ("k1", "usual", 201)),
        *(("k1", "other", 422), ("k2", "other", 503), ("k2", "other", 201), ("k3", "usual", 503)),
    ):
        world.request(key, body, status)
    world.take("w1")
    for _ in range(3):
        world.commit("a", "b", "c", None)
        world.turn("w1")
    return world


def after_kill(point: str) -> World:
    world = World()
    world.take("w1")
    world.commit("a", "a", "b")
    world.turn("w1", dies=point)
    world.commit("a")
    world.take("w2")
    world.turn("w2")
    return world


def with_dead(on_dead: str) -> World:
    world = World(on_dead)
    world.take("w1")
    world.commit("a", "b")
    world.commit("a", fate="reject")
    world.commit("a", "b", "a")
    world.turn("w1")
    world.turn("w1")
    return world


def test_a_calm_run_passes_without_copies() -> None:
    report = passes(calm().rest())

    assert (report.copies.attributed, report.copies.unattributed) == (0, 0)


@pytest.mark.parametrize(("point", "copies"), [("read", 0), ("sent", 3), ("confirmed", 3), ("settling", 0)])
def test_copies_after_a_kill_are_attributed_to_it(point: str, copies: int) -> None:
    report = passes(after_kill(point).rest())

    assert report.copies.attributed == report.copies.most_per_kill == copies


def test_a_paused_worker_that_is_refused_explains_its_copies() -> None:
    world = World()
    world.take("w1")
    world.commit("a", "b")
    world.pause("w1", "w2")

    report = passes(world.rest())

    assert report.copies.causes == {"stop": 2}


@pytest.mark.parametrize("on_dead", ["skip", "block", "park"])
def test_a_dead_event_is_a_legal_gap(on_dead: str) -> None:
    history = with_dead(on_dead).rest()

    passes(history)

    later = [delivery for delivery in history.deliveries if delivery.event_id in ("e4", "e6")]
    assert len(later) == (2 if on_dead == "skip" else 0)


@pytest.mark.parametrize("on_dead", ["skip", "block", "park"])
@pytest.mark.parametrize("action", ["replay", "discard"])
def test_an_audited_action_of_an_operator_passes(on_dead: str, action: str) -> None:
    world = with_dead(on_dead)
    for event_id in list(world.history.final.dead):
        (world.replay if action == "replay" else world.discard)(event_id)
    world.commit("a", "a")

    passes(world.rest())


def test_a_retry_that_holds_its_key_passes() -> None:
    world = World()
    world.take("w1")
    world.commit("a", fate="flaky")
    world.commit("a", "b", "a")
    for _ in range(3):
        world.turn("w1")

    passes(world.rest())


def test_death_after_the_last_attempt_passes() -> None:
    world = World()
    world.take("w1")
    world.commit("a", fate="flaky")
    world.failures["e1"] = 9
    world.commit("a")
    for _ in range(5):
        world.turn("w1")
    history = world.rest()

    assert "e1" in history.final.dead
    passes(history)


def test_scheduled_events_may_come_late() -> None:
    world = World()
    world.take("w1")
    world.commit("a", scheduled=True)
    world.commit("a", "a")
    world.turn("w1")
    world.reenter_due()
    world.turn("w1")

    passes(world.rest())


def test_an_unknown_commit_may_be_there_or_not() -> None:
    world = calm()
    world.commit("a", "b", result="unknown")
    world.abandon("unknown")
    world.abandon("failed")

    passes(world.rest())


def test_an_outage_charges_nothing() -> None:
    world = World()
    world.take("w1")
    world.commit("a", "b")
    world.outage("w1")

    assert passes(world.rest()).copies.attributed == 0


def test_a_queue_stream_promises_no_order() -> None:
    history = calm().rest()
    history.run.settings["queue_streams"] = [STREAM]
    swap(history, "e1", "e5")

    passes(history)


def claim_what_another_has(history: History) -> None:
    published = change_of(history, "e1", "published")
    history.changes.append(replace(published, seq=10_000, old="processing", new="processing", token=2))


def claim_under_an_old_token(history: History) -> None:
    published = change_of(history, "e1", "published")
    history.changes.append(replace(published, seq=10_000, old="failed", new="processing"))


def settle_a_claim_of_another(history: History) -> None:
    change_of(history, "e1", "published").token = 2


@pytest.mark.parametrize(
    ("invariant", "mutate"),
    [("I7", claim_what_another_has), ("I7", claim_under_an_old_token), ("I8", settle_a_claim_of_another)],
)
def test_a_wrong_claim_in_a_queue_stream_is_caught(invariant: str, mutate: Callable[[History], None]) -> None:
    history = calm().rest()
    history.run.settings["queue_streams"] = [STREAM]
    mutate(history)

    assert invariant in broken(check(history))


def swap(history: History, first: str, second: str) -> None:
    one, other = (next(line for line in history.deliveries if line.event_id == who) for who in (first, second))
    one.place, other.place = other.place, one.place


def change_of(history: History, event_id: str, new: str) -> Change:
    return next(line for line in history.changes if (line.kind, line.event_id, line.new) == ("event", event_id, new))


def copy(history: History, event_id: str) -> None:
    delivery = next(line for line in history.deliveries if line.event_id == event_id)
    history.deliveries.append(replace(delivery, place=[0, 10_000]))


def logged(history: History, **fields: object) -> None:
    last = history.changes[-1]
    line = Change(last.seq + 1, last.at, "event", STREAM, 0)
    for name, value in fields.items():
        setattr(line, name, value)
    history.changes.append(line)


def lose(history: History) -> None:
    history.deliveries[:] = [line for line in history.deliveries if line.event_id != "e4"]


def leave_waiting(history: History) -> None:
    history.final.states["e4"] = "pending"


def make_phantom(history: History) -> None:
    history.deliveries.append(Delivery("ghost", "a", "", [0, 10_000]))


def corrupt(history: History) -> None:
    history.deliveries[3].sha256 = "another"


def change_key(history: History) -> None:
    history.deliveries[3].key = "z"


def apply_twice(history: History) -> None:
    history.effects.append(Effect("e4"))


def apply_never(history: History) -> None:
    history.effects.remove(Effect("e4"))


def apply_without_a_delivery(history: History) -> None:
    history.effects.append(Effect("e99"))


def request_twice(history: History) -> None:
    history.requests.append(Requested("k1", "usual", "answer to k1"))


def answer_and_roll_back(history: History) -> None:
    history.requests.clear()


def answer_in_another_way(history: History) -> None:
    history.replies[3].sha256 = "answer to nobody"


def accept_another_body(history: History) -> None:
    history.replies[4].status, history.replies[4].sha256 = 201, "answer to k1"


def refuse_the_same_body(history: History) -> None:
    history.replies[3].status = 422


def refuse_a_free_key(history: History) -> None:
    history.replies[7].status = 422


def forget_the_answer(history: History) -> None:
    history.replies[3].status = 500


def forget_the_event(history: History) -> None:
    history.witness.append(Witness("e99", "orders", None, 99, ""))
    history.deliveries.append(Delivery("e99", None, "", [0, 10_000]))


def forget_the_data(history: History) -> None:
    logged(history, event_id="e99", new="published")


def commit_what_was_rolled_back(history: History) -> None:
    history.writers[0].result = "rolled_back"


def commit_half(history: History) -> None:
    history.writers.append(Attempted(1.0, "unknown", ["e1", "e99"]))


def leave_out(history: History) -> None:
    """Remove the delivery of a key's first event."""
    history.deliveries[:] = [line for line in history.deliveries if line.event_id != "e1"]


def spread(history: History) -> None:
    next(line for line in history.deliveries if line.event_id == "e5").place = [1, 3]


def take_early(history: History) -> None:
    lease = next(line for line in history.changes if line.kind == "lease")
    history.changes.insert(1, replace(lease, owner="thief", token=2, at=lease.at + 1))
    for seq, line in enumerate(history.changes):
        line.seq = seq


def grant_a_token_again(history: History) -> None:
    leases = [line for line in history.changes if line.kind == "lease"]
    for token in (77, leases[0].token):
        last = history.changes[-1]
        history.changes.append(replace(leases[-1], seq=last.seq + 1, at=last.at + 1000, owner="thief", token=token))


def share_token(history: History) -> None:
    leases = [line for line in history.changes if line.kind == "lease"]
    leases[1].owner, leases[1].token, leases[1].at = "thief", leases[0].token, leases[0].at + 1


def read_stale(history: History) -> None:
    at = history.traces[-1].at
    history.traces.append(Trace(at + 1, "w1", "read_begin", STREAM, 0, 1))
    history.traces.append(Trace(at + 2, "w1", "read", STREAM, 0, 1, ["e99"]))


def settle_stale(history: History) -> None:
    at = history.traces[-1].at
    history.traces.append(Trace(at + 1, "w1", "settle", STREAM, 0, 1, ["e1"]))
    history.traces.append(Trace(at + 2, "w1", "settled", STREAM, 0, 1, ["e1"]))


def settle_across_a_take_over(history: History) -> None:
    change_of(history, "e1", "published").token = 2


def settle_by_nobody(history: History) -> None:
    for trace in history.traces:
        if trace.kind in ("settle", "settled"):
            trace.event_ids = [event_id for event_id in trace.event_ids if event_id != "e1"]


def settle_without_effect(history: History) -> None:
    settled = next(trace for trace in history.traces if trace.kind == "settled")
    settled.token = 7


def publish_again(history: History) -> None:
    logged(history, event_id="e1", old="published", new="pending")


def insert_again(history: History) -> None:
    logged(history, event_id="e1", new="pending")


def read_again(history: History) -> None:
    trace = history.traces[-1]
    history.traces.append(replace(trace, at=trace.at + 1, kind="read_begin"))
    history.traces.append(replace(trace, at=trace.at + 2, kind="read", event_ids=["e1"]))


def deliver_twice(history: History) -> None:
    copy(history, "e1")


def deliver_twice_at_a_kill_of_another(history: History) -> None:
    history.faults.append(Fault(100.5, "kill", "w7"))
    copy(history, "e1")


def deliver_twice_at_a_stop(history: History) -> None:
    history.faults.append(Fault(100.05, "term", "w1"))
    history.traces[:] = [trace for trace in history.traces if trace.kind != "settled" or "e1" not in trace.event_ids]
    history.faults.append(Fault(100.06, "start", "w1"))
    copy(history, "e1")


def die_too_early(history: History) -> None:
    history.final.dead["e1"] = {"attempts": 1, "error": "refused", "permanent": True}


def charge_in_an_outage(history: History) -> None:
    change = change_of(history, "e1", "published")
    change.attempts = 2
    history.faults.append(Fault(change.at - CLOCK - 1, "broker", until=change.at - CLOCK + 1))


def never_recover(history: History) -> None:
    history.samples[-1].oldest_seconds = 11.0


def recover_slowly(history: History) -> None:
    history.run.healed = history.samples[0].at
    history.samples[1].oldest_seconds = 20.0
    history.samples[2].at += 100.0


def open_many_connections(history: History) -> None:
    history.run.settings["connections_bound"] = 3


def eat_memory(history: History) -> None:
    history.run.settings["memory_bound"] = 50


def fly_too_many(history: History) -> None:
    history.run.settings["batch"] = 3


def try_too_often(history: History) -> None:
    history.faults.append(Fault(90.0, "broker", until=200.0))
    history.run.settings["outage_attempts_bound"] = 3


def count_wrong(history: History) -> None:
    history.final.counters["published"] = 11


def record_no_leases(history: History) -> None:
    history.changes[:] = [line for line in history.changes if line.kind != "lease"]


def record_no_begins(history: History) -> None:
    history.traces[:] = [trace for trace in history.traces if trace.kind != "read_begin"]


def prune_early(history: History) -> None:
    history.run.settings["keep_seconds"] = 20.0
    published = change_of(history, "e12", "published")
    history.changes.append(replace(published, seq=10_000, at=published.at + 9.0, old="published", new=None))


def prune_what_never_arrived(history: History) -> None:
    published = change_of(history, "e4", "published")
    history.changes.append(replace(published, seq=10_000, old="published", new=None))
    lose(history)


def count_states_wrong(history: History) -> None:
    history.final.counters["in state published"] = 11


def with_results(history: History) -> list[Trace]:
    """The settled lines, which say that all of their events were published."""
    lines = [trace for trace in history.traces if trace.kind == "settled"]
    for line in lines:
        line.outcomes = ["published"] * len(line.event_ids)
    return lines


def scrape(history: History, *, more: int) -> None:
    """A page of metrics after the first settle of a worker, and ``more`` events than it has settled."""
    first, *_ = with_results(history)
    counters = {"outbox_done_total orders": float(len(first.event_ids) + more), "outbox_new_total orders": 99.0}
    history.scrapes.append(Scrape(first.at + 1e-6, first.worker, counters))


def scrape_too_much(history: History) -> None:
    scrape(history, more=1)


def scrape_too_little(history: History) -> None:
    scrape(history, more=-1)


def settle_what_the_database_does_not_know(history: History) -> None:
    scrape(history, more=0)
    lines = [trace for trace in history.traces if trace.kind == "settled"]
    lines[-1].token = 77


MUTATIONS: list[tuple[str, Callable[[History], None]]] = [
    ("I1", lose),
    ("I1", leave_waiting),
    ("I2", make_phantom),
    ("I3", corrupt),
    ("I3", change_key),
    ("I4", forget_the_event),
    ("I4", forget_the_data),
    ("I4", commit_what_was_rolled_back),
    ("I4", commit_half),
    ("I5", lambda history: swap(history, "e1", "e5")),
    ("I5", leave_out),
    ("I5", spread),
    ("I6", lambda history: swap(history, "e1", "e9")),
    ("I7", take_early),
    ("I7", grant_a_token_again),
    ("I7", share_token),
    ("I7", read_stale),
    ("I8", settle_stale),
    ("I8", settle_across_a_take_over),
    ("I8", settle_by_nobody),
    ("I8", settle_without_effect),
    ("I9", publish_again),
    ("I9", insert_again),
    ("I9", read_again),
    ("I10", deliver_twice),
    ("I10", deliver_twice_at_a_kill_of_another),
    ("I10", deliver_twice_at_a_stop),
    ("I11", die_too_early),
    ("I11", charge_in_an_outage),
    ("I12", apply_twice),
    ("I12", apply_never),
    ("I12", apply_without_a_delivery),
    ("I13", prune_early),
    ("I13", prune_what_never_arrived),
    ("I14", request_twice),
    ("I14", answer_and_roll_back),
    ("I14", answer_in_another_way),
    ("I14", accept_another_body),
    ("I14", refuse_the_same_body),
    ("I14", refuse_a_free_key),
    ("I14", forget_the_answer),
    ("I15", never_recover),
    ("I15", recover_slowly),
    ("I16", open_many_connections),
    ("I16", eat_memory),
    ("I16", fly_too_many),
    ("I16", try_too_often),
    ("I17", count_wrong),
    ("I17", count_states_wrong),
    ("I17", scrape_too_much),
    ("I17", scrape_too_little),
    ("I17", settle_what_the_database_does_not_know),
    ("evidence", record_no_leases),
    ("evidence", record_no_begins),
]


@pytest.mark.parametrize(
    ("invariant", "mutate"), MUTATIONS, ids=[f"{name}-{mutate.__name__}" for name, mutate in MUTATIONS]
)
def test_a_mutation_is_caught_and_named(invariant: str, mutate: Callable[[History], None]) -> None:
    history = calm().rest()
    mutate(history)

    report = check(history)

    assert invariant in broken(report)
    assert card(report)["verdict"] == "fail"


def test_a_page_of_metrics_that_is_right_passes() -> None:
    history = calm().rest()
    scrape(history, more=0)

    assert check(history).passed


def test_what_a_recovery_settled_counts_as_done() -> None:
    history = calm().rest()
    worker = history.traces[0].worker
    history.traces.append(Trace(1e6, worker, "recovered", "cards", 3, 7, ["x", "y"], ["published", "published"]))
    for told, is_right in ((2.0, True), (0.0, False)):
        history.scrapes[:] = [Scrape(1e6 + 1, worker, {"outbox_done_total cards": told})]
        found = [each.sentence for each in check(history).findings]
        assert ("a counter on the page of metrics is wrong" not in found) is is_right


def test_of_refused_results_of_a_queue_the_page_may_count_some() -> None:
    history = calm().rest()
    worker = history.traces[0].worker
    line = Trace(1e6, worker, "refused", "jobs", None, 7, ["x", "y", "z"], ["published", "published", "dead"])
    history.traces.append(line)
    for told, is_right in ((0.0, True), (2.0, True), (3.0, False)):
        history.scrapes[:] = [Scrape(1e6 + 1, worker, {"outbox_done_total jobs": told})]
        assert ("I17" not in broken(check(history))) is is_right


def test_every_invariant_has_a_mutation() -> None:
    assert {name for name, _ in MUTATIONS} == set(INVARIANTS)


@pytest.mark.parametrize("on_dead", ["block", "park"])
def test_a_delivery_behind_a_dead_head_is_caught(on_dead: str) -> None:
    world = with_dead(on_dead)
    world.deliver("e4")

    assert "I5" in broken(check(world.rest()))


@pytest.mark.parametrize("on_dead", ["block", "park"])
def test_a_settle_behind_a_dead_head_is_caught_although_an_operator_acts_later(on_dead: str) -> None:
    world = with_dead(on_dead)
    logged(world.history, event_id="e4", old="held", new="published", token=1)
    world.replay("e3")

    assert "I5" in broken(check(world.rest()))


def test_a_retry_that_is_overtaken_and_dies_is_caught() -> None:
    world = World()
    world.take("w1")
    world.commit("a", fate="flaky")
    world.failures["e1"] = 9
    world.turn("w1")
    world.held_keys.clear()  # the planted bug: nobody remembers that the key is held
    world.commit("a")
    world.turn("w1")
    world.held_keys["a"] = "retrying"

    assert "I5" in broken(check(world.rest()))


def test_a_replay_without_an_audit_row_is_caught() -> None:
    world = with_dead("skip")
    world.replay("e3")
    history = world.rest()
    history.changes[:] = [line for line in history.changes if line.kind != "audit"]

    assert broken(check(history)) >= {"I5", "I9"}


def test_more_copies_than_a_kill_explains_are_caught() -> None:
    world = after_kill("confirmed")
    world.deliver("e1")

    report = check(world.rest())

    assert broken(report) == {"I10"}
    assert (report.copies.attributed, report.copies.unattributed) == (3, 1)


def once() -> World:
    """With exactly once: a relay was killed after it had published, and another one has taken its shard."""
    world = World()
    world.history.run.settings["delivery"] = "exactly-once"
    world.take("w1")
    world.commit("a")
    world.turn("w1")
    world.commit("a", "a", "b")
    world.turn("w1", dies="confirmed")
    world.take("w2")
    return world


def test_with_exactly_once_a_recovery_settles_what_was_published() -> None:
    world = once()
    world.recover("w2")

    report = passes(world.rest("w2"))

    assert card(report)["settled_in_recoveries"] == 3
    assert report.copies.attributed == 0


def test_with_exactly_once_no_fault_explains_a_copy() -> None:
    report = check(once().rest("w2"))

    assert broken(report) == {"I10"}
    assert (report.copies.attributed, report.copies.unattributed) == (0, 3)


def test_an_event_that_is_read_again_after_its_recovery_is_caught() -> None:
    world = once()
    world.recover("w2")
    world.trace("w2", "read_begin")
    world.trace("w2", "read", ["e2"])

    assert broken(check(world.rest("w2"))) == {"I9"}


def test_published_events_that_the_database_has_lost_are_caught() -> None:
    world = once()
    world.recover("w2", gone=1)

    assert broken(check(world.rest("w2"))) == {"I1"}


def test_a_copy_of_an_event_that_a_killed_worker_had_settled_is_caught() -> None:
    world = World()
    world.take("w1")
    world.commit("a")
    world.turn("w1")
    world.commit("b")
    world.turn("w1", dies="confirmed")
    world.deliver("e1")

    assert broken(check(world.rest())) == {"I10"}


def test_the_count_is_exact_and_the_examples_are_few() -> None:
    world = World()
    world.take("w1")
    world.commit(*["a"] * 50)
    history = world.rest()
    for delivery in history.deliveries:
        delivery.sha256 = ""

    (finding,) = check(history).findings

    assert (finding.count, len(finding.examples)) == (50, 20)


def test_a_long_history_is_checked() -> None:
    world = World()
    world.history.run.settings["batch"] = 100_000
    world.take("w1")
    world.commit(*("hot" if n % 2 else f"k{n % 1000}" for n in range(20_000)))
    world.turn("w1", limit=100_000, dies="confirmed")
    world.take("w2")
    world.turn("w2", limit=100_000)

    report = passes(world.rest())

    assert (len(report.facts.history.deliveries), report.copies.attributed) == (40_000, 20_000)


def test_an_event_whose_confirmation_was_refused_is_read_again() -> None:
    history = calm().rest()
    begin = next(trace for trace in history.traces if trace.kind == "read" and "e12" in trace.event_ids)
    earlier = replace(begin, event_ids=["e12"])
    kinds = ("read", "publish", "published", "settle", "refused", "read", "settle", "settled", "read_begin")
    for step, kind in enumerate(kinds):
        outcomes = ["published"] if kind == "published" else []
        at = begin.at - 0.01 + step * 0.001
        history.traces.append(replace(earlier, kind=kind, at=at, outcomes=outcomes))
    history.traces.sort(key=lambda trace: trace.at)

    passes(history)


def test_a_crash_that_is_charged_to_its_event_is_caught() -> None:
    world = World()
    world.take("w1")
    (event_id,) = world.commit("a")
    world.turn("w1", dies="confirmed")
    world.take("w2")
    row = world.rows[event_id]
    row.attempts += 1
    world._changed(row, "pending", "pending", by="w2")
    charged = world.history.changes[-1]
    world.history.faults.append(Fault(charged.at - CLOCK - 0.01, "broker", until=charged.at - CLOCK + 0.01))
    world.turn("w2")

    assert "I11" in broken(check(world.rest()))


def test_an_attempt_that_succeeds_during_an_outage_is_no_charge() -> None:
    history = calm().rest()
    change = change_of(history, "e1", "published")
    change.attempts = 1
    history.faults.append(Fault(change.at - CLOCK - 1, "broker", until=change.at - CLOCK + 1))

    assert check(history).passed


def test_events_that_wait_in_a_blocked_key_without_a_dead_letter_are_caught() -> None:
    world = World(on_dead="block")
    world.take("w1")
    world.commit("a", fate="reject")
    world.commit("a")
    world.turn("w1")
    history = world.rest()
    assert check(history).passed

    history.final.dead.clear()

    assert "I1" in broken(check(history))
