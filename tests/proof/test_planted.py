"""The checker finds each planted bug, by the right invariant.

A run mostly waits, so two run at a time, in the order of their tests.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from proof.checker import Report, check
from proof.planted import PLANTED
from proof.planted_exactly_once import BUGS as EXACTLY_ONCE
from proof.runner import Plan, perform
from tests.proof.verdict import verdict

SHORT = Plan(
    store="sqlite",
    broker="handlers",
    seconds=2.0,
    seed=11,
    workers=1,
    writers=2,
    lease_seconds=1.0,
    prune_seconds=0.5,
    stuck_seconds=4.0,
    least_transactions=60,
    held=0.0,
)
TWO = replace(SHORT, workers=2, least_faults=1)
# Runs without a crash need long leases: on a slow machine a short one could run out.
LASTING = 60.0
CALM = replace(SHORT, faults="none", rejected=0.05, flaky=0.05, requests=0.3, lease_seconds=LASTING)
KILLS = replace(TWO, only="kill_at_point:settled", least_faults=2, queued=0.0)
# Not with a stopped relay: it may hold SQLite's lock, and then nobody writes.
OFTEN = replace(CALM, flaky=0.3)  # enough failures that an event of the same key comes before the next attempt
BACKLOG = replace(SHORT, only="broker", rejected=0.05, writers_clock=-3600, least_faults=1, lease_seconds=LASTING)
OUTAGE = replace(SHORT, only="broker", least_faults=1, lease_seconds=LASTING)
OPERATOR = replace(SHORT, only="operator:replay", on_dead="block", rejected=0.1, least_faults=5, lease_seconds=LASTING)
# These need PostgreSQL: SQLite has no clock of its own, no late commits, and a stopped worker may hold its lock.
SERVER = replace(TWO, store="postgres", seconds=3.0)
CLOCKS = replace(SERVER, only="clock:3600", writers=3, held=0.2, hold_seconds=0.3, lease_seconds=LASTING)
LATE = replace(CLOCKS, only=None, faults="none", workers=1, least_faults=0, least_transactions=150)
COPIES = replace(CALM, store="postgres", seconds=1.0)  # on SQLite one copy waits for the other before it looks
QUEUE = replace(SERVER, only="stop_at_point:confirmed", queued=1.0, least_faults=1)
# Without queued events: a relay that is stopped in its queue stream would not show the bug.
PAUSES = replace(SERVER, only="stop_at_point:confirmed,reading,settling", least_faults=3, queued=0.0)

# Each point leads to the bug: after a commit nothing is settled, at a begin nothing is sent that others could wait for.
ONCE = replace(CALM, broker="kafka", delivery="exactly-once", requests=None)
ONCE_KILLS = replace(ONCE, faults="all", only="kill_at_point:transaction_committed", least_faults=2, lease_seconds=1.0)
ONCE_SETTLED = replace(ONCE_KILLS, only="kill_at_point:settled")
ONCE_PAUSES = replace(
    ONCE_KILLS, store="postgres", workers=2, seconds=3.0, only="stop_at_point:transaction_begun", rejected=None
)

WITHOUT_A_BUG = {
    "calm": CALM,
    "kills": KILLS,
    "pauses": PAUSES,
    "backlog": BACKLOG,
    "outage": OUTAGE,
    "operator": OPERATOR,
    "clocks": CLOCKS,
    "queue": QUEUE,
    "copies": COPIES,
    "once-calm": ONCE,
    "once-kills": ONCE_KILLS,
    "once-pauses": ONCE_PAUSES,
}


class Caught(NamedTuple):
    plan: Plan
    by: str


def paused(point: str) -> Plan:
    return replace(PAUSES, only=f"stop_at_point:{point}", least_faults=2)


BUGS = {
    "settle_before_the_acknowledgement": Caught(KILLS, "I1"),
    "delivery_report_ignored": Caught(CALM, "I1"),
    "settle_without_the_token": Caught(paused("confirmed"), "I8"),
    "settle_that_crosses_a_take_over": Caught(paused("settling"), "I8"),
    "read_without_the_token": Caught(paused("reading"), "I7"),
    "order_by_id": Caught(BACKLOG, "I5"),
    "only_after_the_last_seen": Caught(LATE, "I1"),
    "prune_that_ignores_the_state": Caught(CALM, "I1"),
    "outage_charged": Caught(OUTAGE, "I11"),
    "leases_by_the_workers_clock": Caught(CLOCKS, "I7"),
    "payload_serialised_again": Caught(CALM, "I3"),
    "retry_overtaken_by_its_key": Caught(OFTEN, "I5"),
    "whole_batch_declared_dead": Caught(BACKLOG, "I11"),
    "dead_before_its_attempts": Caught(CALM, "I11"),
    "replay_that_forgets_its_key": Caught(OPERATOR, "I1"),
    "sent_again_to_be_sure": Caught(CALM, "I10"),
    "take_over_that_resets_what_is_published": Caught(KILLS, "I9"),
    "event_in_a_transaction_of_its_own": Caught(CALM, "I4"),
    "claim_settled_without_its_token": Caught(QUEUE, "I8"),
    "claim_of_what_another_has": Caught(replace(CALM, workers=2, queued=1.0), "I7"),
    "answer_before_commit": Caught(CALM, "I14"),
    "inbox_looks_first": Caught(COPIES, "I12"),
    "inbox_marks_in_its_own_transaction": Caught(CALM, "I12"),
    "recovery_that_trusts_an_old_record": Caught(ONCE_KILLS, "I10"),
    "settle_before_the_commit": Caught(ONCE_SETTLED, "I1"),
    "no_fencing_at_take_over": Caught(ONCE_PAUSES, "I10"),
    "producer_used_again_after_a_doubt": Caught(ONCE, "I10"),
}

Reports = dict[str, Future[Report]]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    """By name: the reports of the bugs and scenarios that this session runs."""

    def checked(plan: Plan, folder: Path) -> Report:
        return check(perform(plan, folder))

    # A bug may leave events behind for ever. Without one they are only waited for on a slow machine.
    patient = {name: replace(plan, stuck_seconds=60.0) for name, plan in WITHOUT_A_BUG.items()}
    plans = {**patient, **{bug: replace(caught.plan, planted=bug) for bug, caught in BUGS.items()}}
    mine = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params for item in mine if hasattr(item, "callspec")]
    names = [name for params in asked for name in params.values() if name in plans]
    with ThreadPoolExecutor(2) as runs:
        found = {name: runs.submit(checked, plans[name], tmp_path_factory.mktemp(name)) for name in names}
        yield found
        for run in found.values():
            run.cancel()


def test_every_planted_bug_has_its_scenario() -> None:
    assert set(BUGS) == set(PLANTED)


def long_if(name: str, wanted: bool) -> Any:
    return pytest.param(name, marks=pytest.mark.long) if wanted else name


@pytest.mark.parametrize("bug", [long_if(bug, bug in EXACTLY_ONCE) for bug in BUGS])
def test_a_planted_bug_is_caught(bug: str, reports: Reports) -> None:
    report = reports[bug].result()

    assert BUGS[bug].by in {finding.invariant for finding in report.findings}, verdict(report)


@pytest.mark.parametrize("scenario", [long_if(name, name in ("once-calm", "once-pauses")) for name in WITHOUT_A_BUG])
def test_the_same_without_a_bug_passes(scenario: str, reports: Reports) -> None:
    report = reports[scenario].result()

    assert report.passed, verdict(report)
