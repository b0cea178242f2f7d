"""I12: the effects of handlers."""

from collections.abc import Iterator

from proof.facts import Facts
from proof.violation import Violation

OTHER_THAN_ONE = "delivered, and its effect is not there exactly once"


def inbox(facts: Facts) -> Iterator[Violation]:
    """I12: a delivered event has exactly one effect, and no other event has any: not a dead one, not one whose handler
    failed.

    Settings: inbox (whether the handlers apply events through one).
    """
    if not facts.settings.get("inbox"):
        return
    for event_id in facts.delivered:
        effects = facts.effects[event_id]
        if effects != 1:
            yield Violation("I12", OTHER_THAN_ONE, event_id, f"{effects} effects")
    for event_id, effects in facts.effects.items():
        if event_id not in facts.delivered:
            yield Violation("I12", "its effect is there, but it was not delivered", event_id, f"{effects} effects")
