"""Checks of streams and their workers, for ``pillarbox doctor``."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from shlex import quote
from typing import Final, Protocol

from pillarbox.errors import StoreError
from pillarbox.event import Status
from pillarbox.finding import Finding, State, failed, ok, warning
from pillarbox.operations.streams import WAITING
from pillarbox.store import Examined, Gauges, HoldMode, StreamGauges, WorkerStatus

_SKEW_SECONDS: Final = (1.0, 30.0)  # a warning, and a failure
_LATE_SECONDS: Final = 60.0


class Patient(Gauges, Examined, Protocol):
    """A store as the doctor sees it."""


async def examine_store(store: Patient, lease_seconds: float = 15.0) -> list[Finding]:
    """The server of an open store, its clock, and its streams. lease_seconds: the longest lease of the relays."""
    found = [await _clock(store), *await store.examine(lease_seconds)]
    try:
        return [*found, *await _streams(store)]
    except StoreError as error:
        # Usually a right that one of the findings above names.
        return [*found, failed("streams", f"the streams cannot be read: {error}", "correct what failed above")]


async def _streams(store: Gauges) -> list[Finding]:
    workers = await store.workers()
    gauges = await store.gauges(1)
    found: list[Finding] = []
    for each in gauges:
        found += _stream(each, workers.get(each.stream, ()))
    if gauges and all(each.state is State.OK for each in found if each.check.startswith("stream")):
        found.append(ok("streams", f"no stream is in trouble, of {len(gauges)}"))
    return [*found, *_versions(workers)]


async def _clock(store: Gauges) -> Finding:
    before = datetime.now(UTC)
    there = await store.clock()
    after = datetime.now(UTC)
    skew = max((before - there).total_seconds(), (there - after).total_seconds(), 0.0)
    said = f"this clock and that of the database are {skew:.1f} s apart"
    least, most = _SKEW_SECONDS
    if skew <= least:
        return ok("clock", said)
    remedy = "set both by NTP: an event that is scheduled by this clock comes at another time by that one"
    return failed("clock", said, remedy) if skew > most else warning("clock", said, remedy)


def _stream(gauges: StreamGauges, workers: Sequence[WorkerStatus]) -> list[Finding]:
    name, found = gauges.stream, []
    waits = any(gauges.counts.get(status) for status in WAITING)
    if waits and not gauges.workers:
        remedy = f"start a relay for it: pillarbox relay --stream {quote(name)}"
        found.append(failed("stream_unserved", f"events of stream {name!r} wait, and no relay serves it", remedy))
    found += [
        failed(
            "stream_circuit",
            f"worker {worker.name} of stream {name!r} waits for {gauges.destination}: {worker.circuit_error}",
            "mend the destination; the relay goes on by itself",
        )
        for worker in workers
        if worker.live and worker.circuit_error is not None
    ]
    if gauges.paused:
        remedy = f"pillarbox streams resume {quote(name)}"
        found.append(warning("stream_paused", f"stream {name!r} is paused", remedy))
    if gauges.counts.get(Status.DEAD):
        remedy = f"pillarbox dead list --stream {quote(name)}"
        found.append(warning("stream_dead", f"stream {name!r} has dead letters", remedy))
    stopped = [mode.value for mode in (HoldMode.BLOCKED, HoldMode.PARKED) if gauges.held_keys.get(mode)]
    if stopped:
        sentence = f"keys of stream {name!r} are {' and '.join(stopped)}: their events wait for an operator"
        found.append(warning("stream_stuck", sentence, f"pillarbox dead replay --stream {quote(name)}"))
    if gauges.workers and (gauges.oldest_seconds or 0.0) > _LATE_SECONDS:
        sentence = f"the oldest event of stream {name!r} has waited for {gauges.oldest_seconds:.0f} s"
        remedy = f"pillarbox events list --oldest-first --stream {quote(name)}, then: pillarbox events why ID"
        found.append(warning("stream_late", sentence, remedy))
    return found


def _versions(workers: Mapping[str, Sequence[WorkerStatus]]) -> list[Finding]:
    live = [worker for found in workers.values() for worker in found if worker.live]
    versions = sorted({worker.version for worker in live if worker.version is not None})
    if len(versions) > 1:
        remedy = "finish the roll-out"
        return [warning("versions", f"relays of several versions are at work: {', '.join(versions)}", remedy)]
    return [ok("versions", f"all relays have version {versions[0]}")] if versions else []
