"""The status of consumers, from what their processes tell and from their dead letters."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from pillarbox.store import Consumers, ConsumerStatus

T = TypeVar("T", int, float)


class ConsumerRow(NamedTuple):
    """One consumer, as an operator sees it. Numbers are of its live processes; None: none of them knows."""

    consumer: str
    source: str | None
    lag_events: int | None
    lag_seconds: float | None  # of the process that is most behind
    lanes: int
    paused_lanes: int
    held_keys: int
    dead: int
    workers: Sequence[ConsumerStatus]  # the live ones; if there is none, the one that was seen last

    @property
    def live_workers(self) -> int:
        return sum(worker.live for worker in self.workers)


async def consumer_status(store: Consumers) -> list[ConsumerRow]:
    """Every consumer that has dead letters, or a process that was seen within a day, by name."""
    seen: dict[str, list[ConsumerStatus]] = {}
    for worker in await store.consumers():
        seen.setdefault(worker.consumer, []).append(worker)
    dead = await store.dead_consumers()
    return [_row(name, seen.get(name, ()), dead.get(name, 0)) for name in sorted({*seen, *dead})]


def _row(name: str, seen: Sequence[ConsumerStatus], dead: int) -> ConsumerRow:
    live = [worker for worker in seen if worker.live]
    shown = live or sorted(seen, key=lambda worker: worker.seen_seconds)[:1]
    reports = [worker.report for worker in live]
    events = _known(report.lag_events for report in reports)
    seconds = _known(report.lag_seconds for report in reports)
    return ConsumerRow(
        name,
        shown[0].report.source if shown else None,
        sum(events) if events else None,
        max(seconds) if seconds else None,
        sum(report.lanes for report in reports),
        sum(report.paused_lanes for report in reports),
        sum(report.held_keys for report in reports),
        dead,
        shown,
    )


def _known(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]
