"""One connection that publishes a batch: one unconfirmed event for each key, keys side by side."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Final

from nats.aio.msg import Msg
from nats.errors import Error

from pillarbox.batch import Batch
from pillarbox.envelopes import NatsMessage
from pillarbox.errors import Outage, PillarboxError
from pillarbox.event import Event
from pillarbox.publisher import UNTRIED, Outcome, outage, rejected, retry
from pillarbox.publishers._link import Link
from pillarbox.publishers.keyed import Cursor, KeyedBatch
from pillarbox.publishers.nats.answers import NO_SUBJECT, Answers
from pillarbox.publishers.nats.connection import NatsConnection, Server
from pillarbox.publishers.nats.messages import Posting, post
from pillarbox.publishers.nats.streams import never_confirms, stream_of
from pillarbox.tasks import ended

logger = logging.getLogger("pillarbox.publishers.nats")

WINDOW: Final = 500
TICK_SECONDS: Final = 0.5
QUIET_SECONDS: Final = 5.0
REFRESH_SECONDS: Final = 300.0
# Most messages in flight at a close are confirmed within this time, and then need no copy.
GRACE_SECONDS: Final = 1.0
_NO_RESPONDERS: Final = "503"


class Ending(Enum):
    """The end of the wait for a call's confirmations."""

    ANSWERED = auto()
    STOPPED = auto()
    LOST = auto()
    STUCK = auto()  # silent for a part of the events
    SILENT = auto()


class Target:
    """Where events go, shared by all connections of a publisher."""

    def __init__(self, subject: str, stream: str, message_of: Callable[[Event], NatsMessage], waiting: Link) -> None:
        self.subject = subject
        self.stream = stream
        self.message_of = message_of
        self.waiting = waiting
        self.answers = Answers(subject, waiting)
        self._fresh_until = 0.0
        self._problem: str | None = None

    def subject_of(self, event: Event) -> str:
        """Empty: the event has none."""
        return event.routing_key or event.topic or self.subject

    async def look_up(self, connection: NatsConnection, seconds: float) -> None:
        """Learn now and then what the stream of the default subject does. Raises Outage when it confirms nothing."""
        if self.subject and time.monotonic() >= self._fresh_until:
            self._fresh_until, self._problem = time.monotonic() + REFRESH_SECONDS, None
            try:
                found = await stream_of(connection, self.subject, seconds)
            except Outage as error:
                # Publishing tells more: a user may be allowed to publish, and not to ask.
                logger.debug("%s", error)
            else:
                self._problem = None if found is None else never_confirms(found.config)
        if self._problem is not None:
            self._fresh_until = 0.0
            raise Outage(f"{connection.description}: {self._problem}")


