"""The runner of a consumer: it receives, gives events to the destination, and settles what is done."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from pillarbox.batch import Batch, Part
from pillarbox.consumer.job import Job
from pillarbox.consumer.letters import Letters
from pillarbox.consumer.unreadable import unreadable
from pillarbox.consumer.window import Decision, Queue, Track, Window, events_of
from pillarbox.errors import Outage, Reject, StoreDown, StoreError
from pillarbox.publisher import Outcome, Result, rejected
from pillarbox.publishers._reminder import Reminder
from pillarbox.relay.deadline import Deadline, Step
from pillarbox.relay.destination import Destination
from pillarbox.relay.pace import BatchSize
from pillarbox.source import Lane, Message
from pillarbox.store import Failure
from pillarbox.store.consumers import ConsumerReport
from pillarbox.store.records import error_entry
from pillarbox.tasks import ended

log = logging.getLogger(__name__)

# More messages at once would leave the processor's cache before they are handled.
_RECEIVE_LIMIT: Final = 250
_RECEIVE_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 1.0  # after an outage of the broker
_UNTRIED_SECONDS: Final = 0.1
_BLOCKED_SECONDS: Final = 300.0
_BURY_SECONDS: Final = (0.2, 5.0)
_BURIALS: Final = 4  # at once
_FAILED_CHARACTERS: Final = 2000  # of the reasons why lanes bring no more messages
_MOST_ERRORS: Final = 10  # kept of an event; the oldest help most
_BATCH_LIMIT: Final = 2000
# Other keys of a call get their next events when it ends, so a call is shorter than a turn of a relay.
_QUICK_SECONDS: Final = 0.1
_SLOW_SECONDS: Final = 0.5


class Runner:
    """Serves one consumer, from the opening of its source to the closing. It is the ``Lanes`` of the source."""

    def __init__(self, job: Job) -> None:
        self.destination = Destination(job.subject, job.publisher, job.observers, job.logger)
        self._job = job
        self._source = job.source
        self._log = job.logger or log
        self._window = Window(job.window, job.window_bytes)
        self._size = BatchSize(
            _BATCH_LIMIT,
            self.destination.features.first_batch,
            quick_seconds=_QUICK_SECONDS,
            slow_seconds=_SLOW_SECONDS,
        )
        self._calls: set[asyncio.Task[None]] = set()
        self._burials: set[asyncio.Task[None]] = set()
        self._burial_places = asyncio.Semaphore(_BURIALS)
        self._moved = asyncio.Event()  # set when a call or a burial has ended
        self._stopping = asyncio.Event()
        self._deadline: Deadline | None = None
        self._failure: BaseException | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reminder = Reminder()
        self._is_away = False  # the broker
        self._is_over = False  # nothing runs any more

    # What the source tells.

    def assigned(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            self._window.assign(lane)
        self._log.info(
            "%s has %s",
            self._job.subject,
            _names(lanes),
            extra=self._job.subject.fields("lanes_assigned", count=len(lanes)),
        )

    async def revoked(self, lanes: Sequence[Lane]) -> None:
        tracks = [track for lane in lanes if (track := self._window.leave(lane)) is not None]
        # The source has a limit for this, and says that the lanes are lost.
        while any(track.busy and not track.gone for track in tracks) and not self._is_over:
            self._moved.clear()
            await self._moved.wait()
        self._drop(lanes, "lanes_revoked", "gives back")

    def lost(self, lanes: Sequence[Lane]) -> None:
        self._drop(lanes, "lanes_lost", "has lost")

    def failed(self, lane: Lane, error: str) -> None:
        if (track := self._window.tracks.get(lane)) is not None:
            track.failed = error
        self._log.error(
            "%s: %s brings no more messages: %s",
            self._job.subject,
            lane.name,
            error,
            extra=self._job.subject.fields("lane_failed", lane=lane.name),
        )

    def _drop(self, lanes: Sequence[Lane], action: str, words: str) -> None:
        dropped = [lane for lane in lanes if self._window.drop(lane) is not None]
        self._moved.set()
        if dropped:
            fields = self._job.subject.fields(action, count=len(dropped))
            self._log.info("%s %s %s", self._job.subject, words, _names(dropped), extra=fields)

    # The run.

    def stop(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._stopping.set()

    async def run(self) -> None:
        """Receive until stop. Raises an error of the source that ends the consumer, after all else has ended."""
        receiving = asyncio.create_task(self._receive_for_ever(), name=f"pillarbox-receive-{self._job.name}")
        receiving.add_done_callback(lambda _: self._stopping.set())
        try:
            await self._stopping.wait()
            if self._failure is not None:
                raise self._failure
            if receiving.done():
                receiving.result()
        finally:
            self._stopping.set()
            await ended(receiving)
            await self._finish(self._deadline or Deadline(self._job.grace_seconds))

    async def report(self) -> ConsumerReport:
        """How the consumer is."""
        lag = await self._lag()
        tracks = self._window.tracks.values()
        firsts = [first.written_at for track in tracks if (first := track.first) is not None]
        oldest = min((instant.timestamp() for instant in firsts if instant is not None), default=None)
        seconds = None if oldest is None else max(0.0, time.time() - oldest)
        return ConsumerReport(
            self._source.description,
            len(tracks),
            sum(track.paused for track in tracks),
            self._window.held + len(self._burials),
            lag,
            0.0 if lag == 0 else seconds,
            "\n".join(f"{each.lane.name}: {each.failed}" for each in tracks if each.failed)[:_FAILED_CHARACTERS],
        )

    async def _lag(self) -> int | None:
        if not self._source.features.lag:
            return None
        try:
            found = await self._source.lag()
        except Outage:
            return None
        return sum(found.values()) if found or not self._window.tracks else None

    async def _receive_for_ever(self) -> None:
        while True:
            try:
                messages = await self._source.receive(_RECEIVE_LIMIT, _RECEIVE_SECONDS)
            except Outage as error:
                self._broker(error)
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            self._broker(None)
            if messages:
                self._take_in(messages)
                self._dispatch()
            self._job.report.summarise()
            # A source that always has messages would leave no time for anything else.
            await asyncio.sleep(0)

    def _broker(self, error: Outage | None) -> None:
        is_away = error is not None
        if is_away != self._is_away:
            said = f"is away ({error}); trying again until it answers" if is_away else "answers again"
            fields = self._job.subject.fields("source_down" if is_away else "source_up")
            self._log.warning("%s: %s %s", self._job.subject, self._source.description, said, extra=fields)
        self._is_away = is_away

    def _take_in(self, messages: Sequence[Message]) -> None:
        window, decode = self._window, self._job.decode
        track: Track | None = None
        touched = set()
        for message in messages:
            lane = message.lane
            if track is None or track.lane is not lane:
                track = window.tracks.get(lane)
                if track is None:
                    continue  # the lane went while its messages were on their way
                touched.add(track)
            if track.leaving:
                continue
            refusal = ""
            try:
                event = decode(message)
            except Exception as error:
                event, refusal = unreadable(message), self._refusal(error)
            size = len(message.body) + len(message.key or b"") + sum([len(value) for _, value in message.headers])
            window.add(track, message.position, event, size, message.written_at, refusal)
        for track in touched:
            if not track.paused and window.is_full(track):
                track.paused = True
                self._source.pause(track.lane)

    def _refusal(self, error: Exception) -> str:
        if isinstance(error, Reject):
            return str(error) or "the decoder rejected the message"
        if self._reminder.is_due(type(error).__name__):
            self._log.error(
                "%s: the decoder raised %s; such messages are dead letters",
                self._job.subject,
                type(error).__name__,
                exc_info=error,
                extra=self._job.subject.fields("decoder_failed"),
            )
        return f"the decoder raised {type(error).__name__}"

    def _fail(self, error: BaseException) -> None:
        """End the run with this error."""
        self._failure = self._failure or error
        self._stopping.set()

    def _dispatch(self) -> None:
        """Begin calls for the events that are ready."""
        try:
            self._begin_ready()
        except Exception as error:  # nobody awaits a timer or a callback
            self._fail(error)

    def _begin_ready(self) -> None:
        window, breaker = self._window, self.destination.breaker
        now = time.monotonic()
        window.wake_due(now)
        while window.has_ready and len(self._calls) < self.destination.features.calls and not self._stopping.is_set():
            if not breaker.allows(now):
                break
            queues = window.take(1 if breaker.probing else self._size.size)
            if window.has_refused:
                queues = self._without_refused(queues)
            if not queues:
                breaker.inconclusive()
                continue
            self._begin(self._call(queues), self._calls)
        self._set_timer(now)

    def _without_refused(self, queues: Sequence[Queue]) -> list[Queue]:
        rest = []
        for queue in queues:
            if queue.head.refusal:
                self._decide(Decision(queue, queue.head, rejected(queue.head.refusal)))
            else:
                rest.append(queue)
        return rest

    def _set_timer(self, now: float) -> None:
        """Dispatch again when a retry or a probe is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._window.next_due
        seconds = [] if due is None else [due - now]
        if self._window.has_ready and (wait := self.destination.breaker.seconds_left(now)):
            seconds.append(wait)
        if seconds and not self._stopping.is_set():
            self._timer = asyncio.get_running_loop().call_later(max(0.0, min(seconds)), self._dispatch)

    def _begin(self, work: Coroutine[Any, Any, None], running: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work, name=f"pillarbox-consumer-{self._job.name}")
        running.add(task)

        def end(task: asyncio.Task[None]) -> None:
            running.discard(task)
            self._moved.set()
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(error)
            elif not self._stopping.is_set():
                self._dispatch()

        task.add_done_callback(end)

    async def _call(self, queues: Sequence[Queue]) -> None:
        batch = Batch(self._job.name, [Part(None, 0, tuple(events_of(queues)))])
        begun = time.monotonic()
        outcomes = await self.destination.publish(batch)
        self._size.turned(len(batch), time.monotonic() - begun)
        self.destination.breaker.inconclusive()
        self._finished(queues, outcomes)

    def _finished(self, queues: Sequence[Queue], outcomes: Sequence[Outcome]) -> None:
        for decision in self._window.finish(queues, outcomes):
            self._decide(decision)
        self._settle({queue.track for queue in queues})

    def _settle(self, tracks: Iterable[Track]) -> None:
        window = self._window
        for track in tracks:
            position = window.settle(track)
            if position is None or track.gone:
                continue
            self._source.settle(track.lane, position)
            if track.paused and window.has_room(track):
                track.paused = False
                self._source.resume(track.lane)

    def _decide(self, decision: Decision) -> None:
        """What becomes of an event that was not published."""
        queue, entry, outcome = decision
        now = time.monotonic()
        if outcome.is_outage:
            self._window.again(queue)
            return
        if outcome.result is Result.UNTRIED:
            self._window.wait(queue, now + _UNTRIED_SECONDS)
            return
        event = entry.event
        failure, is_dead = self._job.rules.classify(event, outcome)
        entry.event = event._replace(attempts=failure.attempts)
        if not is_dead:
            if outcome.charged and len(entry.errors) < _MOST_ERRORS:
                entry.errors += (error_entry(failure.error, failure.attempts),)
            self._window.wait(queue, now + (failure.delay or 0.0))
            self._job.report.failed(failure, failure.delay, charged=outcome.charged)
        elif self._job.letters is None:
            self._window.wait(queue, now + _BLOCKED_SECONDS)
            self._job.report.blocked(failure, _BLOCKED_SECONDS)
        else:
            self._begin(self._bury(queue, failure, self._job.letters), self._burials)

    async def _bury(self, queue: Queue, failure: Failure, letters: Letters) -> None:
        wait, longest = _BURY_SECONDS
        is_new = False
        async with self._burial_places:
            while not queue.track.gone:
                try:
                    is_new = await letters.bury(failure, queue.head.errors)
                    break
                except (StoreDown, StoreError, Outage) as error:
                    if self._reminder.is_due("bury"):
                        self._log.error(
                            "%s: a dead event cannot be kept as a dead letter (%s); its key waits",
                            self._job.subject,
                            error,
                            extra=self._job.subject.fields("bury_failed", event_id=str(failure.event.id)),
                        )
                await asyncio.sleep(wait)
                wait = min(longest, wait * 2)
            else:
                self._window.again(queue)
                return
        if is_new:
            self._job.report.died(failure)
            self._job.observers.event_buried(self._job.name, failure.event)
        self._window.done(queue)
        self._settle([queue.track])

    async def _finish(self, deadline: Deadline) -> None:
        """End what runs, and tell the broker what is settled."""
        if self._timer is not None:
            self._timer.cancel()
        await self.destination.finish(set(self._calls), deadline)
        if self._burials:
            await asyncio.wait(set(self._burials), timeout=deadline.left(Step.SETTLE) / 2)
        for task in list(self._burials):
            await ended(task)
        self._is_over = True
        self._moved.set()
        self._job.report.summarise(at_once=True)
        await self._close_source(deadline.left(Step.SETTLE))

    async def _close_source(self, seconds: float) -> None:
        closing = asyncio.create_task(self._source.close(), name="pillarbox-close")
        if (await asyncio.wait([closing], timeout=seconds))[0]:
            with suppress(asyncio.CancelledError):
                if (error := closing.exception()) is not None:
                    self._log.error(
                        "%s: %s could not be closed (%s: %s); messages that were settled last may come again",
                        self._job.subject,
                        self._source.description,
                        type(error).__name__,
                        error,
                        extra=self._job.subject.fields("left_behind"),
                    )
            return
        self._log.error(
            "%s: %s cannot be closed and is left behind; messages that were settled last may come again",
            self._job.subject,
            self._source.description,
            extra=self._job.subject.fields("left_behind"),
        )
        closing.cancel()


def _names(lanes: Sequence[Lane]) -> str:
    names = sorted(lane.name for lane in lanes)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
