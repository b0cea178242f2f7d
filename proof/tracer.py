"""An observer that writes down what a relay does, and that can kill its process at a named point.

The points are here and not in the library, so that nothing there can switch them on.
"""

import logging
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Final, NamedTuple
from uuid import UUID

from pillarbox import Event
from pillarbox.batch import Batch, Part
from pillarbox.event import Status
from pillarbox.observe import Observer
from pillarbox.publisher import Outcome
from pillarbox.store import PARKED, Claim, ClaimResults, Grant, Progress, Settlement
from pillarbox.store.ticket import Ticket
from proof.history import Log, Trace

POINTS: Final = (
    *("reading", "read", "before_send", "sent", "confirmed", "settling", "settled"),
    *("renewing", "taking", "pruning"),
)
ABORTING: Final = "transaction_aborting"
# With exactly once: those of the publisher's protocol, as its log names them, and the commit and the recovery.
EXACTLY_ONCE_POINTS: Final = (
    *("shard_fenced", "progress_read", "recovering", "recovered", "transaction_begun", "transaction_sent"),
    *("transaction_confirmed", "committing", "transaction_committed", ABORTING),
)
_SOON_SECONDS: Final = 0.02
_NO_RESULTS: Final[Mapping[UUID, str]] = MappingProxyType({})


class Points:
    """The points at which this process sends itself a signal.

    A line on standard input such as ``SIGKILL confirmed`` arms one point.
    """

    def __init__(self) -> None:
        self._armed: tuple[str, str] | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            number, _, point = line.strip().partition(" ")
            self._armed = (point, number) if point else None
        os.kill(os.getpid(), signal.SIGKILL)  # the harness is gone

    def at(self, point: str, after_seconds: float = 0.0) -> None:
        armed = self._armed
        if armed is None or armed[0] != point:
            return
        self._armed = None  # a process that was stopped and goes on must not stop again
        number = signal.Signals[armed[1]]
        if after_seconds:
            threading.Timer(after_seconds, os.kill, (os.getpid(), number)).start()
        else:
            os.kill(os.getpid(), number)

    def around(self, point: str) -> None:
        """At a random moment of the call that begins now."""
        self.at(point, random.uniform(0.001, _SOON_SECONDS))


class Steps(logging.Handler):
    """Makes points of the steps that the Kafka publisher writes into its log."""

    def __init__(self, points: Points) -> None:
        super().__init__()
        self._points = points

    def emit(self, record: logging.LogRecord) -> None:
        action = getattr(record, "action", "")
        if action == "transaction_confirmed":
            self._points.around("committing")
        self._points.at(action)


class Lease(NamedTuple):
    """The lease under which a worker holds events: of their shard, or in a queue stream of each event."""

    stream: str
    shard: int | None
    token: int


