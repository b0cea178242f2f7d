"""Checks a history against all invariants. Linear in the length of the history, no I/O."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from proof.facts import Facts
from proof.history import History
from proof.invariants import copies, dead, effects, metrics, order, ownership, requests, retention, service, sets
from proof.invariants.evidence import evidence
from proof.violation import Finding, Violation, collect


def _truthful(facts: Facts) -> Iterator[Violation]:
    yield from service.truthful_counters(facts)
    yield from metrics.truthful_metrics(facts)


INVARIANTS: Mapping[str, Callable[[Facts], Iterator[Violation]]] = {
    "evidence": evidence,
    "I1": sets.no_loss,
    "I2": sets.no_phantom,
    "I3": sets.integrity,
    "I4": sets.atomicity,
    "I5": order.order,
    "I6": order.replay_shape,
    "I7": ownership.exclusion,
    "I8": ownership.fencing,
    "I9": ownership.finality,
    "I10": copies.bounded_copies,
    "I11": dead.dead,
    "I12": effects.inbox,
    "I13": retention.retention,
    "I14": requests.idempotency_key,
    "I15": service.liveness,
    "I16": service.bounds,
    "I17": _truthful,
}


@dataclass(slots=True)
class Report:
    """The violations of a history; without any it passes."""

    facts: Facts
    findings: list[Finding]
    copies: copies.Copies
    recovery: service.Recovery

    @property
    def passed(self) -> bool:
        return not self.findings

    def count(self, *invariants: str, sentence: str | None = None) -> int:
        return sum(
            finding.count
            for finding in self.findings
            if finding.invariant in invariants and sentence in (None, finding.sentence)
        )

    def subjects(self, *invariants: str) -> set[str]:
        """The ids or keys that violate any of these invariants."""
        return {who for finding in self.findings if finding.invariant in invariants for who in finding.subjects}


def check(history: History) -> Report:
    facts = Facts(history)
    found = (violation for invariant in INVARIANTS.values() for violation in invariant(facts))
    return Report(facts, collect(found), copies.count_copies(facts)[0], service.recovery(facts))
