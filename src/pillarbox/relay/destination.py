"""The destination of a stream: its publisher and the circuit in front of it."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import TypeVar

from pillarbox.batch import Batch
from pillarbox.errors import ConfigError
from pillarbox.event import Mode
from pillarbox.publisher import PUBLISHED, Needs, Outcome, Publisher, Result, outage
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.breaker import Breaker
from pillarbox.relay.deadline import Deadline, Step
from pillarbox.relay.stream import OnDead, Stream
from pillarbox.urls import publisher_from_url

log = logging.getLogger(__name__)

T = TypeVar("T")

# The time limit of close, unless the relay stops.
CLOSE_SECONDS = 60.0
_CANCEL_SECONDS = 0.5  # for calls that should end, after a close and after a cancellation


def publisher_of(stream: Stream) -> Publisher:
    """The publisher of a stream, adapted to the stream's settings."""
    strict = stream.on_dead is not OnDead.SKIP
    concurrency = stream.concurrency if stream.mode is Mode.QUEUE else max(stream.concurrency, stream.slots or 0)
    given = publisher_from_url(stream.to) if isinstance(stream.to, str) else stream.to
    publisher = given.prepared(Needs(stream.name, concurrency, strict))
    if strict and not publisher.features.strict_keys:
        raise ConfigError(
            f"stream '{stream.name}': on_dead={stream.on_dead} needs a publisher that sends nothing of a key after "
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
    """Publishes batches of one stream and reports the results to the circuit."""

    def __init__(self, job: Assignment) -> None:
        self.features = job.publisher.features
        self.description = job.publisher.description
        self.breaker = Breaker(
            job.stream.name, self.description, on_change=job.observers.circuit_changed, logger=job.logger
        )
        self.given_up = asyncio.Event()  # set when a stop has waited long enough: nothing more is published
        self._stream = job.stream.name
        self._publisher = job.publisher
        self._log = job.logger or log

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        """Return one outcome per event. Never raises: an error of the publisher charges no event."""
        try:
            outcomes = await self._publisher.publish(batch)
            if len(outcomes) != len(batch):
                raise RuntimeError(f"{len(outcomes)} outcomes for {len(batch)} events")
        except Exception as error:
            self._log.exception(
                "stream '%s': the publisher broke its contract and raised", self._stream, extra={"action": "bug"}
            )
            outcomes = [outage(f"the publisher raised {type(error).__name__}")] * len(batch)
        if outcomes.count(PUBLISHED) == len(outcomes):
            self.breaker.succeeded()
            return outcomes
        down = [outcome for outcome in outcomes if outcome.is_outage]
        if down:
            after = max(outcome.after_seconds or 0.0 for outcome in down)
            self.breaker.failed(time.monotonic(), down[0].error or "", after)
        elif any(outcome.result is not Result.UNTRIED for outcome in outcomes):
            self.breaker.succeeded()
        return outcomes

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
                "stream '%s': %d call(s) of %s did not end although it was closed, and are left behind",
                self._stream,
                len(left),
                self.description,
                extra={"action": "left_behind", "stream": self._stream, "count": len(left)},
            )
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=_CANCEL_SECONDS)
        return left
