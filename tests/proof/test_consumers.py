"""Runs of consumers with every fault keep the promise, and the checker finds each planted bug.

The seeds are fixed, so that a test fails only because of a change. `make prove` takes new seeds and prints them.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from proof.consumers.card import card, text
from proof.consumers.checker import Report, check
from proof.consumers.planted import PLANTED
from proof.consumers.runner import Plan, perform

pytestmark = pytest.mark.timeout(900)
STORMS = [
    Plan(store="postgres", seconds=15.0, seed=7),
    Plan(store="mongo", seconds=15.0, seed=7),
    Plan(broker="rabbitmq", seconds=15.0, seed=7, least_kills=2),
    Plan(broker="pulsar", seconds=15.0, seed=7, least_kills=2),
]
CALM = Plan(seconds=5.0, seed=11, per_second=100.0, faults="none", restless=False, consumers=1)
KILLS = replace(CALM, faults="all", only="kill", consumers=2, least_kills=4)
# With this seed, each fate is among the first 21 events.
SHORT = replace(KILLS, seconds=3.0, seed=84, least_kills=2, per_second=50.0)
BUGS = {
    "commit_past_an_unfinished_offset": (KILLS, "I1"),
    "retry_overtakes_its_key": (CALM, "I5"),
    "dead_letter_without_an_inbox_row": (CALM, "I12"),
    "inbox_looks_first": (CALM, "I12"),
}


def verdict(report: Report) -> str:
    found = [f"{each.invariant}: {each.sentence}: {each.count}, {each.examples[:5]}" for each in report.findings]
    return "\n".join([text(card(report)), *found])


@pytest.mark.parametrize("broker", ["kafka", "rabbitmq", "pulsar"])
def test_consumers_can_be_killed(broker: str, tmp_path: Path) -> None:
    report = check(perform(replace(SHORT, broker=broker), tmp_path))
    assert report.passed, verdict(report)
    assert report.kills() >= SHORT.least_kills, verdict(report)


@pytest.mark.long
@pytest.mark.parametrize("plan", STORMS, ids=lambda plan: f"{plan.broker}-{plan.store}")
def test_with_every_fault_the_promise_is_kept(plan: Plan, tmp_path: Path) -> None:
    report = check(perform(plan, tmp_path))
    assert report.passed, verdict(report)
    assert report.kills() > 0, verdict(report)


@pytest.mark.long
@pytest.mark.parametrize("plan", [CALM, KILLS], ids=["calm", "kills"])
def test_without_a_bug_the_plans_pass(plan: Plan, tmp_path: Path) -> None:
    report = check(perform(plan, tmp_path))
    assert report.passed, verdict(report)


def test_every_planted_bug_has_its_plan() -> None:
    assert set(BUGS) == set(PLANTED)


@pytest.mark.long
@pytest.mark.parametrize(
    ("bug", "broker"),
    [
        *((bug, "kafka") for bug in BUGS),
        *(("commit_past_an_unfinished_offset", each) for each in ("rabbitmq", "pulsar")),
    ],
)
def test_a_planted_bug_is_caught(bug: str, broker: str, tmp_path: Path) -> None:
    plan, invariant = BUGS[bug]
    report = check(perform(replace(plan, planted=bug, broker=broker), tmp_path))
    assert invariant in {finding.invariant for finding in report.findings}, verdict(report)
