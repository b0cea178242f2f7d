"""The bookkeeping of one ``publish`` call that sends its events in waves: keys that wait, outcomes. Pure."""

from collections.abc import Sequence

from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome


class Call:
    """The events of one call of ``publish``, and their outcomes."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.outcomes: list[Outcome] = [UNTRIED] * len(events)
        self.any_confirmed = False
        # The first event of a key that was not published: nothing later of the key may be sent in this call.
        self.stops: dict[str, int] = {}

    def confirm(self, index: int) -> None:
        self.any_confirmed = True
        self.outcomes[index] = PUBLISHED

    def record(self, index: int, outcome: Outcome) -> None:
        """Record a failure. The first one of a key counts; later events of the key stay untried."""
        key = self.events[index].key
        if key is not None:
            stop = self.stops.get(key)
            if stop is not None and stop < index:
                return
            if stop is not None:
                self.outcomes[stop] = UNTRIED
            self.stops[key] = index
        self.outcomes[index] = outcome

    def is_behind_a_stop(self, index: int) -> bool:
        key = self.events[index].key
        return key is not None and self.stops.get(key, index) < index


class Runs:
    """Decides which events of a key share a wave: those up to a change of topic; strict: only one."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._topic: dict[str, str] = {}
        self._waiting: set[str] = set()

    def must_wait(self, key: str | None, topic: str) -> bool:
        if key is None:
            return False
        if key in self._waiting:
            return True
        # Two topics may confirm in any order: the second waits until the first has.
        if key in self._topic and (self._strict or self._topic[key] != topic):
            self._waiting.add(key)
            return True
        self._topic[key] = topic
        return False
