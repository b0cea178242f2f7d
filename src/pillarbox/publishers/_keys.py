"""Which events of a batch must follow each other, and which may go side by side."""

from collections.abc import Sequence

from pillarbox.event import Event


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
