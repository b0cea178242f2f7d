"""Which events of a batch must follow each other, and which may go side by side."""

from collections.abc import Iterator, Sequence

from pillarbox.event import Event
from pillarbox.publisher import Outcome, Result


def runs_by_key(events: Sequence[Event]) -> list[list[int]]:
    """The positions of the events: those of one key together, in order; without a key each alone."""
    runs: list[list[int]] = []
    by_key: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        run = None if event.key is None else by_key.get(event.key)
        if run is None:
            run = []
            runs.append(run)
            if event.key is not None:
                by_key[event.key] = run
        run.append(index)
    return runs


class Lane:
    """Takes keys from those that are left of a call, and their events one after the other."""

    def __init__(self, runs: Iterator[list[int]], events: Sequence[Event], outcomes: list[Outcome]) -> None:
        self._runs = runs
        self._events = events
        self._outcomes = outcomes
        self._run: list[int] = []
        self._place = 0

    @property
    def event(self) -> Event | None:
        """The one that is to be delivered now; None: no key is left."""
        if self._place == len(self._run):
            self._run, self._place = next(self._runs, []), 0
            if not self._run:
                return None
        return self._events[self._run[self._place]]

    def told(self, outcome: Outcome) -> None:
        """What became of it. A failure holds back the rest of its key."""
        self._outcomes[self._run[self._place]] = outcome
        self._place = self._place + 1 if outcome.result is Result.PUBLISHED else len(self._run)
