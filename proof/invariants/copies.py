"""I10: each extra copy has a cause."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

from proof.facts import Facts
from proof.history import Fault
from proof.violation import Violation


@dataclass(slots=True)
class Copies:
    """Extra copies and their causes."""

    attributed: int = 0
    unattributed: int = 0
    causes: Counter[str] = field(default_factory=Counter)  # by kind of fault
    per_kill: Counter[tuple[float, str]] = field(default_factory=Counter)
    in_flight: Counter[tuple[float, str]] = field(default_factory=Counter)  # at each kill

    @property
    def most_per_kill(self) -> int:
        return max(self.per_kill.values(), default=0)


def count_copies(facts: Facts) -> tuple[Copies, list[Violation]]:
    """Each interrupted flight explains one extra copy of its event. A replay by an operator makes no extra copy."""
    found = Copies()
    unexplained = []
    causes: dict[str, list[Fault | str]] = {}
    for event_id, flights in facts.flights.interrupted.items():
        told = (facts.cause(flight) for flight in flights)
        causes[event_id] = [cause for cause in told if cause is not None]
        found.in_flight.update(_kill(cause) for cause in causes[event_id] if _is_kill(cause))
    for event_id, copies in facts.delivered.items():
        extra = copies - 1 - facts.replays(event_id)
        if extra <= 0 or event_id not in facts.witness:
            continue
        explained = [] if facts.exactly_once else causes.get(event_id, [])[:extra]
        found.attributed += len(explained)
        found.causes.update(cause if isinstance(cause, str) else cause.kind for cause in explained)
        found.per_kill.update(_kill(cause) for cause in explained if _is_kill(cause))
        if extra > len(explained):
            found.unattributed += extra - len(explained)
            flights = facts.flights.interrupted.get(event_id, [])
            ways = ", ".join(f"{flight.ending} in {flight.worker}" for flight in flights) or "never interrupted"
            what = f"{extra} extra, {len(explained)} explained; {ways}"
            unexplained.append(Violation("I10", "delivered more often than the faults explain", event_id, what))
    return found, unexplained


def _is_kill(cause: Fault | str) -> TypeGuard[Fault]:
    return isinstance(cause, Fault) and cause.kind == "kill"


def _kill(fault: Fault) -> tuple[float, str]:
    return fault.at, fault.worker or ""


def bounded_copies(facts: Facts) -> Iterator[Violation]:
    """I10: an event is delivered exactly once, unless a fault explains the copy. With exactly once no fault does.

    Such faults, between its publish and its settle: its worker was killed, paused or lost its lease, or the database or
    the broker could not be reached.
    """
    yield from count_copies(facts)[1]
