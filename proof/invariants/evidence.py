"""Checks that the history is complete: nothing is proved by records that are missing."""

from collections.abc import Iterator

from proof.facts import Facts
from proof.violation import Violation

_TRACED = ("read_begin", "read", "publish", "published", "settle", "settled")


def evidence(facts: Facts) -> Iterator[Violation]:
    """Every part of the history was recorded.

    The setting ``unrecorded`` names parts that a run leaves out on purpose: writers, changes, leases, tokens, traces,
    samples.
    """
    history = facts.history
    on_purpose = set(facts.settings.get("unrecorded", ()))
    if not history.witness:
        yield Violation("evidence", "nothing was committed, so nothing is proved", "witness")
        return
    kinds = {change.kind for change in history.changes}
    traced = {trace.kind for trace in history.traces}
    ordered = any(line.stream not in facts.queues for line in history.witness)
    lacking = {
        "writers": not history.writers,
        "changes": "event" not in kinds,
        "leases": ordered and "lease" not in kinds,
        "tokens": not any(change.token is not None for change in history.changes if change.kind == "event"),
        "traces": not traced.issuperset(_TRACED),
        "samples": not history.samples,
    }
    for part, is_missing in lacking.items():
        if is_missing and part not in on_purpose:
            yield Violation("evidence", "a part of the history was not recorded", part)
