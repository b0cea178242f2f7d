"""I10: each extra copy has a cause."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from proof.facts import Facts
from proof.history import Fault
from proof.violation import Violation


@dataclass(slots=True)
class Copies:
    """Extra copies, and whose they are."""

    attributed: int = 0
    unattributed: int = 0
    causes: Counter[str] = field(default_factory=Counter)  # kind of fault -> copies
    per_kill: Counter[tuple[float, str]] = field(default_factory=Counter)
    in_flight: Counter[tuple[float, str]] = field(default_factory=Counter)  # at each kill

    @property
    def most_per_kill(self) -> int:
        return max(self.per_kill.values(), default=0)


def count_copies(facts: Facts) -> Copies:
    """One interrupted flight explains one extra copy of its event; what an operator replays is no extra copy."""
    found = Copies()
    for flights in facts.flights.interrupted.values():
        for flight in flights:
            cause = facts.flights.cause(flight, facts.faults)
            if isinstance(cause, Fault) and cause.kind == "kill":
                found.in_flight[_kill(cause)] += 1
    for event_id, extra in _extra(facts):
        explained = 0
        for flight in facts.flights.interrupted.get(event_id, ()):
            cause = facts.flights.cause(flight, facts.faults) if explained < extra else None
            if cause is None:
                continue
            explained += 1
            found.causes[cause if isinstance(cause, str) else cause.kind] += 1
            if isinstance(cause, Fault) and cause.kind == "kill":
                found.per_kill[_kill(cause)] += 1
        found.attributed += explained
        found.unattributed += extra - explained
    return found


def _kill(fault: Fault) -> tuple[float, str]:
    return fault.at, fault.worker or ""


def _extra(facts: Facts) -> Iterator[tuple[str, int]]:
    for event_id, copies in facts.delivered.items():
        extra = copies - 1 - facts.replays(event_id)
        if extra > 0 and event_id in facts.witness:
            yield event_id, extra


def bounded_copies(facts: Facts) -> Iterator[Violation]:
    """I10: an event is delivered twice only if a worker was killed, paused or lost its lease between its publish and
    its settle, or the database or the broker was away; without such faults exactly once."""
    for event_id, extra in _extra(facts):
        flights = facts.flights.interrupted.get(event_id, ())
        causes = [cause for flight in flights if (cause := facts.flights.cause(flight, facts.faults)) is not None]
        if extra > len(causes):
            ways = ", ".join(f"{flight.ending} in {flight.worker}" for flight in flights) or "never interrupted"
            what = f"{extra} extra, {len(causes)} explained; {ways}"
            yield Violation("I10", "delivered more often than the faults explain", event_id, what)