class Tracer(Observer):
    """Writes a line before and after each call."""

    def __init__(self, log: Log, worker: str, points: Points) -> None:
        self._log = log
        self._worker = worker
        self._points = points
        self._numbers = count(1)
        self._claiming: dict[str, Lease] = {}  # by stream

    def _write(self, kind: str, lease: Lease, ids: Sequence[str] = (), outcomes: Sequence[str] = ()) -> None:
        self._log.write(Trace(time.monotonic(), self._worker, kind, *lease, ids, outcomes))

    def before_take(self, stream: str) -> None:
        self._points.around("taking")

    def after_take(self, stream: str, grants: Sequence[Grant], seconds: float) -> None:
        for grant in grants:
            took_over = grant.previous not in (None, grant.worker)
            self._write("take", _lease(grant), outcomes=["took_over"] if took_over else ())

    def before_give(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            self._write("give", _lease(grant))

    def before_renew(self, grants: Sequence[Grant]) -> None:
        self._points.around("renewing")

    def after_renew(self, grants: Sequence[Grant], lost: Sequence[Grant], seconds: float) -> None:
        for grant in grants:
            self._write("lost" if grant in lost else "renew", _lease(grant))

    def before_read(self, grants: Sequence[Grant]) -> None:
        self._points.at("reading")
        for grant in grants:
            self._write("read_begin", _lease(grant))

    def after_read(self, grants: Sequence[Grant], parts: Sequence[Part], seconds: float) -> None:
        for part in parts:
            self._write("read", _part_lease(grants[0].stream, part), _ids(part.events))
        if parts:
            self._points.at("read")

    def before_recover(self, grant: Grant, ticket: bytes) -> None:
        self._write("recovering", _lease(grant), _named(ticket))
        self._points.around("recovering")

    def after_recover(self, grant: Grant, ticket: bytes, progress: Progress, seconds: float) -> None:
        gone = set(map(str, progress.gone))
        settled = [each for each in _named(ticket) if each not in gone] if progress.settled else []
        self._write("recovered", _lease(grant), settled, [*["published"] * len(settled), *["gone"] * len(gone)])
        self._points.at("recovered")

    def before_settle(self, settlements: Sequence[Settlement]) -> None:
        for settlement in settlements:
            self._write("settle", _lease(settlement.grant), _settled(settlement))
        self._points.around("settling")

    def after_settle(self, settlements: Sequence[Settlement], lost: Sequence[Settlement], seconds: float) -> None:
        refused = {settlement.grant.shard for settlement in lost}
        for settlement in settlements:
            kind = "refused" if settlement.grant.shard in refused else "settled"
            self._write(kind, _lease(settlement.grant), _settled(settlement), _results(settlement))
        if len(lost) < len(settlements):
            self._points.at("settled")

    def before_claim(self, stream: str) -> None:
        self._points.at("reading")
        # The events that it will find may be of any shard: a number of its own tells this read from others.
        self._claiming[stream] = Lease(stream, -next(self._numbers), 0)
        self._write("read_begin", self._claiming[stream])

    def after_claim(self, stream: str, claims: Sequence[Claim], seconds: float) -> None:
        if claims:
            self._write("read", self._claiming[stream], _ids(claim.event for claim in claims))
            self._points.at("read")

    def before_renew_claims(self, claims: Sequence[Claim]) -> None:
        self._points.around("renewing")

    def after_renew_claims(self, claims: Sequence[Claim], lost: Sequence[Claim], seconds: float) -> None:
        self._write_claims("lost", lost)

    def before_settle_claims(self, claims: Sequence[Claim], results: ClaimResults) -> None:
        self._write_claims("settle", _charged(claims, results))
        self._points.around("settling")

    def after_settle_claims(self, claims: Sequence[Claim], results: ClaimResults, refused: int, seconds: float) -> None:
        # The store does not say which of them it refused.
        self._write_claims("refused" if refused else "settled", _charged(claims, results), _results_by_id(results))
        self._points.at("settled")

    def _write_claims(self, kind: str, claims: Iterable[Claim], results: Mapping[UUID, str] = _NO_RESULTS) -> None:
        leases: dict[Lease, list[Event]] = defaultdict(list)
        for claim in claims:
            leases[Lease(claim.event.stream, None, claim.token)].append(claim.event)
        for lease, events in leases.items():
            self._write(kind, lease, _ids(events), [results[event.id] for event in events] if results else ())

    def before_publish(self, batch: Batch) -> None:
        self._points.at("before_send")
        for part in batch.parts:
            self._write("publish", _part_lease(batch.stream, part), _ids(part.events))
        self._points.around("sent")

    def after_publish(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
        results = iter([str(outcome.result) for outcome in outcomes])
        for part in batch.parts:
            told = [result for _, result in zip(part.events, results, strict=False)]
            self._write("published", _part_lease(batch.stream, part), _ids(part.events), told)
        self._points.at("confirmed")

    def before_prune(self, status: Status) -> None:
        self._points.around("pruning")


def _lease(grant: Grant) -> Lease:
    return Lease(grant.stream, grant.shard, grant.token)


def _part_lease(stream: str, part: Part) -> Lease:
    return Lease(stream, part.shard, part.token)


def _settled(settlement: Settlement) -> list[str]:
    failures = [failure.event for failure in (*settlement.failed, *settlement.dead)]
    return _ids([*settlement.published, *failures, *settlement.held])


def _results(settlement: Settlement) -> list[str]:
    """What became of the events of ``_settled``, in their order."""
    dead = ["parked" if failure.error == PARKED else "dead" for failure in settlement.dead]
    published, failed, held = settlement.published, settlement.failed, settlement.held
    return [*["published"] * len(published), *["failed"] * len(failed), *dead, *["held"] * len(held)]


def _results_by_id(results: ClaimResults) -> dict[UUID, str]:
    found = {event.id: "published" for event in results.published}
    found |= {failure.event.id: "failed" for failure in results.failed}
    return found | {failure.event.id: "dead" for failure in results.dead}


def _charged(claims: Sequence[Claim], results: ClaimResults) -> list[Claim]:
    given_back = {event.id for event in results.refund}
    return [claim for claim in claims if claim.event.id not in given_back]


def _named(ticket: bytes) -> list[str]:
    """The ids of a ticket's events."""
    return [str(each) for each in Ticket.read(ticket).ids] if ticket else []


def _ids(events: Iterable[Event]) -> list[str]:
    return [str(event.id) for event in events]