class Sender:
    """One connection, used by one call at a time. It is thrown away when the answer to a message is not known, because
    nothing else takes back what the server has not read."""

    def __init__(self, server: Server, target: Target, *, connect_seconds: float, stuck_seconds: float) -> None:
        self._server = server
        self.target = target
        self.connect_seconds = connect_seconds
        self.stuck_seconds = stuck_seconds
        self.stop = asyncio.Event()
        self._connection: NatsConnection | None = None

    async def connect(self) -> NatsConnection:
        """The open connection. Raises Outage when there can be none."""
        if self._connection is None or not self._connection.is_open:
            await self.drop()
            self._connection = await NatsConnection.connect(self._server, self.connect_seconds)
        return self._connection

    async def prepare(self) -> NatsConnection:
        """Connect, and ask about the stream. Raises Outage when it confirms nothing."""
        connection = await self.connect()
        await self.target.look_up(connection, self.connect_seconds)
        return connection

    async def deliver(self, batch: Batch) -> list[Outcome]:
        """One outcome per event. Returns soon after ``stop`` is set."""
        begun, stopping = asyncio.create_task(self._begin(batch)), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait((begun, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(stopping)
            if not begun.done():
                await ended(begun)
                await self.drop()
        if begun.cancelled():
            return [UNTRIED] * len(batch)
        call = begun.result()
        if isinstance(call, Outcome):
            return [call] * len(batch)
        try:
            return await call.run()
        finally:
            if call.unanswered or not call.connection.is_open:
                await self.drop()

    async def _begin(self, batch: Batch) -> "_Call | Outcome":
        try:
            return _Call(self, await self.prepare(), batch)
        except Outage as error:
            return outage(str(error))

    async def drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.abort()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _Call:
    """One call of ``publish``. An answer names the next event of its key: no event has a task or a future."""

    def __init__(self, sender: Sender, connection: NatsConnection, batch: Batch) -> None:
        self._sender = sender
        self._target = sender.target
        self.connection = connection
        self._keyed = KeyedBatch(batch)
        self._cursors = 0  # that have an event on its way, or look for the next one
        self._done = asyncio.Event()
        self._number = 0
        self._confirmed = 0
        self._copies = 0
        self._answers = 0
        # The events that were sent and have no answer yet.
        self.unanswered: dict[str, tuple[Cursor, str]] = {}

    async def run(self) -> list[Outcome]:
        self.connection.answered, self.connection.refused = self._answered, self._refused
        work = asyncio.create_task(self._fill())
        waits = [asyncio.create_task(each.wait()) for each in (self._done, self.connection.closed, self._sender.stop)]
        try:
            ending = await self._watch(waits)
        finally:
            for task in (work, *waits):
                await ended(task)
        if self._confirmed:
            self._target.waiting.confirmed()
        if self._copies:
            logger.info(
                "%s: %d events of %d were in their stream already and were not stored again",
                self.connection.description,
                self._copies,
                len(self._keyed.events),
                extra={
                    "action": "copies_dropped",
                    "destination": self.connection.description,
                    "events": self._copies,
                },
            )
        for cursor, _ in self.unanswered.values():
            cursor.record(self._outcome(ending))
        return self._keyed.outcomes

    async def _fill(self) -> None:
        cursors = min(WINDOW, self._keyed.keys)
        self._cursors = cursors
        for _ in range(cursors):
            await self._send(self._keyed.cursor())

    async def _send(self, cursor: Cursor) -> None:
        """Send the next event of this cursor. What needs no answer is settled here."""
        while (event := cursor.event) is not None and not self._sender.stop.is_set():
            posting = self._posting(event)
            if isinstance(posting, Outcome):
                cursor.record(posting)
                continue
            self._number += 1
            token = str(self._number)
            self.unanswered[token] = cursor, posting.subject
            try:
                await self.connection.publish(posting.subject, posting.body, posting.headers, token)
            except (Error, TypeError, ValueError, AttributeError) as error:
                if not self.connection.is_open:
                    return  # ``run`` finds out what this means for the event
                del self.unanswered[token]
                logger.debug("the client cannot write event %s", event.id, exc_info=error)
                cursor.record(rejected(f"NATS's protocol has no form for a header or a field ({type(error).__name__})"))
                continue
            return
        self._cursors -= 1
        if not self._cursors:
            self._done.set()

    def _posting(self, event: Event) -> Posting | Outcome:
        target = self._target
        subject = target.subject_of(event)
        if not subject:
            return target.answers.without_address(NO_SUBJECT)
        try:
            return post(event, subject, target.message_of, stream=target.stream, max_bytes=self.connection.max_bytes)
        except PillarboxError as error:
            return rejected(str(error))
        except Exception as error:
            logger.debug("the envelope failed on event %s", event.id, exc_info=error)
            # Only the kind: the text might quote the payload.
            return rejected(f"the envelope or header builder failed with {type(error).__name__}; correct it")

    async def _answered(self, token: str, message: Msg) -> None:
        cursor, subject = self.unanswered.pop(token, (None, ""))
        if cursor is None:
            return  # of an earlier call
        self._answers += 1
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            cursor.record(self._target.answers.not_stored(subject))
        else:
            outcome, is_copy = self._target.answers.of_answer(subject, message.data)
            self._confirmed += outcome.error is None
            self._copies += is_copy
            cursor.record(outcome)
        await self._send(cursor)

    async def _refused(self, sentence: str) -> None:
        """The server takes no message for a subject from this user. It names the subject in lower case."""
        found = [token for token, (_, subject) in self.unanswered.items() if f'"{subject.lower()}"' in sentence]
        reason = f"{self.connection.description} refuses this user: {sentence}; give it the permission"
        for token in found:
            cursor, subject = self.unanswered.pop(token)
            self._answers += 1
            cursor.record(self._target.answers.refused(subject, reason))
            await self._send(cursor)

    async def _watch(self, waits: Sequence["asyncio.Task[Any]"]) -> Ending:
        """Wait for the end of the call. While the server is silent, find out why."""
        done, closed, stopping = waits
        stuck_seconds = self._sender.stuck_seconds
        quiet_since, answers = time.monotonic(), -1
        while True:
            await asyncio.wait(waits, timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return Ending.ANSWERED
            # The client does not always tell that it has closed a connection.
            if closed.done() or not self.connection.is_open:
                return Ending.LOST
            if stopping.done():
                await asyncio.wait((done, closed), timeout=GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                return Ending.STOPPED if self.unanswered else Ending.ANSWERED
            now = time.monotonic()
            if self._answers > answers:
                quiet_since, answers = now, self._answers
                continue
            quiet_seconds = now - quiet_since
            if quiet_seconds < min(QUIET_SECONDS, stuck_seconds):
                continue
            self._target.waiting.silent(quiet_seconds, None)
            if quiet_seconds >= stuck_seconds:
                answers_now = await self.connection.answers(self._sender.connect_seconds)
                return Ending.STUCK if answers_now and self._confirmed else Ending.SILENT

    def _outcome(self, ending: Ending) -> Outcome:
        """Of an event without an answer."""
        name, seconds = self.connection.description, self._sender.stuck_seconds
        if ending is Ending.STOPPED:
            return UNTRIED
        if ending is Ending.STUCK:
            return retry(
                f"{name} confirmed nothing for {seconds:g} s on this event's subject, though it did on others; tried "
                "again later",
                charged=False,
            )
        if ending is Ending.SILENT:
            return outage(f"{name} confirmed nothing for {seconds:g} s")
        return outage(f"{name} closed the connection: {self.connection.lost_by}")
