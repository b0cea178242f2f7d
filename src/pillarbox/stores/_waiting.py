"""Gauges and held keys from the rows of a store."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from pillarbox.event import Mode, Status
from pillarbox.store import Found, HoldMode, StreamGauges, StuckKey, WorkerStatus

WAITING_LIMIT: Final = 1000  # events of one key that are counted
_STATES: Final = frozenset(Status)
# The states that an index, or the part of one that is read, can have.
_HAS: Final = {
    **{status.value: (status,) for status in Status},
    "ready": (Status.PENDING,),
    "leased": (Status.PROCESSING,),
    "due": (Status.SCHEDULED,),
    "both": (Status.FAILED, Status.HELD),
}


def summary(
    stream: str,
    mode: Mode | None,
    destination: str | None,
    paused: bool,
    rows: Iterable[tuple[str, str, int, datetime | None]],
    workers: Sequence[WorkerStatus],
    now: datetime,
    limit: int,
) -> StreamGauges:
    """The gauges of a stream. rows: an index, a state (or a mode of held keys), a count, and since when one waits.

    An index of which ``limit`` entries were read may have more of each state that it can have."""
    counts: dict[Status, int] = {}
    keys: dict[HoldMode, int] = {}
    read: dict[str, int] = {}
    oldest: datetime | None = None
    for place, state, count, since in rows:
        if since is not None:
            oldest = since if oldest is None else min(oldest, since)
        if not count:
            continue
        if place == "keys":
            keys[HoldMode(state)] = count
            continue
        read[place] = read.get(place, 0) + count
        # Failed events are counted among those that are held, too.
        if state in _STATES and (place, state) != ("due", Status.FAILED):
            counts[Status(state)] = count
    full = {place for place, count in read.items() if count >= limit}
    if "both" in full and keys.get(HoldMode.RETRYING):
        # A long key fills the index. Each retrying key has a failed event.
        counts[Status.FAILED] = max(counts.get(Status.FAILED, 0), keys[HoldMode.RETRYING])
    return StreamGauges(
        stream=stream,
        mode=mode,
        destination=destination,
        paused=paused,
        counts=counts,
        at_least=frozenset(status for place in full for status in _HAS[place]),
        oldest_seconds=None if oldest is None else max(0.0, (now - oldest).total_seconds()),
        held_keys=keys,
        workers=sum(worker.live for worker in workers),
        open_circuits=sum(worker.live and worker.circuit_error is not None for worker in workers),
    )


def heads_of(
    held: Sequence[tuple[str, HoldMode, datetime | None, UUID | None, int]], found: Iterable[Found]
) -> list[StuckKey]:
    """Held keys with the errors of the events that they wait for. found: those events, dead letters too."""
    known = {each.event.id: each for each in found}
    keys = []
    for key, mode, due, head, waiting in held:
        event = None if head is None else known.get(head)
        error = None if event is None else event.last_error
        keys.append(StuckKey(key, mode, due, head, error, None if event is None else event.last_error_at, waiting))
    return keys
