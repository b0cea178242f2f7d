"""What a failed assertion about a run shows."""

from proof import card
from proof.checker import Report


def verdict(report: Report) -> str:
    """The card with the seed, and what is wrong."""
    found = card.card(report)
    return f"\n{card.text(found)}\n\n{card.violations(found)}"
