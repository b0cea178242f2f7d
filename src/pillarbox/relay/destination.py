"""The destination of a stream: its publisher and the circuit in front of it."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import Final, TypeVar
from uuid import UUID

from pillarbox.batch import Batch
from pillarbox.errors import ConfigError, Outage
from pillarbox.event import Mode
from pillarbox.observe import Observers
from pillarbox.publisher import PUBLISHED, Needs, Outcome, Place, Publisher, Result, outage
from pillarbox.relay.breaker import Breaker, Circuit
from pillarbox.relay.deadline import Deadline, Step
from pillarbox.relay.stream import OnDead, Stream
from pillarbox.relay.subject import Subject, stream_named
from pillarbox.urls import publisher_from_url

log = logging.getLogger(__name__)

T = TypeVar("T")

# The time limit of close, unless the relay stops.
CLOSE_SECONDS = 60.0
# When so many different events in a row met an ambiguous refusal, the destination is to blame.
_AMBIGUOUS_EVENTS: Final = 5
_LOOK_SECONDS = 1.0  # between two looks whether a call waits for the destination
_CANCEL_SECONDS = 0.5  # for calls that should end, after a close and after a cancellation


def publisher_of(stream: Stream) -> Publisher:
    """The publisher of a stream, adapted to the stream's settings."""
    strict = stream.on_dead is not OnDead.SKIP
    concurrency = stream.concurrency if stream.mode is Mode.QUEUE else max(stream.concurrency, stream.slots or 0)
    needs = Needs(stream.name, concurrency, strict)
    publisher = prepared_publisher(stream.to, needs, stream_named(stream.name), stream.on_dead)
    if publisher.features.exactly_once and stream.mode is Mode.QUEUE:
        raise ConfigError(
            f"stream '{stream.name}': exactly once needs mode='ordered'; queue streams deliver at least once"
        )
    return publisher


def prepared_publisher(to: Publisher | str, needs: Needs, subject: Subject, on_dead: str) -> Publisher:
    """The publisher, or that of a URL, with the settings that a stream or a consumer needs."""
    given = publisher_from_url(to) if isinstance(to, str) else to
    publisher = given.prepared(needs)
    if needs.strict_keys and not publisher.features.strict_keys:
        raise ConfigError(
            f"{subject}: on_dead={on_dead} needs a publisher that sends nothing of a key after "
            f"a rejected event; give {publisher.description.split()[0]} strict_keys=True"
        )
    return publisher


async def close(publisher: Publisher, seconds: float | None = None, logger: logging.Logger = log) -> None:
    """Close a publisher. After ``seconds`` (default: a minute) stop waiting for it."""
    seconds = CLOSE_SECONDS if seconds is None else seconds
    closing = asyncio.create_task(publisher.close(), name="pillarbox-close")
    if (await asyncio.wait([closing], timeout=seconds))[0]:
        await closing
        return
    logger.error("%s cannot be closed and is left behind", publisher.description, extra={"action": "left_behind"})
    closing.cancel()


