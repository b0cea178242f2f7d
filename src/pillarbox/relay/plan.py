"""From the outcomes of a turn to what is written: the state machine, pure."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, Outcome, Result
from pillarbox.relay.retry import Exponential, Retry
from pillarbox.relay.stream import OnDead
from pillarbox.store import PARKED, Aside, Failure, KeyAside, KeyRun, Settlement

log = logging.getLogger(__name__)

_LONGEST_SECONDS = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a stream that decide what an outcome means."""

    retry: Retry
    max_attempts: int
    on_dead: OnDead
    keep_published: bool = True

    def judge(self, event: Event, outcome: Outcome, *, charged_before: bool = False) -> tuple[Failure, bool]:
        """What an outcome other than published or untried makes of an event, and whether it is dead of it.

        charged_before: the attempt is in ``event.attempts`` already, as in queue streams.
        """
        before = event.attempts - charged_before
        attempts = before + 1 if outcome.charged else before
        error = outcome.error or "no reason given"
        limit = event.max_attempts or self.max_attempts
        if outcome.result is Result.REJECTED or (outcome.charged and attempts >= limit):
            return Failure(event, error, attempts), True
        return Failure(event, error, attempts, self._delay(max(1, attempts))), False

    def _delay(self, attempts: int) -> float:
        """A user's policy may raise or answer nonsense: that must not undo a turn whose events are published."""
        try:
            delay = float(self.retry(attempts))
        except Exception as error:
            log.error("the retry policy raised %s; the default one is used", type(error).__name__)
            delay = float("nan")
        return min(max(0.0, delay), _LONGEST_SECONDS) if delay == delay else Exponential()(attempts)


def split(events: Sequence[Event], aside: Collection[str]) -> tuple[Sequence[Event], Sequence[Event]]:
    """The events to publish, and those whose key is set aside."""
    if not aside:
        return events, ()
    free: list[Event] = []
    held: list[Event] = []
    for event in events:
        (held if event.key in aside else free).append(event)
    return free, held


def plan_turn(events: Sequence[Event], outcomes: Sequence[Outcome], held: Sequence[Event], rules: Rules) -> Settlement:
    """What to write after pending events were published; ``held`` are those met whose key is set aside."""
    if outcomes.count(PUBLISHED) == len(events):
        return Settlement(events, held=held, keep_published=rules.keep_published)
    published: list[Event] = []
    failed: list[Failure] = []
    dead: list[Failure] = []
    aside: dict[str, KeyAside] = {}
    for event, outcome in zip(events, outcomes, strict=True):
        if outcome.result is Result.PUBLISHED:
            published.append(event)
        if outcome.result is Result.PUBLISHED or outcome.result is Result.UNTRIED:
            continue
        failure, is_dead = rules.judge(event, outcome)
        if is_dead:
            dead.append(failure)
            if event.key is not None and rules.on_dead is OnDead.BLOCK:
                aside[event.key] = KeyAside(Aside.BLOCKED, None, event.id)
            elif event.key is not None and rules.on_dead is OnDead.PARK:
                aside[event.key] = KeyAside(Aside.PARKED, None, event.id)
        elif event.key is None:
            failed.append(failure)
        else:
            # The instant stands with the key alone, so that there are no two truths of it.
            failed.append(failure._replace(delay=None))
            aside[event.key] = KeyAside(Aside.RETRY, failure.delay)
    return Settlement(published, failed, dead, held, aside, (), rules.keep_published)


def plan_key_run(run: KeyRun, outcomes: Sequence[Outcome], rules: Rules) -> Settlement:
    """What to write after a key that was set aside had its turn, from its head on."""
    if run.mode is Aside.PARKED:
        buried = [Failure(event, PARKED, event.attempts) for event in run.events]
        # Due again at once until nothing is left to bury.
        return Settlement(dead=buried, aside={run.key: KeyAside(Aside.PARKED, 0.0 if buried else None, run.dead_head)})
    published: list[Event] = []
    for event, outcome in zip(run.events, outcomes, strict=True):
        if outcome.result is Result.PUBLISHED:
            published.append(event)
            continue
        if outcome.result is Result.UNTRIED:
            return Settlement(published, keep_published=rules.keep_published)
        failure, is_dead = rules.judge(event, outcome)
        if not is_dead:
            aside = {run.key: KeyAside(Aside.RETRY, failure.delay)}
            retried = [failure._replace(delay=None)]
            return Settlement(published, retried, aside=aside, keep_published=rules.keep_published)
        if rules.on_dead is OnDead.BLOCK:
            key = KeyAside(Aside.BLOCKED, None, event.id)
        elif rules.on_dead is OnDead.PARK:
            key = KeyAside(Aside.PARKED, 0.0, event.id)
        else:
            key = KeyAside(Aside.RETRY, 0.0)
        # Of these only a key that goes on is released, if nothing of it is left.
        return Settlement(published, (), [failure], (), {run.key: key}, [run.key], rules.keep_published)
    return Settlement(published, release=[run.key], keep_published=rules.keep_published)


def plan_claims(
    events: Sequence[Event], outcomes: Sequence[Outcome], rules: Rules
) -> tuple[Settlement, Sequence[Event]]:
    """What to write of leased events, and which to give back uncharged."""
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
            failure, is_dead = rules.judge(event, outcome, charged_before=True)
            (dead if is_dead else failed).append(failure)
    return Settlement(published, failed, dead, keep_published=rules.keep_published), back
