"""The run card of consumers: the settings and the results of a run on half a screen."""

from collections import Counter
from typing import Any

from proof.consumers.checker import OTHER_THAN_ONE, SKIPPED, Report

_ZEROES = ("skipped", "effects_other_than_one", "reordered_keys", "dead_by_mistake", "wrong_inbox_rows")


def card(report: Report) -> dict[str, Any]:
    """The content of the JSON file."""
    history, run = report.history, report.history.run
    faults = Counter(fault.kind for fault in history.faults)
    kills = faults["kill"]
    effects = report.count("I12", OTHER_THAN_ONE)
    return {
        "seed": run.seed,
        "versions": run.versions,
        "seconds": run.seconds,
        "broker": run.broker,
        "store": run.store,
        "planted": run.planted,
        "consumers": run.consumers,
        "partitions": run.partitions,
        "messages": len(history.messages),
        "events": len({message.event_id for message in history.messages}),
        "effects": len(history.effects),
        "dead": len(history.letters),
        "kills": kills,
        "faults": dict(sorted(faults.items())),
        "assignments": run.assignments,
        "skipped": report.count("I1", SKIPPED),
        "effects_other_than_one": effects,
        "reordered_keys": len({who for each in report.findings if each.invariant == "I5" for who in each.subjects}),
        "dead_by_mistake": report.count("I11"),
        "wrong_inbox_rows": report.count("I12") - effects,
        "seconds_after_healing": None if run.rested is None else round(run.rested - run.healed, 1),
        "failure_bound_per_kill": 3 / kills if kills else None,
        "verdict": "pass" if report.passed else "fail",
        "violations": [
            {
                "invariant": each.invariant,
                "sentence": each.sentence,
                "count": each.count,
                "examples": each.examples,
            }
            for each in report.findings
        ],
    }


def text(card: dict[str, Any]) -> str:
    """The card as a table."""
    versions = ", ".join(f"{name} {version}" for name, version in card["versions"].items() if name != "commit")
    places = "one queue" if card["partitions"] == 1 else f"{card['partitions']} partitions"
    after = card["seconds_after_healing"]
    rows = [
        ("run", f"seed {card['seed']}, {card['broker']} to {card['store']}, {card['seconds']:g} s"),
        ("versions", f"{versions}; commit {card['versions'].get('commit', 'unknown')}"),
        ("consumers", f"{card['consumers']} on {places}"),
        ("events", f"{card['events']} in {card['messages']} messages, {card['effects']} effects, {card['dead']} dead"),
        ("faults", ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in card["faults"].items()) or "none"),
        ("rebalances", f"consumers got partitions {card['assignments']} times"),
        *((name.replace("_", " "), str(card[name])) for name in _ZEROES),
        ("all committed", "never" if after is None else f"{after:.1f} s after the last fault"),
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
