"""One call of ``publish``: one event of a key is on its way at a time, keys side by side."""

import asyncio
import inspect
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from uuid import UUID

from pillarbox.envelopes import HttpMessage
from pillarbox.errors import ConfigError, Outage, PillarboxError, Reject
from pillarbox.event import Event
from pillarbox.publisher import UNTRIED, Outcome, outage, rejected, retry
from pillarbox.publishers.http.answers import Fault
from pillarbox.publishers.http.client import Client
from pillarbox.publishers.http.endpoint import Endpoint
from pillarbox.publishers.http.state import State, States, logger, outcome_of_only
from pillarbox.publishers.keyed import KeyedBatch
from pillarbox.tasks import ended

# The endpoint of an event; None: it has none. It may be an async function.
Chooser: TypeAlias = Callable[[Event], Endpoint | Awaitable[Endpoint | None] | None]
# Called with an endpoint that answered 410.
OnGone: TypeAlias = Callable[[Endpoint], Awaitable[None] | None]

_MOST_REQUESTS: Final = 256
# The rest is for events that a call waits for.
_MOST_SLOW: Final = 128
# How many times its patience a call waits for the turn of a request.
_TURNS: Final = 10
_KEEP_SECONDS: Final = 60.0
_PENDING: Final = retry("its endpoint has not answered yet; the request goes on", charged=False, after_seconds=1.0)


@dataclass(slots=True)
class Sending:
    """What the calls of an open publisher share.

    patience: the seconds for which a call waits for one of several endpoints.
    """

    client: Client
    states: States
    message_of: Callable[[Event], HttpMessage]
    only: Endpoint | None
    choose: Chooser | None
    on_gone: OnGone | None
    max_bytes: int
    patience: float
    slow: "SlowRequests" = field(default_factory=lambda: SlowRequests())
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_REQUESTS))
    is_stopping: bool = False

    def message(self, event: Event) -> HttpMessage | Outcome:
        try:
            message = self.message_of(event)
        except PillarboxError as error:
            return rejected(str(error))
        except Exception as error:
            logger.debug("the envelope failed on event %s", event.id, exc_info=error)
            # Only the kind: the text might quote the payload.
            return rejected(f"the envelope or header builder failed with {type(error).__name__}; correct it")
        if len(message.body) > self.max_bytes:
            return rejected(
                f"the body takes {len(message.body)} bytes and max_bytes is {self.max_bytes}; raise it if the endpoint "
                "takes more, or store the content elsewhere and send a reference"
            )
        return message

    async def endpoint(self, event: Event) -> Endpoint | Outcome:
        """What the application's function says."""
        assert self.choose is not None
        try:
            endpoint: Any = self.choose(event)
            if inspect.isawaitable(endpoint):
                endpoint = await endpoint
        except (Reject, ConfigError) as error:
            return rejected(str(error))
        except Outage as error:
            return outage(str(error))
        except Exception as error:
            logger.debug("endpoints= failed on event %s", event.id, exc_info=error)
            return retry(f"the function endpoints= failed with {type(error).__name__}; correct it")
        if endpoint is None:
            return rejected("the function endpoints= names no endpoint for this event")
        if not isinstance(endpoint, Endpoint):
            return retry(f"the function endpoints= returned a {type(endpoint).__name__}; return an Endpoint or None")
        return endpoint

    async def gone(self, endpoint: Endpoint) -> None:
        if self.on_gone is None:
            return
        try:
            found = self.on_gone(endpoint)
            if inspect.isawaitable(found):
                await found
        except Exception as error:
            logger.warning(
                "on_gone= failed with %s for endpoint %s; correct it",
                type(error).__name__,
                endpoint.name,
                extra={"action": "on_gone_failed", "endpoint": endpoint.name},
            )


class SlowRequests:
    """Requests for which no call waits any more. A later call with the same event gets their outcome."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[tuple[UUID, int], tuple[float, asyncio.Task[Outcome]]] = OrderedDict()
        self._running = 0

    @property
    def is_full(self) -> bool:
        return self._running >= _MOST_SLOW

    def add(self, event: Event, task: asyncio.Task[Outcome]) -> None:
        self._running += 1
        self._tasks[_place(event)] = time.monotonic(), task
        task.add_done_callback(self._ended)

    def outcome(self, event: Event) -> Outcome | None:
        """The outcome of the event's request; None: there is none."""
        found = self._tasks.get(_place(event))
        if found is None:
            return None
        _, task = found
        if not task.done():
            return _PENDING
        del self._tasks[_place(event)]
        return None if task.cancelled() else task.result()

    async def close(self) -> None:
        for _, task in list(self._tasks.values()):
            await ended(task)
        self._tasks.clear()

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        self._running -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a slow request failed", exc_info=error)
        now = time.monotonic()
        for place, (begun, each) in list(self._tasks.items()):
            if begun + _KEEP_SECONDS > now:
                break
            if each.done():
                del self._tasks[place]


