"""Pruning along the ids, where no index has the instant of publication: ids of our own making are in order of time."""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from pillarbox.ids import uuid7_floor

_DAY: Final = 86_400.0
FIRST_ID, LAST_ID = UUID(int=0), UUID(int=2**128 - 1)


class IdWalk:
    """One step: the ids above ``start`` and below ``bound`` can be old enough.

    First what was made before the oldest that is kept; then, past what may be young, the ids that users gave, which
    may stand anywhere above. ``now`` is the database's.
    """

    def __init__(self, now: float, keep_seconds: float, after: UUID | None) -> None:
        old = uuid7_floor(now - keep_seconds)
        self.start = after or FIRST_ID
        self.bound = old if self.start < old else LAST_ID
        self._beyond = uuid7_floor(now + _DAY) if self.bound == old else None

    def next(self, ids: Sequence[UUID], limit: int) -> UUID | None:
        """Where the next step starts, after one that found these; None: it is through."""
        return ids[-1] if len(ids) == limit else self._beyond
