"""What a consumer with a store does beside its source: replays of dead letters, and reports for operators."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pillarbox.batch import Batch, Part
from pillarbox.consumer.job import Job
from pillarbox.consumer.unreadable import UNREADABLE_TYPE, message_of, with_id_of_letter
from pillarbox.errors import Reject
from pillarbox.event import Event
from pillarbox.maintenance.service import Service
from pillarbox.publisher import Outcome, Result, rejected
from pillarbox.relay.breaker import Circuit
from pillarbox.relay.destination import Destination
from pillarbox.store.consumers import ConsumerReport, Consumers, Replay
from pillarbox.store.records import error_entry

_EVERY_SECONDS: Final = 5.0
_LIVE_SECONDS: Final = 15.0
_LEASE_SECONDS: Final = 300.0
_WORK_SECONDS: Final = 200.0  # a handler that begins later could outlive the lease
_AWAY_SECONDS: Final = 1.0
_UNTRIED_SECONDS: Final = 0.1
_REPLAYS: Final = 100


class Replays(Service):
    """Gives the dead letters that an operator has replayed to the handlers, each with all attempts of a new event. One
    that fails too often, or for too long, is dead again."""

    name = "replays"

    def __init__(
        self,
        store: Consumers,
        job: Job,
        destination: Destination,
        *,
        every: float = _EVERY_SECONDS,
        logger: logging.Logger | None = None,
    ) -> None:
        super().__init__(every, logger)
        self._store = store
        self._job = job
        self._destination = destination

    async def run_once(self) -> int:
        """Returns how many were applied."""
        if self._destination.breaker.state is not Circuit.CLOSED:
            return 0
        until = time.monotonic() + _WORK_SECONDS
        replays = await self._store.take_replays(self._job.name, self._job.worker, _REPLAYS, _LEASE_SECONDS)
        runs = [Run(replay, replay.event._replace(attempts=0)) for replay in replays]
        applied = 0
        # What is left then, or at a stop, comes again when its lease has run out.
        while runs and not self._stop.is_set() and time.monotonic() < until:
            for run, outcome in await self._attempt(_ready(runs, time.monotonic())):
                applied += outcome.result is Result.PUBLISHED
                if await self._settle(run, outcome, until):
                    runs.remove(run)
            if runs:
                await self._wait(max(0.0, min(run.due_at for run in runs) - time.monotonic()))
        return applied

    async def _attempt(self, runs: Sequence["Run"]) -> list[tuple["Run", Outcome]]:
        outcomes = []
        readable = []
        for run in runs:
            event = self._decoded(run.event)
            if isinstance(event, Outcome):
                outcomes.append((run, event))
            else:
                readable.append((run, event))
        if readable:
            batch = Batch(self._job.name, [Part(None, 0, tuple(event for _, event in readable))])
            answers = await self._destination.publish(batch)
            outcomes += [(run, outcome) for (run, _), outcome in zip(readable, answers, strict=True)]
        return outcomes

    def _decoded(self, event: Event) -> Event | Outcome:
        """A message that could not be read may be readable now."""
        if event.type != UNREADABLE_TYPE:
            return event
        try:
            return with_id_of_letter(self._job.decode(message_of(event)), event)
        except Reject as error:
            return rejected(str(error))
        except Exception as error:
            return rejected(f"the decoder raised {type(error).__name__}")

    async def _settle(self, run: "Run", outcome: Outcome, until: float) -> bool:
        """Whether the replay is over. until: when this worker's time for it ends."""
        name, report = self._job.name, self._job.report
        if outcome.result is Result.PUBLISHED:
            if await self._store.finish_replay(name, run.replay):
                self._log.info(
                    "consumer '%s': the replay of event %s succeeded",
                    name,
                    run.event.id,
                    extra=self._job.subject.fields("replayed", event_id=str(run.event.id)),
                )
            return True
        now = time.monotonic()
        if outcome.result is Result.UNTRIED:
            run.due_at = now + (_AWAY_SECONDS if outcome.is_outage else _UNTRIED_SECONDS)
            return False
        failure, is_dead = self._job.rules.classify(run.event, outcome)
        # The next lease would begin with the first attempt, and the replay would never end.
        is_too_late = now + (failure.delay or 0.0) >= until
        if is_dead or is_too_late:
            if await self._store.bury(name, failure, run.errors):
                report.died(failure)
            return True
        if outcome.charged:
            run.errors += (error_entry(failure.error, failure.attempts),)
        run.event = run.event._replace(attempts=failure.attempts)
        run.due_at = now + (failure.delay or 0.0)
        report.failed(failure, failure.delay, charged=outcome.charged)
        return False


@dataclass(slots=True, eq=False)
class Run:
    """A new run of attempts of one dead letter."""

    replay: Replay
    event: Event  # as it stands in the letter, with the attempts of this run
    errors: tuple[Mapping[str, Any], ...] = ()
    due_at: float = 0.0


def _ready(runs: Sequence[Run], now: float) -> list[Run]:
    """The runs whose time has come. The later events of a key wait for the first one."""
    ready: list[Run] = []
    waiting: set[str] = set()
    for run in runs:
        key = run.event.key
        if run.due_at > now or key in waiting:
            if key is not None:
                waiting.add(key)
        else:
            ready.append(run)
    return ready


class Reports(Service):
    """Writes into the store how the consumer is, for `pillarbox status`."""

    name = "report"

    def __init__(
        self,
        store: Consumers,
        job: Job,
        report: Callable[[], Awaitable[ConsumerReport]],
        *,
        every: float = _EVERY_SECONDS,
        logger: logging.Logger | None = None,
    ) -> None:
        super().__init__(every, logger)
        self._store = store
        self._job = job
        self._report = report

    async def run_once(self) -> ConsumerReport:
        """Returns what it wrote."""
        report = await self._report()
        await self._store.report(self._job.name, self._job.worker, report, max(_LIVE_SECONDS, 3 * self.every_seconds))
        self._job.observers.consumer_reported(self._job.name, report)
        return report
