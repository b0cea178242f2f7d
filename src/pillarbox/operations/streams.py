"""The status of streams, and pausing and resuming them."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from pillarbox.event import Mode, Status
from pillarbox.hints import hint
from pillarbox.operations.desk import Desk, NotFound
from pillarbox.store import Gauges, HoldMode, StreamGauges, WorkerStatus

WAITING: Final = (Status.PENDING, Status.PROCESSING, Status.FAILED, Status.HELD)


class PlannedStream(NamedTuple):
    """A stream in the settings of a relay that may not have served it yet."""

    mode: Mode
    destination: str | None = None


class StreamRow(NamedTuple):
    """One stream, as an operator sees it."""

    stream: str
    mode: Mode | None  # none: no relay has served it, and no plan has it
    destination: str | None
    paused: bool
    workers: Sequence[WorkerStatus]  # by name; not all are live
    waiting: int  # neither published nor dead, and not scheduled for later
    oldest_seconds: float | None  # the age of the oldest waiting event
    counts: Mapping[Status, int]  # of every status but published
    at_least: Collection[Status] = ()  # of which there may be more
    held_keys: Mapping[HoldMode, int] = MappingProxyType({})

    @property
    def may_be_more(self) -> bool:
        """Whether more events may wait than ``waiting`` says."""
        return any(each in self.at_least for each in WAITING)

    @property
    def live_workers(self) -> int:
        return sum(worker.live for worker in self.workers)

    @property
    def is_unserved(self) -> bool:
        """Whether events wait and no relay serves the stream."""
        return self.waiting > 0 and self.live_workers == 0

    @property
    def reasons(self) -> list[str]:
        """Why events wait, in sentences. Empty: none wait, or only because more come than are published."""
        if not self.waiting:
            return []
        found = []
        if self.paused:
            found.append(f"it is paused; let it go on with `pillarbox streams resume {self.stream}`")
        if self.is_unserved:
            # A relay does not count as a worker before it has reached its destination for the first time.
            found.append(
                "no relay serves it; start one with `pillarbox relay`, or see in the log of one that runs why it does "
                "not reach its destination"
            )
        found += [_circuit(worker) for worker in self.workers if worker.live and worker.circuit_error is not None]
        found += [_absence(worker) for worker in self.workers if not worker.live]
        if self.held_keys:
            modes = ", ".join(f"{self.held_keys[mode]:,} {mode}" for mode in HoldMode if mode in self.held_keys)
            found.append(f"keys are held behind an event that failed or died: {modes}")
        return found


def _circuit(worker: WorkerStatus) -> str:
    """Why a worker waits for its destination."""
    return (
        f"worker {worker.name} waits for the destination since {worker.circuit_seconds:.0f} s: {worker.circuit_error}"
    )


def _absence(worker: WorkerStatus) -> str:
    """What an operator has to know of a worker that is not live."""
    since = "has left" if worker.seen_seconds is None else f"was not seen for {worker.seen_seconds:.0f} s"
    owned = "its events come" if not worker.shards else f"its {worker.shards} shards come"
    return f"worker {worker.name} {since}; {owned} free in {worker.free_seconds:.0f} s"


async def status(
    store: Gauges, plans: Mapping[str, PlannedStream] = MappingProxyType({}), limit: int = 10_000
) -> list[StreamRow]:
    """Every stream of the outbox, and those plans that have a destination, by name.

    A plan counts for a stream that no relay has served yet. Counts end at ``limit``, so that the question stays cheap.
    """
    workers = await store.workers()
    known = {each.stream: each for each in await store.gauges(limit)}
    planned = {name for name, plan in plans.items() if plan.destination is not None}
    return [
        _row(known.get(name) or _nothing(name), plans.get(name), workers.get(name, ()))
        for name in sorted({*known, *planned})
    ]


def _nothing(stream: str) -> StreamGauges:
    return StreamGauges(stream, None, None, False, {}, (), None, {}, 0, 0)


def _row(found: StreamGauges, plan: PlannedStream | None, workers: Sequence[WorkerStatus]) -> StreamRow:
    mode, destination = plan if found.mode is None and plan is not None else (found.mode, found.destination)
    return StreamRow(
        stream=found.stream,
        mode=mode,
        destination=destination,
        paused=found.paused,
        workers=workers,
        waiting=sum(found.counts.get(each, 0) for each in WAITING),
        oldest_seconds=found.oldest_seconds,
        counts={each: found.counts.get(each, 0) for each in Status if each is not Status.PUBLISHED},
        at_least=found.at_least,
        held_keys=found.held_keys,
    )


class Steered(NamedTuple):
    """The result of a pause or a resume: whether the stream is paused now, and whether that is new."""

    stream: str
    paused: bool
    changed: bool


async def pause(store: Desk, stream: str, by: str, *, force: bool = False) -> Steered:
    """Stop a stream on every relay. ``force``: also one that the outbox does not know yet. Raises NotFound."""
    return await _steer(store, stream, by, paused=True, force=force)


async def resume(store: Desk, stream: str, by: str) -> Steered:
    """Let a paused stream go on. Raises NotFound."""
    return await _steer(store, stream, by, paused=False)


async def _steer(store: Desk, stream: str, by: str, *, paused: bool, force: bool = False) -> Steered:
    known = {each.stream: each for each in await store.gauges(1)}
    if stream not in known and not force:
        meant = hint(stream, known, "`pillarbox streams list` shows all streams")
        if paused:
            meant = f"add --force to pause it before its first event; {meant}"
        raise NotFound(f"the outbox has no stream {stream!r}; {meant}")
    changed = stream not in known or known[stream].paused != paused
    if changed:
        await (store.pause if paused else store.resume)(stream, by)
    return Steered(stream, paused, changed)
