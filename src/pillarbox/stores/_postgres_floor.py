"""Where a read of a shard may start: below the floor nothing is pending, and nothing ever will be by a commit.

Every settled event leaves a dead entry in the ready index until vacuum comes by, and a long snapshot keeps vacuum away;
a read from the beginning walks over all of them. A read may start higher only where no open transaction can still
commit a lower seq: else the next event of that key, committed a moment later, would be read first and overtake it.

A seq is safe when every transaction that may have taken it has ended: the sequence stood at ``last`` before a snapshot
whose ``xmax`` is not above the ``xmin`` of a later one. Operators' replays and promoted events do come back below the
floor; a sweep, a read from the beginning about once a second, finds those.
"""

from collections import deque

from pillarbox.store import Grant

# A transaction takes its seq a moment before its transaction id; a snapshot in between does not know of it yet.
_SETTLING_SECONDS = 1.0
_REFRESH_SECONDS = 0.25
_SWEEP_SECONDS = 1.0
_SWEEP_SHARE = 20  # a sweep takes at most a twentieth of the time


class Floors:
    """The floors of the shards that one store reads; pure, driven by what the store saw and when."""

    def __init__(self) -> None:
        self._looking = False
        self._looked_at = float("-inf")
        self._values: deque[tuple[float, int]] = deque()  # when the sequence was read, and its value
        self._bounds: deque[tuple[int, int]] = deque()  # a value, and the xmax of a snapshot taken after it
        self._safe = 0
        self._floors: dict[Grant, int] = {}
        self._safe_at_start: dict[Grant, int] = {}
        self._sweep_at: dict[Grant, float] = {}

    def look_due(self, now: float) -> bool:
        """Whether to look at the server now; one look at a time, so that what they saw is in order."""
        if self._looking or now - self._looked_at < _REFRESH_SECONDS:
            return False
        self._looking = True
        return True

    def look_failed(self) -> None:
        self._looking = False

    def looked(self, begun: float, ended: float, last: int, xmin: int, xmax: int) -> None:
        """The sequence's last value and the bounds of the snapshot of a statement that ran between these instants."""
        self._looking, self._looked_at = False, ended
        while self._values and begun - self._values[0][0] >= _SETTLING_SECONDS:
            self._bounds.append((self._values.popleft()[1], xmax))
        while self._bounds and self._bounds[0][1] <= xmin:
            self._safe = max(self._safe, self._bounds.popleft()[0])
        self._values.append((ended, last))

    def floor(self, grant: Grant) -> int:
        """The lowest seq at which something can be pending."""
        return self._floors.get(grant, 0)

    def start(self, grant: Grant, now: float) -> int:
        """Where a read begins: at the floor, or at 0 when a sweep is due."""
        # What another read learns meanwhile says nothing about what this one can see.
        self._safe_at_start[grant] = self._safe
        return 0 if now >= self._sweep_at.get(grant, 0.0) else self.floor(grant)

    def done(self, grant: Grant, start: int, lowest: int | None, begun: float, ended: float) -> None:
        """A read from ``start`` found ``lowest`` as its first pending seq, or nothing."""
        safe = self._safe_at_start[grant] + 1
        self._floors[grant] = max(start, safe if lowest is None else min(lowest, safe))
        if start == 0:
            self._sweep_at[grant] = self.next_sweep(begun, ended)

    @staticmethod
    def next_sweep(begun: float, ended: float) -> float:
        return ended + max(_SWEEP_SECONDS, _SWEEP_SHARE * (ended - begun))

    def sweep(self, grant: Grant) -> None:
        """Something may stand below this floor."""
        self._sweep_at.pop(grant, None)

    def sweep_all(self) -> None:
        """Something may stand below any floor."""
        self._sweep_at.clear()

    def forget(self, grants: list[Grant]) -> None:
        for grant in grants:
            for kept in (self._floors, self._safe_at_start, self._sweep_at):
                kept.pop(grant, None)
