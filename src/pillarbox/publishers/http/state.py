"""The health of endpoints: how many requests each has, its circuit, and what a verdict means for an event."""

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Final
from uuid import UUID

from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, Outcome, outage, rejected, retry
from pillarbox.publishers.http.answers import Fault, Verdict
from pillarbox.publishers.http.endpoint import Endpoint
from pillarbox.relay.breaker import Breaker, Circuit
from pillarbox.relay.subject import Subject

logger = logging.getLogger("pillarbox.publishers.http")

_FIRST_SECONDS: Final = 5.0
_LIMIT_SECONDS: Final = 60.0
_AGAIN_SECONDS: Final = 5.0  # for events of an endpoint that has no room for them
_REFUSALS: Final = 5
_GAP: Final = 0.25
_MOST_STATES: Final = 10_000


class State:
    """One endpoint. users: the events that are under way. is_slow: its last answer took longer than the calls wait."""

    def __init__(self, name: str, concurrency: int) -> None:
        self.name = name
        self.room = asyncio.Semaphore(concurrency)
        self.is_slow = False
        self.users = 0
        self._answered_at = self._lively_since = float("-inf")
        self.breaker = Breaker(
            Subject("endpoint", name), "it", first_seconds=_FIRST_SECONDS, limit_seconds=_LIMIT_SECONDS, logger=logger
        )
        self._refused: set[UUID] = set()  # events that it refused since it took one

    @property
    def is_idle(self) -> bool:
        return not self.users and self.breaker.state is Circuit.CLOSED

    def answered(self, timeout: float) -> None:
        """Note an answer, whatever it says. timeout: the seconds that a request may take."""
        now = time.monotonic()
        if now - self._answered_at > timeout * _GAP:
            self._lively_since = now
        self._answered_at = now

    def was_lively(self, since: float, timeout: float) -> bool:
        """Whether it has answered since then, without a gap in which it could have been away."""
        gap = timeout * _GAP
        return self._lively_since <= since + gap and self._answered_at >= time.monotonic() - gap

    def aside(self) -> Outcome:
        """The outcome of an event that is not sent now, so that it holds nobody up."""
        breaker = self.breaker
        if breaker.state is Circuit.CLOSED:
            reason, after = "is slow, and has as many requests as it may", _AGAIN_SECONDS
        else:
            reason = f"is down ({breaker.error})"
            after = max(_AGAIN_SECONDS, breaker.seconds_left(time.monotonic()))
        return retry(f"{self.name} {reason}; tried again later", charged=False, after_seconds=after)

    def outcome(self, event: Event, verdict: Verdict) -> Outcome:
        """What the verdict of one of several endpoints means for the event. The others must not feel it, so it is never
        an outage of the destination."""
        fault, error, after = verdict
        if fault is Fault.NONE:
            self._refused.clear()
            self.breaker.succeeded()
            return PUBLISHED
        if fault in (Fault.EVENT, Fault.FORBIDDEN, Fault.GONE):
            self.breaker.succeeded()
            return rejected(error)
        if fault is Fault.EITHER:
            if len(self._refused) < _REFUSALS:
                self._refused.add(event.id)
            if len(self._refused) < _REFUSALS:
                self.breaker.succeeded()
                return retry(error)
        self.breaker.failed(time.monotonic(), error, after or 0.0)
        # Later than the events behind the circuit, so that another one is the next probe: this one may be to blame.
        after = self.breaker.seconds_left(time.monotonic()) + _AGAIN_SECONDS
        return retry(error, charged=False, after_seconds=after)


class States:
    """The states of endpoints by their URL. Those that nobody uses are forgotten when there are many."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self._states: OrderedDict[str, State] = OrderedDict()

    def of(self, endpoint: Endpoint) -> State:
        state = self._states.get(endpoint.url)
        if state is None:
            if len(self._states) >= _MOST_STATES:
                self._forget()
            state = self._states[endpoint.url] = State(endpoint.name, self.concurrency)
        self._states.move_to_end(endpoint.url)
        return state

    def _forget(self) -> None:
        for url in [url for url, state in self._states.items() if state.is_idle][: _MOST_STATES // 10]:
            del self._states[url]


def outcome_of_only(verdict: Verdict) -> Outcome:
    """What the verdict of the only endpoint means: that it is away is an outage of the destination."""
    fault, error, after = verdict
    if fault is Fault.NONE:
        return PUBLISHED
    if fault is Fault.EVENT:
        return rejected(error)
    if fault is Fault.EITHER:
        return retry(error, ambiguous=True)
    if fault is Fault.AWAY:
        return retry(error, charged=False, ambiguous=True)
    return outage(error, after_seconds=after)
