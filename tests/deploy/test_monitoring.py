"""The alert rules and the board use metrics that exist, each alert is tried, and promtool accepts all of it."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pillarbox.observe.metrics import METRICS, Kind
from servers import apt

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
CASES = ROOT / "deploy" / "prometheus" / "rules_test.yml"
EXAMPLES = sorted((ROOT / "examples").glob("*/alerts.yml"))
BOARD = ROOT / "deploy" / "grafana" / "pillarbox.json"
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())
RECORDED = set(re.findall(r"- record: ([\w:]+)", RULES.read_text()))

# The samples of each metric, with the labels of their families.
SAMPLES = {
    name: {*metric.labels, *(("le",) if metric.kind is Kind.HISTOGRAM else ())}
    for metric in METRICS
    for name in (
        [f"{metric.name}{end}" for end in ("_bucket", "_sum", "_count")]
        if metric.kind is Kind.HISTOGRAM
        else [metric.name]
    )
}
_NAME = re.compile(r"\b(?:outbox|inbox|idempotency|processing|consumer_)[\w:]*\b")
_LABELS = re.compile(r"\b(\w+)\s*=~?\s*\"|by \(([\w, ]+)\)")


def promtool(*arguments: str) -> str:
    """Run it, and return what it says."""
    if shutil.which("promtool") is None:
        missing = f"promtool is missing; {apt.hint(['prometheus'])}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def queries() -> list[str]:
    board = json.loads(BOARD.read_text())
    variables = [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    return variables + [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def expressions() -> list[str]:
    return [found for rules in (RULES, *EXAMPLES) for found in re.findall(r"expr: (.+)", rules.read_text())]


def test_promtool_accepts_the_rules() -> None:
    assert f"SUCCESS: {len(ALERTS) + RULES.read_text().count('- record:')} rules found" in promtool(
        "check", "rules", str(RULES)
    )


def test_each_rule_does_what_it_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(CASES))


def test_each_alert_is_tried_firing_and_silent() -> None:
    cases = CASES.read_text()
    silent = set(re.findall(r"\{eval_time: \w+, alertname: (\w+)\}", cases))
    firing = set(re.findall(r"alertname: (\w+)\n +exp_alerts:", cases))
    assert silent == firing == set(ALERTS)
    assert len(ALERTS) == 10


@pytest.mark.parametrize("rules", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_alerts_of_an_example_do_what_they_should(rules: Path) -> None:
    cases = rules.with_name("alerts_test.yml")
    assert "SUCCESS" in promtool("check", "rules", str(rules))
    assert "SUCCESS" in promtool("test", "rules", str(cases))
    alerts = set(re.findall(r"- alert: (\w+)", rules.read_text()))
    silent = set(re.findall(r"\{eval_time: \w+, alertname: (\w+)\}", cases.read_text()))
    assert silent == set(re.findall(r"alertname: (\w+)\n +exp_alerts:", cases.read_text())) == alerts


def test_there_are_examples_with_alerts() -> None:
    assert {path.parent.name for path in EXAMPLES} >= {"orders", "wiki"}


def test_each_recorded_name_is_tried() -> None:
    tried = set(re.findall(r"expr: ([\w:]+)\n", CASES.read_text()))
    assert tried == RECORDED


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_runbook(alert: str) -> None:
    block = RULES.read_text().split(f"- alert: {alert}\n")[1].split("- alert:")[0]
    page, anchor = re.findall(r"runbook: (\S+)#(\S+)", block)[0]
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]
    assert re.search(r"severity: (warning|critical)", block)


@pytest.mark.parametrize("query", [*queries(), *expressions()])
def test_each_query_uses_metrics_and_labels_that_exist(query: str) -> None:
    names = set(_NAME.findall(query)) - {"outbox_publish_latency"}
    assert names
    assert names <= SAMPLES.keys() | RECORDED
    if names <= SAMPLES.keys():
        labels = {each.strip() for pair in _LABELS.findall(query) for part in pair for each in part.split(",")} - {""}
        assert labels <= set().union(*(SAMPLES[name] for name in names))


def test_every_metric_is_on_the_board() -> None:
    shown = {name for query in queries() for name in _NAME.findall(query)}
    missing = [metric.name for metric in METRICS if not any(name.startswith(metric.name) for name in shown)]
    assert missing == []


def test_the_names_of_other_outboxes_are_all_there() -> None:
    others = {
        *("outbox_new_total", "outbox_done_total", "outbox_failed_total", "outbox_lag_seconds", "processing_inflight"),
        *("outbox_backlog", "outbox_failed", "outbox_dead", "outbox_publish_latency"),
    }
    assert others <= SAMPLES.keys() | RECORDED


def test_a_name_is_never_a_metric_and_recorded_too() -> None:
    assert not SAMPLES.keys() & RECORDED
