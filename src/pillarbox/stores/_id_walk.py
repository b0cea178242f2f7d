"""Pruning along the ids, for stores without an index on the instant of publication: ids from uuid7 are in order of
time."""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from pillarbox.ids import uuid7_floor

_DAY: Final = 86_400.0
FIRST_ID, LAST_ID = UUID(int=0), UUID(int=2**128 - 1)


class IdWalk:
    """One step: the ids above ``start`` and below ``bound`` can be old enough. First come ids of events that are older
    than the limit. Then the walk skips ids that may be young, and goes on with the ids above, which users gave. ``now``
    is the database's.
    """

    def __init__(self, now: float, keep_seconds: float, after: UUID | None) -> None:
        old = uuid7_floor(now - keep_seconds)
        self.start = after or FIRST_ID
        self.bound = old if self.start < old else LAST_ID
        self._beyond = uuid7_floor(now + _DAY) if self.bound == old else None

    def next(self, ids: Sequence[UUID], limit: int) -> UUID | None:
        """The start of the next step, after one that found these ids; None: the walk is done."""
        return ids[-1] if len(ids) == limit else self._beyond