class Destination:
    """Publishes batches of one stream, or of a consumer, and reports the results to the circuit."""

    def __init__(
        self, subject: Subject, publisher: Publisher, observers: Observers, logger: logging.Logger | None = None
    ) -> None:
        self.features = publisher.features
        self.description = publisher.description
        is_stream = subject.kind == "stream"
        on_change = observers.circuit_changed if is_stream else observers.consumer_circuit_changed
        self.breaker = Breaker(subject, self.description, on_change=lambda *_: self._tell(), logger=logger)
        self.given_up = asyncio.Event()  # set when a stop has waited long enough: nothing more is published
        self._subject = subject
        self._publisher = publisher
        self._log = logger or log
        self._on_change = on_change
        self._told = Circuit.CLOSED
        self._calls = 0  # under way
        self._watch: asyncio.TimerHandle | None = None
        self._refused: set[UUID] = set()  # events that met an ambiguous refusal since the last one was published

    @property
    def error(self) -> str | None:
        """Why it waits for its destination. None: it does not.

        A publisher may wait for its destination in a call, without an outcome that opens the circuit. After its last
        call it may not know yet that the destination is back."""
        return self.breaker.error or (self._publisher.silence if self._calls else None)

    @property
    def circuit(self) -> Circuit:
        """The state of the circuit, as others are to see it: open while a call waits for the destination."""
        is_silent = self.breaker.state is Circuit.CLOSED and self.error is not None
        return Circuit.OPEN if is_silent else self.breaker.state

    def _tell(self) -> None:
        """Tell observers of a new state."""
        state = self.circuit
        if state is not self._told:
            self._told = state
            self._on_change(self._subject.name, state)

    def _look(self) -> None:
        """See whether a call waits for the destination. One timer for all calls: one for each would cost too much."""
        self._tell()
        looks_on = self._calls > 0
        self._watch = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look) if looks_on else None

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        """Return one outcome per event. Never raises: an error of the publisher charges no event."""
        self._calls += 1
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        try:
            return await self._publish(batch)
        finally:
            self._calls -= 1
            if self._told is not Circuit.CLOSED:
                self._tell()

    async def _publish(self, batch: Batch) -> Sequence[Outcome]:
        try:
            outcomes = await self._publisher.publish(batch)
            if len(outcomes) != len(batch):
                raise RuntimeError(f"{len(outcomes)} outcomes for {len(batch)} events")
        except Exception as error:
            self._log.exception(
                "%s: the publisher broke its contract and raised", self._subject, extra=self._subject.fields("bug")
            )
            outcomes = [outage(f"the publisher raised {type(error).__name__}")] * len(batch)
        if outcomes.count(PUBLISHED) == len(outcomes):
            self.breaker.succeeded()
            self._refused.clear()
            return outcomes
        outcomes = self._without_blame(batch, outcomes)
        down = [outcome for outcome in outcomes if outcome.is_outage or self._is_to_blame(outcome)]
        if down:
            after = max(outcome.after_seconds or 0.0 for outcome in down)
            self.breaker.failed(time.monotonic(), down[0].error or "", after)
        elif any(outcome.result is not Result.UNTRIED for outcome in outcomes):
            self.breaker.succeeded()
        return outcomes

    async def recover(self, place: Place) -> bytes | None:
        """The last ticket that the destination has of a shard. None: it is down."""
        try:
            return await self._publisher.recover(place)
        except Outage as error:
            self.breaker.failed(time.monotonic(), str(error))
            return None

    def _without_blame(self, batch: Batch, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """The outcomes of a call. Ambiguous refusals charge nothing if the destination is to blame for them."""
        if any(outcome.result is Result.PUBLISHED for outcome in outcomes):
            self._refused.clear()
            return outcomes
        for event, outcome in zip(batch, outcomes, strict=True):
            if outcome.ambiguous and len(self._refused) < _AMBIGUOUS_EVENTS:
                self._refused.add(event.id)
        if not any(map(self._is_to_blame, outcomes)):
            return outcomes
        probing = self.breaker.probing
        return [_uncharged(each, probing) if self._is_to_blame(each) else each for each in outcomes]

    def _is_to_blame(self, outcome: Outcome) -> bool:
        """Whether the destination is to blame for a refusal, because so many different events met one."""
        return outcome.ambiguous and len(self._refused) >= _AMBIGUOUS_EVENTS

    async def finish(self, calls: Collection[asyncio.Task[T]], deadline: Deadline) -> Collection[asyncio.Task[T]]:
        """Wait for calls. If they take too long, close the publisher, which ends them. Returns the calls that do not
        end.

        Their leases are not renewed any more, so another worker takes over when the leases have run out.
        """
        if not calls or not (await asyncio.wait(calls, timeout=deadline.left(Step.FINISH)))[1]:
            return ()
        self.given_up.set()
        await close(self._publisher, deadline.left(Step.CLOSE), self._log)
        _, left = await asyncio.wait(calls, timeout=_CANCEL_SECONDS)
        if left:
            self._log.error(
                "%s: %d call(s) of %s did not end although it was closed, and are left behind",
                self._subject,
                len(left),
                self.description,
                extra=self._subject.fields("left_behind", count=len(left)),
            )
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=_CANCEL_SECONDS)
        return left


def _uncharged(refusal: Outcome, probing: bool) -> Outcome:
    """An ambiguous refusal whose event is not to blame."""
    if probing:
        # It is set aside, so that the next probe sends another event: this one may be to blame after all.
        return refusal._replace(charged=False)
    return outage(refusal.error or "", after_seconds=refusal.after_seconds)
