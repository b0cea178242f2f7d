"""I13: pruning."""

from collections.abc import Iterator

from proof.facts import Facts
from proof.violation import Violation

# The row has the instant of the transaction's start, the log that of its end. A frozen database lies between them.
_SHARE = 0.5


def retention(facts: Facts) -> Iterator[Violation]:
    """I13: a pruned event was delivered, and had been published for as long as it is kept.

    Settings: keep_seconds (of published events).
    """
    keep = float(facts.settings.get("keep_seconds", 0.0))
    published: dict[str, float] = {}
    for change in facts.changes:
        if change.kind != "event" or change.event_id is None:
            continue
        if change.new == "published":
            published[change.event_id] = change.at
        elif change.old == "published" and change.new is None:
            age = change.at - published.get(change.event_id, float("inf"))
            if change.event_id not in facts.delivered:
                yield Violation("I13", "pruned, but never delivered", change.event_id)
            elif age < keep * _SHARE:
                what = f"after {age:.3f} s, kept are {keep:g} s"
                yield Violation("I13", "pruned before its time", change.event_id, what)