def _place(event: Event) -> tuple[UUID, int]:
    return event.id, event.seq  # an event that is replayed has another number


class Call:
    """The events of one call, and their outcomes."""

    def __init__(self, sending: Sending, events: Sequence[Event]) -> None:
        self._sending = sending
        self._keyed = KeyedBatch(events)
        # More than a publisher sends at once would only wait.
        most = _MOST_REQUESTS if sending.only is None else sending.states.concurrency
        self.tasks = [asyncio.create_task(self._work()) for _ in range(min(most, self._keyed.keys))]

    async def run(self) -> list[Outcome]:
        """One outcome per event. If a task is cancelled, its event and what follows of the key are untried."""
        try:
            await asyncio.wait(self.tasks)
        finally:
            for task in self.tasks:
                await ended(task)
        for task in self.tasks:
            if not task.cancelled():
                task.result()
        return self._keyed.outcomes

    async def _work(self) -> None:
        deliver = self._deliver if self._sending.only is None else self._deliver_to_only
        cursor = self._keyed.cursor()
        while (event := cursor.event) is not None and not self._sending.is_stopping:
            cursor.record(await deliver(event))

    async def _deliver_to_only(self, event: Event) -> Outcome:
        sending, endpoint = self._sending, self._sending.only
        assert endpoint is not None
        message = sending.message(event)
        if isinstance(message, Outcome):
            return message
        state = sending.states.of(endpoint)
        async with state.room:
            if self._keyed.is_down or sending.is_stopping:
                return UNTRIED
            return outcome_of_only(await sending.client.post(endpoint, state, event, message))

    async def _deliver(self, event: Event) -> Outcome:
        """Deliver to one of several endpoints. Waits for it no longer than the publisher's patience."""
        sending = self._sending
        if (known := sending.slow.outcome(event)) is not None:
            return known
        endpoint = await sending.endpoint(event)
        if isinstance(endpoint, Outcome):
            return endpoint
        message = sending.message(event)
        if isinstance(message, Outcome):
            return message
        state = sending.states.of(endpoint)
        if (state.is_slow and state.room.locked()) or not state.breaker.allows(time.monotonic()):
            return state.aside()
        request = _Request(sending, endpoint, state, event, message)
        task = asyncio.create_task(request.run())
        hurried = state.is_slow or state.breaker.probing
        try:
            if not hurried:
                await self._wait(task, request, state)
        except asyncio.CancelledError:
            await ended(task)
            raise
        if task.done():
            return task.result()
        state.is_slow |= request.is_sent
        if sending.slow.is_full or not (request.is_sent or hurried):
            await ended(task)
            return state.aside()
        sending.slow.add(event, task)
        return _PENDING

    async def _wait(self, task: asyncio.Task[Outcome], request: "_Request", state: State) -> None:
        """Wait for the request's turn while the endpoint is quick, and then for its answer while the patience lasts."""
        patience, now = self._sending.patience, time.monotonic()
        latest = now + _TURNS * patience
        until = now + patience
        while not task.done() and now < until:
            await asyncio.wait([task], timeout=until - now)
            now = time.monotonic()
            if request.is_sent:
                until = request.sent_at + patience
            elif not state.is_slow:
                until = min(now + patience / 4, latest)


class _Request:
    """The request of one event, from its place among the others to its outcome."""

    def __init__(self, sending: Sending, endpoint: Endpoint, state: State, event: Event, message: HttpMessage) -> None:
        self._sending = sending
        self._endpoint = endpoint
        self._state = state
        self._event = event
        self._message = message
        self.sent_at = 0.0

    @property
    def is_sent(self) -> bool:
        return self.sent_at > 0

    async def run(self) -> Outcome:
        sending, state = self._sending, self._state
        state.users += 1
        is_probe = state.breaker.probing
        is_over = False
        try:
            async with state.room, sending.room:
                self.sent_at = time.monotonic()
                verdict = await sending.client.post(self._endpoint, state, self._event, self._message)
                state.is_slow = time.monotonic() - self.sent_at >= sending.patience
            if verdict.fault is Fault.GONE:
                await sending.gone(self._endpoint)
            outcome = state.outcome(self._event, verdict)
            is_over = True
            return outcome
        finally:
            state.users -= 1
            if is_probe and not is_over:
                state.breaker.inconclusive()
