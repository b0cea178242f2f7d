"""The run card: the settings and the results of a run on half a screen."""

from collections import Counter
from typing import Any

from proof.checker import Report
from proof.invariants.effects import OTHER_THAN_ONE
from proof.invariants.requests import OTHER_BODY
from proof.invariants.sets import LOST

_ZEROES = ("lost", "phantom", "corrupted", "reordered_keys", "fencing_violations", "unattributed_copies")


def card(report: Report) -> dict[str, Any]:
    """The content of build/run-card.json. Durations are seconds, memory is in MB; null: not sampled."""
    history, faults, copies = report.facts.history, report.facts.faults, report.copies
    run = history.run
    kills = faults.count("kill")
    results = Counter(attempt.result for attempt in history.writers)
    after_healing = report.recovery.after_healing
    return {
        "seed": run.seed,
        "versions": run.versions,
        "seconds": run.seconds,
        "events": len(history.witness),
        "kills": kills,
        "lost": report.count("I1", sentence=LOST),
        "phantom": report.count("I2"),
        "corrupted": report.count("I3"),
        "reordered_keys": len(report.subjects("I5", "I6")),
        "fencing_violations": report.count("I7", "I8"),
        "unattributed_copies": copies.unattributed,
        "attributed_copies": copies.attributed,
        "max_copies_per_kill": copies.most_per_kill,
        "recovery_p50": round(report.recovery.quantile(0.5), 3),
        "recovery_p99": round(report.recovery.quantile(0.99), 3),
        "verdict": "pass" if report.passed else "fail",
        "commit": run.versions.get("commit"),
        "store": run.store,
        "broker": run.broker,
        "delivery": run.settings.get("delivery", "at-least-once"),
        "planted": run.planted,
        "deliveries": len(history.deliveries),
        "dead": len(history.final.dead),
        "effects": len(history.effects),
        "effects_other_than_one": report.count("I12", sentence=OTHER_THAN_ONE) if run.settings.get("inbox") else None,
        "requests": {
            "answers": len(history.replies),
            "effects": len(history.requests),
            "replays": sum(reply.is_replayed for reply in history.replies),
            "refused": sum(reply.status == OTHER_BODY for reply in history.replies),
        },
        "transactions": {
            "ok": results["ok"],
            "rolled_back": results["rolled_back"] + results["failed"],
            "unknown": results["unknown"],
        },
        "killed_at": dict(sorted(Counter(str(fault.point) for fault in faults.all if fault.kind == "kill").items())),
        "paused_at": dict(sorted(Counter(str(fault.point) for fault in faults.all if fault.kind == "stop").items())),
        "pauses": faults.count("stop"),
        "operators": faults.count("operator"),
        "clocks": faults.count("clock"),
        "writer_faults": faults.count("writer"),
        "restarts": faults.count("term"),
        "cuts": sum(fault.kind == "sessions" or fault.kind.startswith("proxy:") for fault in faults.all),
        "database_faults": faults.count("database", "failover"),
        "broker_faults": faults.count("broker"),
        "settled_in_recoveries": sum(len(trace.event_ids) for trace in history.traces if trace.kind == "recovered"),
        "refused_settles": sum(trace.kind == "refused" for trace in history.traces),
        "copies_by_cause": dict(copies.causes),
        "max_in_flight_at_kill": max(copies.in_flight.values(), default=0),
        "seconds_after_healing": None if after_healing is None else round(after_healing, 3),
        "peak_oldest_seconds": max((sample.oldest_seconds for sample in history.samples), default=None),
        "peak_memory_mb": max((sample.peak_mb for sample in history.samples), default=None),
        "peak_connections": max((sample.connections for sample in history.samples), default=None),
        # n independent kills without a failure: with 95 % confidence at most this share of kills fails.
        "failure_bound_per_kill": round(3 / kills, 6) if kills else None,
        "violations": [
            {
                "invariant": finding.invariant,
                "sentence": finding.sentence,
                "count": finding.count,
                "examples": finding.examples,
            }
            for finding in report.findings
        ],
    }


def text(card: dict[str, Any]) -> str:
    """The card as a table."""
    done, requests = card["transactions"], card["requests"]
    versions = ", ".join(f"{name} {version}" for name, version in card["versions"].items() if name != "commit")
    rows = [
        (
            "run",
            f"seed {card['seed']}, {card['store']} to {card['broker']} {card['delivery'].replace('-', ' ')}, "
            f"{card['seconds']:g} s",
        ),
        ("versions", f"{versions}; commit {card['commit'] or 'unknown'}"),
        ("transactions", f"{done['ok']} ok, {done['rolled_back']} rolled back, {done['unknown']} unknown"),
        ("events", f"{card['events']}, {card['deliveries']} deliveries, {card['dead']} dead"),
        (
            "requests",
            f"{requests['answers']} answers, {requests['effects']} effects, {requests['replays']} replays, "
            f"{requests['refused']} refused",
        ),
        (
            "faults",
            f"{card['kills']} kills, {card['pauses']} pauses, {card['restarts']} restarts, {card['cuts']} cuts, "
            f"{card['database_faults']} of the database, {card['broker_faults']} of the broker, "
            f"{card['writer_faults']} of writers, {card['operators']} operators, {card['clocks']} clocks",
        ),
        ("killed at", _counts(card["killed_at"])),
        ("paused at", _counts(card["paused_at"])),
        *((name.replace("_", " "), str(card[name])) for name in _ZEROES),
        ("effects other than one", _effects(card)),
        ("attributed copies", f"{card['attributed_copies']}{_causes(card['copies_by_cause'])}"),
        ("most per kill", f"{card['max_copies_per_kill']}, in flight at most {card['max_in_flight_at_kill']}"),
        ("refused settles", str(card["refused_settles"])),
        ("settled in recoveries", f"{card['settled_in_recoveries']} events"),
        (
            "recovery",
            f"p50 {card['recovery_p50']:.1f} s, p99 {card['recovery_p99']:.1f} s, "
            f"after healing {_number(card['seconds_after_healing'], 's')}",
        ),
        (
            "peaks",
            f"oldest {_number(card['peak_oldest_seconds'], 's')}, memory {_number(card['peak_memory_mb'], 'MB')}, "
            f"{_number(card['peak_connections'], 'connections')}",
        ),
    ]
    if card["planted"]:
        rows.insert(1, ("planted bug", card["planted"]))
    if card["kills"] and card["verdict"] == "pass":
        bound = (
            f"at most {card['failure_bound_per_kill']:.2%} of kills fail (95 %, from {card['kills']} without failure)"
        )
        rows.append(("honest bound", bound))
    rows.append(("verdict", card["verdict"]))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def violations(card: dict[str, Any], examples: int = 3) -> str:
    """The violations, each with its first examples."""
    lines = []
    for found in card["violations"]:
        lines.append(f"{found['invariant']}: {found['sentence']} ({found['count']})")
        lines += [f"    {example}" for example in found["examples"][:examples]]
    return "\n".join(lines)


def _effects(card: dict[str, Any]) -> str:
    if card["effects_other_than_one"] is None:
        return "no inbox"
    return f"{card['effects_other_than_one']} of {card['effects']}"


def _causes(causes: dict[str, int]) -> str:
    return f" ({_counts(causes)})" if causes else ""


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "nowhere"


def _number(value: float | None, unit: str) -> str:
    return (
        f"no {unit} known" if value is None else f"{value:.1f} {unit}" if unit != "connections" else f"{value} {unit}"
    )
