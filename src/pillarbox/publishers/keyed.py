"""Prefix per key for publishers that send events one by one.

One event of a key is on its way at a time, and different keys are sent side by side. ``send_by_key`` does it with a
function that sends one event; KeyedBatch and its cursors are for senders that need more control.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from pillarbox.errors import ConfigError, Outage, Reject
from pillarbox.event import Event
from pillarbox.publisher import UNTRIED, Outcome, Result, outage, rejected, retry

logger = logging.getLogger(__name__)


class KeyedBatch:
    """The events of one call by key, and their outcomes in the order of the events.

    All outcomes are untried until a cursor records another one. After an outage no cursor has an event any more.
    ``keys`` counts an event without a key as a key.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.outcomes: list[Outcome] = [UNTRIED] * len(events)
        self.is_down = False
        runs = runs_by_key(events)
        self.keys = len(runs)
        self.free_runs = iter(runs)

    def cursor(self) -> "Cursor":
        """A new cursor. All cursors of a batch share its keys: each key is taken by one of them."""
        return Cursor(self)

    async def work(self, work: Callable[["Cursor"], Coroutine[Any, Any, None]], *, concurrency: int) -> list[Outcome]:
        """Run ``work`` for up to ``concurrency`` cursors at once, until all have returned."""
        if concurrency < 1:
            raise ConfigError(f"concurrency={concurrency}: give 1 or more")
        if self.keys == 1:  # saves a task
            await work(self.cursor())
        else:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(concurrency, self.keys)):
                    tasks.create_task(work(self.cursor()))
        return self.outcomes


class Cursor:
    """Goes through the events of one key, then through those of the next key that no cursor has taken.

    With callbacks in place of tasks: send ``event``, and when its answer comes, ``record`` the outcome and send the
    new ``event``. The number of cursors is then the number of events on their way.
    """

    def __init__(self, batch: KeyedBatch) -> None:
        self._batch = batch
        self._run: list[int] = []
        self._place = 0

    @property
    def event(self) -> Event | None:
        """The event to send now; None when no key is left, or after an outage."""
        batch = self._batch
        if batch.is_down:
            return None
        if self._place == len(self._run):
            self._run, self._place = next(batch.free_runs, []), 0
            if not self._run:
                return None
        return batch.events[self._run[self._place]]

    def record(self, outcome: Outcome) -> None:
        """The outcome of ``event``. If it was not published, the rest of its key stays untried."""
        self._batch.outcomes[self._run[self._place]] = outcome
        self._place = self._place + 1 if outcome.result is Result.PUBLISHED else len(self._run)
        if outcome.is_outage:
            self._batch.is_down = True


async def send_by_key(
    events: Sequence[Event], send: Callable[[Event], Awaitable[Outcome]], *, concurrency: int = 16
) -> list[Outcome]:
    """Send each event with ``send``, up to ``concurrency`` at once; one outcome per event, in the same order.

    An exception of ``send`` becomes the event's outcome: Outage an outage, Reject rejected, any other a retry
    that names only the exception's class, because its text may contain the payload. After an outage nothing more of the
    call is sent.
    """

    async def work(cursor: Cursor) -> None:
        while (event := cursor.event) is not None:
            cursor.record(await _outcome_of(send, event))

    return await KeyedBatch(events).work(work, concurrency=concurrency)


async def _outcome_of(send: Callable[[Event], Awaitable[Outcome]], event: Event) -> Outcome:
    try:
        return await send(event)
    except Outage as error:
        return outage(str(error))
    except Reject as error:
        return rejected(str(error))
    except Exception as error:
        logger.debug("sending event %s failed", event.id, exc_info=error)
        return retry(f"sending it failed with {type(error).__name__}")


def runs_by_key(events: Sequence[Event]) -> list[list[int]]:
    """The indexes of the events: those of one key together, in order; each event without a key alone."""
    runs: list[list[int]] = []
    by_key: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        run = None if event.key is None else by_key.get(event.key)
        if run is None:
            run = []
            runs.append(run)
            if event.key is not None:
                by_key[event.key] = run
        run.append(index)
    return runs
