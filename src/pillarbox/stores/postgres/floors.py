"""The floor of a shard: nothing is pending below it, and no open transaction can commit below it. Reads start there.

Every settled event leaves a dead entry in the ready index until vacuum comes by, and a long snapshot keeps vacuum away.
A read from the beginning walks over all of them. A read may start higher only where no open transaction can still
commit a lower seq: else the next event of that key, committed a moment later, would be read first.

A transaction has its id before it takes a seq, because the column ``xid`` stands in front of ``seq``. So every
transaction that took a seq up to the value that one look saw has a lower id than the next look. Once the ``xmin`` of a
snapshot has reached that look's id, all of them have ended, and what they wrote can be seen. The ``xmax`` of a snapshot
would not do as a bound: it is above the highest id that has ended, and a running transaction may have a higher one.

A failed event without a key returns below the floor. A sweep, which is a read from the beginning about once a second,
finds it.
"""

from collections import deque
from collections.abc import Sequence

from pillarbox.store import Grant

_REFRESH_SECONDS = 0.25
_SWEEP_SECONDS = 1.0
_SWEEP_SHARE = 20  # a sweep takes at most a twentieth of the time
_MAX_BOUNDS = 1000


class Floors:
    """The floors of the shards that one store reads; pure, driven by what the store saw and when."""

    def __init__(self) -> None:
        self._looking = False
        self._looked_at = float("-inf")
        self._last = 0  # as the last look saw the sequence
        self._bounds: deque[tuple[int, int]] = deque()  # a value, and the id of the look after it
        self._safe = 0
        self._floors: dict[Grant, int] = {}
        self._safe_at_start: dict[Grant, int] = {}
        self._sweep_at: dict[Grant, float] = {}

    def look_due(self, now: float) -> bool:
        """Whether to look at the server now. One look at a time, so that the answers are in order."""
        if self._looking or now - self._looked_at < _REFRESH_SECONDS:
            return False
        self._looking = True
        return True

    def look_failed(self) -> None:
        self._looking = False

    def looked(self, now: float, last: int, xid: int, xmin: int) -> None:
        """Note the result of a look: the sequence's last value, the look's own transaction id and its snapshot's
        xmin."""
        self._looking, self._looked_at = False, now
        if len(self._bounds) == _MAX_BOUNDS:
            self._bounds.pop()
        self._bounds.append((self._last, xid))
        while self._bounds and self._bounds[0][1] <= xmin:
            self._safe = max(self._safe, self._bounds.popleft()[0])
        self._last = last

    def floor(self, grant: Grant) -> int:
        """The lowest seq at which something can be pending."""
        return self._floors.get(grant, 0)

    def start(self, grant: Grant, now: float) -> int:
        """The start of a read: the floor, or 0 when a sweep is due."""
        # A look that ends while this read runs says nothing about what this read can see.
        self._safe_at_start[grant] = self._safe
        return 0 if now >= self._sweep_at.get(grant, 0.0) else self.floor(grant)

    def done(self, grant: Grant, start: int, lowest: int | None, begun: float, ended: float) -> None:
        """Note that a read from ``start`` found ``lowest`` as its first pending seq, or nothing."""
        if grant not in self._safe_at_start:
            return  # forgotten while it was read
        safe = self._safe_at_start[grant] + 1
        self._floors[grant] = max(start, safe if lowest is None else min(lowest, safe))
        if start == 0:
            self._sweep_at[grant] = self.next_sweep(begun, ended)

    @staticmethod
    def next_sweep(begun: float, ended: float) -> float:
        return ended + max(_SWEEP_SECONDS, _SWEEP_SHARE * (ended - begun))

    def sweep(self, grant: Grant) -> None:
        """Forget this floor: something may be pending below it."""
        self._sweep_at.pop(grant, None)

    def sweep_all(self) -> None:
        """Forget all floors: something may be pending below any of them."""
        self._sweep_at.clear()

    def forget(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            for kept in (self._floors, self._safe_at_start, self._sweep_at):
                kept.pop(grant, None)
