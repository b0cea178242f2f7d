"""Violations of invariants: all are counted, a few are kept as examples."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

EXAMPLES = 20


class Violation(NamedTuple):
    """One case. ``sentence`` names the kind of violation, ``subject`` the id or the key."""

    invariant: str
    sentence: str
    subject: str
    detail: str = ""


@dataclass(slots=True)
class Finding:
    """All violations of one kind."""

    invariant: str
    sentence: str
    count: int = 0
    examples: list[str] = field(default_factory=list)
    subjects: set[str] = field(default_factory=set)

    def add(self, violation: Violation) -> None:
        self.count += 1
        self.subjects.add(violation.subject)
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{violation.subject}: {violation.detail}" if violation.detail else violation.subject)


def collect(violations: Iterable[Violation]) -> list[Finding]:
    found: dict[tuple[str, str], Finding] = {}
    for violation in violations:
        kind = violation.invariant, violation.sentence
        if kind not in found:
            found[kind] = Finding(*kind)
        found[kind].add(violation)
    return list(found.values())
