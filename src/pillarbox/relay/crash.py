"""The rule about an event that kills its worker. Pure; docs/relay.md draws its states.

The store counts for each shard how many owners died while they owned it: its crashes. An owner of a shard with crashes
is cautious: it reads few events at once, and before it publishes them it notes the first one in the store as the
suspect. From the suspect's status the next owner knows whether the crash can be blamed on this shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self
from uuid import UUID

from pillarbox.event import Event, Status
from pillarbox.publisher import UNTRIED, Outcome, retry
from pillarbox.store import Grant

ERROR: Final = "its worker died while it published this event alone"
# The most events that an owner reads at once after 0, 1, 2, and 3 or more crashes.
_LIMITS: Final = (1000, 125, 15, 1)
_MOST: Final = len(_LIMITS) - 1


@dataclass(slots=True)
class CrashRule:
    """The crashes of one shard, and what its owner has to do about them.

    crashes: those that can be blamed on this shard.
    suspect: the event that is charged with the last crash when it is about to be published again.
    """

    crashes: int = 0
    suspect: UUID | None = None
    _settled: int = 0  # events since ``crashes`` was last lowered

    @staticmethod
    def has_evidence(grant: Grant) -> bool:
        """Whether the last owner was cautious. Only then does its suspect, or the lack of one, mean anything."""
        return grant.crashes > 1

    @classmethod
    def after_crash(cls, grant: Grant, status: Status | None) -> Self:
        """The rule for a new owner. ``status``: the suspect's; None: there is no such event. If the last owner's
        suspect is settled, or it had noted none, no event of this shard killed it.
        """
        if not cls.has_evidence(grant):
            return cls(grant.crashes)
        if status is None or status is Status.PUBLISHED or status is Status.DEAD:
            return cls(grant.crashes - 1)
        # Only an owner that published one by one died of its suspect; others noted the first of several events.
        return cls(grant.crashes, grant.suspect if grant.crashes > _MOST else None)

    @property
    def cautious(self) -> bool:
        """Whether the first event of each call is noted as the suspect before it is published."""
        return self.crashes > 0

    @property
    def one_by_one(self) -> bool:
        """Whether events are published one by one with no other turn beside them, so that a crash has one suspect."""
        return self.crashes >= _MOST

    def limit(self, size: int) -> int:
        """The most events to read at once; without crashes ``size``."""
        return min(size, _LIMITS[min(self.crashes, _MOST)]) if self.crashes else size

    def charge(self, events: Sequence[Event]) -> Sequence[Outcome]:
        """The outcomes of these events if the first one is charged with a crash. Empty: publish them."""
        if self.suspect is None or events[0].id != self.suspect:
            return ()
        self.suspect = None
        return [retry(ERROR), *[UNTRIED] * (len(events) - 1)]

    def settled(self, published: int) -> bool:
        """Count published events. True: ``crashes`` is lower now, and the store has to be told.

        If an owner that read n events at once was killed by one, that event is among the next n. Once n events are
        published, the danger is over and more are read at once again.
        """
        if not self.crashes:
            return False
        before = self.crashes
        self._settled += published
        while self.crashes and self._settled >= _LIMITS[min(self.crashes, _MOST) - 1]:
            self._settled -= _LIMITS[min(self.crashes, _MOST) - 1]
            self.crashes = min(self.crashes, _MOST) - 1
        return self.crashes < before
