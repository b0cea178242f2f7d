"""Finds the faults of an instant, of a time span or of a worker."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from proof.history import Fault

# These explain no extra copy. A wrong clock of a relay is among them: instants are compared by the database's clock or
# by the monotonic clock.
HARMLESS = frozenset({"term", "start", "operator", "migration", "clock", "writer"})
OF_THE_BROKER = frozenset({"broker"})


def healed_at(fault: Fault) -> float:
    return max(fault.at, fault.until)


def covers_everybody(fault: Fault) -> bool:
    return fault.kind not in HARMLESS and fault.kind not in ("kill", "stop")


class Windows:
    """Time spans in which something was broken. A question takes O(log n)."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._faults = sorted(faults, key=lambda fault: fault.at)
        self._begun = [fault.at for fault in self._faults]
        self._longest: list[Fault] = []  # by place: the fault up to here that ended last
        for fault in self._faults:
            last = self._longest[-1] if self._longest else fault
            self._longest.append(fault if healed_at(fault) >= healed_at(last) else last)

    def overlapping(self, begun: float, ended: float) -> Fault | None:
        """A fault that overlaps this time span."""
        place = bisect_right(self._begun, ended)
        if place and healed_at(self._longest[place - 1]) >= begun:
            return self._longest[place - 1]
        return None

    def first_from(self, begun: float, before: float) -> Fault | None:
        """The first fault that began at ``begun`` or later, and before ``before``."""
        place = bisect_right(self._begun, begun)
        while place and self._begun[place - 1] >= begun:
            place -= 1
        if place < len(self._begun) and self._begun[place] < before:
            return self._faults[place]
        return None


_NEVER = Windows(())


class Faults:
    """The faults of a run, by whom they hit."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.all = faults
        # In a clean run no extra copy is allowed.
        self.clean = all(fault.kind in HARMLESS for fault in faults)
        self.everybody = Windows(fault for fault in faults if covers_everybody(fault) and fault.worker is None)
        self.broker = Windows(fault for fault in faults if fault.kind in OF_THE_BROKER)
        groups: dict[tuple[str, str], list[Fault]] = defaultdict(list)
        for fault in faults:
            if fault.worker is not None:
                group = "hit" if covers_everybody(fault) else fault.kind
                groups[group, fault.worker].append(fault)
        self._of_worker = {group: Windows(members) for group, members in groups.items()}

    def of(self, group: str, worker: str) -> Windows:
        """Faults of one worker: kill, stop, or "hit" (a fault of its own network)."""
        return self._of_worker.get((group, worker), _NEVER)

    def count(self, *kinds: str) -> int:
        return sum(fault.kind in kinds for fault in self.all)
