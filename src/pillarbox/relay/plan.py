"""The state machine: turns the outcomes of a turn into what the store writes. Pure."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, Limits, Outcome, Result
from pillarbox.relay.retry import Exponential, Retry
from pillarbox.relay.stream import OnDead
from pillarbox.store import PARKED, ClaimResults, Failure, Grant, Hold, HoldMode, KeyRun, Settlement

log = logging.getLogger(__name__)

_LONGEST_SECONDS = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a stream that decide what an outcome means."""

    retry: Retry
    max_attempts: int
    on_dead: OnDead
    keep_published: bool = True
    logger: logging.Logger | None = None

    def classify(self, event: Event, outcome: Outcome, *, charged_before: bool = False) -> tuple[Failure, bool]:
        """The failure of an event whose outcome is retry or rejected, and whether the event is dead.

        charged_before: the attempt is in ``event.attempts`` already, as in queue streams.
        """
        before = event.attempts - charged_before
        attempts = before + 1 if outcome.charged else before
        error = outcome.error or "no reason given"
        own = outcome.limits or Limits()
        limit = event.max_attempts or own.max_attempts or self.max_attempts
        if outcome.result is Result.REJECTED or (outcome.charged and attempts >= limit):
            return Failure(event, error, attempts, limit=own.max_attempts), True
        delay = max(self._delay(own.retry or self.retry, max(1, attempts)), outcome.after_seconds or 0.0)
        return Failure(event, error, attempts, min(delay, _LONGEST_SECONDS), own.max_attempts), False

    def _delay(self, retry: Retry, attempts: int) -> float:
        """The policy's answer. A policy that raises or returns nonsense must not undo a turn that has published."""
        try:
            delay = float(retry(attempts))
        except Exception as error:
            (self.logger or log).error(
                "the retry policy raised %s; the default one is used",
                type(error).__name__,
                extra={"action": "retry_policy_failed"},
            )
            delay = float("nan")
        return max(0.0, delay) if delay == delay else Exponential()(attempts)


def split(events: Sequence[Event], held_keys: Collection[str]) -> tuple[Sequence[Event], Sequence[Event]]:
    """The events to publish, and those whose key is held."""
    if not held_keys:
        return events, ()
    free: list[Event] = []
    held: list[Event] = []
    for event in events:
        (held if event.key in held_keys else free).append(event)
    return free, held


def plan_turn(
    grant: Grant, events: Sequence[Event], outcomes: Sequence[Outcome], held: Sequence[Event], rules: Rules
) -> Settlement:
    """The settlement after pending events were published; ``held``: those whose key is held."""
    if outcomes.count(PUBLISHED) == len(events):
        return Settlement(grant, events, held=held, keep_published=rules.keep_published)
    published: list[Event] = []
    failed: list[Failure] = []
    dead: list[Failure] = []
    hold: dict[str, Hold] = {}
    for event, outcome in zip(events, outcomes, strict=True):
        if outcome.result is Result.PUBLISHED:
            published.append(event)
        if outcome.result is Result.PUBLISHED or outcome.result is Result.UNTRIED:
            continue
        failure, is_dead = rules.classify(event, outcome)
        if is_dead:
            dead.append(failure)
            if event.key is not None and rules.on_dead is OnDead.BLOCK:
                hold[event.key] = Hold(HoldMode.BLOCKED, None, event.id)
            elif event.key is not None and rules.on_dead is OnDead.PARK:
                hold[event.key] = Hold(HoldMode.PARKED, None, event.id)
        elif event.key is None:
            failed.append(failure)
        else:
            # Only the key has the instant, so that there is one truth.
            failed.append(failure._replace(delay=None))
            hold[event.key] = Hold(HoldMode.RETRYING, failure.delay)
    return Settlement(grant, published, failed, dead, held, hold, (), rules.keep_published)


def plan_key_run(grant: Grant, run: KeyRun, outcomes: Sequence[Outcome], rules: Rules) -> Settlement:
    """The settlement after a turn on a held key, from its head on."""
    if run.mode is HoldMode.PARKED:
        dead = [Failure(event, PARKED, event.attempts) for event in run.events]
        # Due again at once until nothing of the key is left.
        hold = {run.key: Hold(HoldMode.PARKED, 0.0 if dead else None, run.dead_head)}
        return Settlement(grant, dead=dead, hold_keys=hold)
    published: list[Event] = []
    for event, outcome in zip(run.events, outcomes, strict=True):
        if outcome.result is Result.PUBLISHED:
            published.append(event)
            continue
        if outcome.result is Result.UNTRIED:
            return Settlement(grant, published, keep_published=rules.keep_published)
        failure, is_dead = rules.classify(event, outcome)
        if not is_dead:
            hold = {run.key: Hold(HoldMode.RETRYING, failure.delay)}
            retried = [failure._replace(delay=None)]
            return Settlement(grant, published, retried, hold_keys=hold, keep_published=rules.keep_published)
        if rules.on_dead is OnDead.BLOCK:
            key = Hold(HoldMode.BLOCKED, None, event.id)
        elif rules.on_dead is OnDead.PARK:
            key = Hold(HoldMode.PARKED, 0.0, event.id)
        else:
            key = Hold(HoldMode.RETRYING, 0.0)
        # The store releases only a retrying key, and only if nothing of it is left.
        return Settlement(grant, published, (), [failure], (), {run.key: key}, [run.key], rules.keep_published)
    return Settlement(grant, published, release_keys=[run.key], keep_published=rules.keep_published)


def plan_claims(events: Sequence[Event], outcomes: Sequence[Outcome], rules: Rules) -> ClaimResults:
    """The results of leased events of a queue stream."""
    published: list[Event] = []
    failed: list[Failure] = []
    dead: list[Failure] = []
    back: list[Event] = []
    for event, outcome in zip(events, outcomes, strict=True):
        if outcome.result is Result.PUBLISHED:
            published.append(event)
        elif outcome.result is Result.UNTRIED:
            back.append(event)
        else:
            failure, is_dead = rules.classify(event, outcome, charged_before=True)
            (dead if is_dead else failed).append(failure)
    return ClaimResults(published, failed, dead, back, rules.keep_published)
