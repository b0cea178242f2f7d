"""Short runs with every fault keep the promise.

The seeds are fixed, so that a test fails only because of a change. `make prove` takes new seeds and prints them.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from proof.checker import check
from proof.runner import EXACTLY_ONCE_LEASE, Plan, perform
from proof.tracer import POINTS
from tests.proof.verdict import verdict

ALL = [
    Plan(store="postgres", broker="kafka", seconds=12.0, seed=7),
    Plan(store="mongo", broker="kafka", seconds=12.0, seed=7),
    Plan(store="sqlite", broker="handlers", seconds=10.0, seed=7),
]
BROKERS = [
    Plan(store="postgres", broker="rabbitmq", seconds=12.0, seed=7),
    Plan(store="postgres", broker="http", seconds=12.0, seed=7),
    Plan(store="postgres", broker="pulsar", seconds=12.0, seed=7),
    Plan(store="postgres", broker="nats", seconds=12.0, seed=7),
    Plan(store="postgres", broker="redis", seconds=12.0, seed=7),
]
POLICIES = [
    Plan(store="sqlite", broker="handlers", seconds=6.0, seed=3, on_dead="block", rejected=0.02, lease_seconds=1.0),
    Plan(store="sqlite", broker="handlers", seconds=6.0, seed=3, on_dead="park", rejected=0.02, lease_seconds=1.0),
]


ONCE = [replace(plan, delivery="exactly-once", lease_seconds=EXACTLY_ONCE_LEASE) for plan in ALL[:2]]


def name(plan: Plan) -> str:
    return f"{plan.store}-{plan.broker}-{plan.on_dead}-{plan.delivery}"


@pytest.mark.parametrize(
    "plan", [*ALL, *(pytest.param(each, marks=pytest.mark.long) for each in (*POLICIES, *BROKERS, *ONCE))], ids=name
)
def test_with_every_fault_the_promise_is_kept(plan: Plan, tmp_path: Path) -> None:
    report = check(perform(plan, tmp_path))

    assert report.passed, verdict(report)
    assert report.facts.faults.count("kill") > 0, verdict(report)


@pytest.mark.parametrize("faults", ["none", "term"])
def test_without_a_crash_there_is_not_one_copy(faults: str, tmp_path: Path) -> None:
    # Long leases: on a slow machine a short one could run out.
    plan = Plan(store="sqlite", broker="handlers", seconds=6.0, seed=5, faults=faults, lease_seconds=60.0)
    report = check(perform(plan, tmp_path))

    assert report.passed, verdict(report)
    assert (report.copies.attributed, report.copies.unattributed) == (0, 0), verdict(report)
    assert (report.facts.faults.count("term") > 0) == (faults == "term")


@pytest.mark.long
def test_a_relay_can_be_killed_at_every_point(tmp_path: Path) -> None:
    plan = Plan(store="sqlite", broker="handlers", seconds=5.0, seed=1, only="kill_at_point", every_point=True)
    plan.prune_seconds = plan.lease_seconds = 1.0

    report = check(perform(plan, tmp_path))

    assert report.passed, verdict(report)
    killed = {fault.point for fault in report.facts.faults.all if fault.kind == "kill"}
    assert killed == set(POINTS), verdict(report)
