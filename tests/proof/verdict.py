"""The message of a failed assertion about a run."""

from proof import card
from proof.checker import Report


def verdict(report: Report) -> str:
    """The card of the run, with its seed and its violations."""
    found = card.card(report)
    return f"\n{card.text(found)}\n\n{card.violations(found)}"
