"""The rule about an event that kills its worker. Pure; docs/relay.md draws its states.

The store counts for each shard how many owners died while they owned it: its crashes. An owner of a shard with crashes
is cautious: it reads few events at once, and before it publishes them it notes the first one in the store as the
suspect. From the suspect's status the next owner knows whether the crash can be blamed on this shard.

A suspect that was the only event of its shard in a crash is published alone, after other events have passed. Only a
worker that dies then is evidence against it. A relay that is killed for another reason kills no event by that.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self
from uuid import UUID

from pillarbox.event import Event, Status
from pillarbox.publisher import UNTRIED, Outcome, rejected
from pillarbox.store import CRASHES_ALONE, Grant

ERROR: Final = (
    f"its worker died {CRASHES_ALONE} times in a row while it published this event alone; it may have been delivered"
)
# The most events that an owner reads at once after 0, 1, 2, and 3 or more crashes.
_LIMITS: Final = (1000, 125, 15, 1)
_MOST: Final = len(_LIMITS) - 1
# So many events pass before a suspect is published alone. A random number: something that kills relays after a fixed
# number of events must not hit the suspect each time.
_ENOUGH: Final = (1, 100)
# A worker that has nothing else to do waits for so long, for the same reason.
_CALM_SECONDS: Final = (0.5, 2.0)
# If nothing has passed in so many crashes for each suspect that waits, they are to blame.
_HOPELESS: Final = 4


def _is_settled(status: Status | None) -> bool:
    return status is None or status is Status.PUBLISHED or status is Status.DEAD


@dataclass(slots=True)
class CrashRule:
    """The crashes of one shard, and what its owner has to do about them.

    crashes: those that can be blamed on this shard.
    suspect: the event that has to be published alone. While there is one, nothing else of the shard is published.
    alone: owners in a row that died while they published the suspect alone.
    """

    crashes: int = 0
    suspect: UUID | None = None
    alone: int = 0
    counts: bool = False  # whether a crash is evidence against the suspect if it is published now
    _settled: int = 0  # events since ``crashes`` was last lowered

    @staticmethod
    def has_evidence(grant: Grant) -> bool:
        """Whether the owner that died was cautious. Only then does its suspect, or the lack of one, mean anything."""
        return grant.crashes > 1

    @staticmethod
    def may_be_dead_of(grant: Grant, status: Status | None) -> bool:
        """Whether the last owner was publishing its suspect, as the only event of the shard, when it died."""
        return grant.alone > 0 and not _is_settled(status)

    @classmethod
    def after_crash(cls, grant: Grant, status: Status | None, *, explained: bool = False) -> Self:
        """The rule for a new owner. If the last owner's suspect is settled, or it had noted none, no event of this
        shard killed it.

        status: the suspect's; None: there is no such event.
        explained: it was publishing the suspect of another shard when it died.
        """
        if not cls.has_evidence(grant):
            return cls(grant.crashes)
        if _is_settled(status):
            return cls(grant.crashes - 1)
        # With more events at once, the last owner noted the first of several.
        if grant.crashes <= _MOST:
            return cls(grant.crashes)
        # An owner that died while all suspects waited died of something else: that speaks for them.
        waited = grant.alone < 0 and not explained
        return cls(grant.crashes, grant.suspect, 0 if waited else max(0, abs(grant.alone) - 1))

    @property
    def cautious(self) -> bool:
        """Whether the first event of each call is noted as the suspect before it is published."""
        return self.crashes > 0

    @property
    def waits(self) -> bool:
        """Whether the suspect waits for its time to be published alone."""
        return self.suspect is not None and self.alone < CRASHES_ALONE

    def limit(self, size: int) -> int:
        """The most events to read at once; without crashes ``size``."""
        return min(size, _LIMITS[min(self.crashes, _MOST)]) if self.crashes else size

    def charge(self, events: Sequence[Event]) -> Sequence[Outcome]:
        """The outcomes of these events if the first one has killed its workers. Empty: publish them."""
        if self.waits or self.suspect is None or events[0].id != self.suspect:
            return ()
        self.forget()
        return [rejected(ERROR), *[UNTRIED] * (len(events) - 1)]

    def note(self, first: UUID) -> int | None:
        """The number that the store notes with the first of the events that are about to be published. None: it keeps
        the note that it has.

        0: the event is no suspect yet. Above 0: one more than the crashes of the suspect alone, this one included.
        """
        if self.suspect is None:
            return 0
        return 1 + self.alone + self.counts if first == self.suspect else None

    @property
    def waiting_note(self) -> int:
        """The number that the store notes while the suspect waits: below 0."""
        return -1 - self.alone if self.suspect is not None else 0

    def forget(self) -> None:
        """There is no suspect any more: it has ended, or is not the next event."""
        self.suspect, self.alone, self.counts = None, 0, False

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


@dataclass(slots=True)
class Calm:
    """Whether this worker has shown that it lives, so that its death is evidence. One for each worker of a stream."""

    begun: float  # by the clock of the caller
    passed: int = 0  # events that were published
    enough: int = field(default_factory=lambda: random.randint(*_ENOUGH))
    seconds: float = field(default_factory=lambda: random.uniform(*_CALM_SECONDS))

    def allows(self, now: float, *, busy: bool) -> bool:
        """Whether a suspect may be published alone. busy: there are other events to publish."""
        if busy:
            return self.passed >= self.enough
        return self.passed > 0 or now - self.begun >= self.seconds

    def choose(self, waiting: Sequence[CrashRule], now: float, *, busy: bool) -> CrashRule | None:
        """The shard whose suspect is published now, and whether a crash counts then. None: later.

        If only suspects are left and nothing has passed, the least suspicious one goes, without evidence against it.
        """
        if not waiting:
            return None
        chosen = max(waiting, key=lambda rule: rule.alone)
        if busy or self.passed or len(waiting) == 1:
            if not self.allows(now, busy=busy):
                return None
            chosen.counts = True
            return chosen
        chosen.counts = chosen.crashes > _MOST + _HOPELESS * len(waiting)
        if not chosen.counts:
            least = min(rule.alone for rule in waiting)
            chosen = random.choice([rule for rule in waiting if rule.alone == least])
        return chosen
