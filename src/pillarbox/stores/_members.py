"""The workers of a stream from the rows of a store."""

from collections.abc import Iterable
from datetime import datetime

from pillarbox.store import WorkerStatus


def members(
    now: datetime,
    workers: Iterable[tuple[str, str, datetime, datetime, str | None, datetime | None, str | None]],
    owners: Iterable[tuple[str, str, int, datetime]],
) -> dict[str, list[WorkerStatus]]:
    """The workers of each stream by name: those that are registered, and those that still own shards.

    workers: stream, name, when it was seen last, until when that counts, the error of its open circuit, since when that
    is open, and its version.
    owners: stream, name, the number of its shards, and when the last of them comes free."""
    owned = {(stream, name): (shards, until) for stream, name, shards, until in owners if until > now}
    found: dict[str, list[WorkerStatus]] = {}
    for stream, name, seen_at, seen_until, error, circuit_at, version in workers:
        shards, until = owned.pop((stream, name), (0, seen_until))
        if max(seen_until, until) <= now:
            continue
        # It renews its registration every third of this time. One that missed it has died or cannot get through.
        is_live = now - seen_at < (seen_until - seen_at) / 2
        free = _seconds(now, max(seen_until, until))
        waits = None if circuit_at is None else _seconds(circuit_at, now)
        worker = WorkerStatus(name, is_live, _seconds(seen_at, now), shards, free, error, waits, version)
        found.setdefault(stream, []).append(worker)
    for (stream, name), (shards, until) in owned.items():
        found.setdefault(stream, []).append(WorkerStatus(name, False, None, shards, _seconds(now, until)))
    return {stream: sorted(each, key=lambda worker: worker.name) for stream, each in found.items()}


def _seconds(earlier: datetime, later: datetime) -> float:
    return max(0.0, (later - earlier).total_seconds())
