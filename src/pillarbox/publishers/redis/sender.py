"""One connection that publishes a batch: the events of a stream in transactions, each stored whole or not at all."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from pillarbox.batch import Batch
from pillarbox.envelopes import RedisMessage
from pillarbox.errors import ConfigError, Outage, PillarboxError
from pillarbox.event import Event
from pillarbox.publisher import UNTRIED, Outcome, outage, rejected, retry
from pillarbox.publishers._link import Link
from pillarbox.publishers._refusals import Refusals
from pillarbox.publishers._waves import Call, Runs
from pillarbox.publishers.redis.connection import RedisConnection, Server, said
from pillarbox.publishers.redis.messages import Posting, post
from pillarbox.publishers.redis.settings import NOT_TOLD, durability_problems, max_bytes_of, settings_of
from pillarbox.tasks import ended
from pillarbox.tls import reason_of

logger = logging.getLogger("pillarbox.publishers.redis")

CHUNK_EVENTS: Final = 1000
CHUNK_BYTES: Final = 1024 * 1024
TICK_SECONDS: Final = 0.5
QUIET_SECONDS: Final = 5.0
REFRESH_SECONDS: Final = 300.0
# Most transactions in flight at a close are confirmed within this time, and then need no copy.
GRACE_SECONDS: Final = 1.0
NO_STREAM: Final = (
    "the event has no topic, and stream='*' gives it none; give events a topic, or the publisher a default stream"
)
_LOST: Final = (RedisError, OSError, EOFError)
# What a server in such a state says first; then it takes nothing from anybody.
_DOWN: Final = ("MISCONF", "NOREPLICAS", "BUSY", "TRYAGAIN", "UNBLOCKED")


class Target:
    """Where events go and how, shared by all connections of a publisher."""

    def __init__(
        self,
        stream: str,
        message_of: Callable[[Event], RedisMessage],
        waiting: Link,
        *,
        durable: bool,
        replicas: int,
        maxlen: int,
        max_bytes: int,
    ) -> None:
        self.stream = stream
        self.message_of = message_of
        self.waiting = waiting
        self.refusals = Refusals(stream, waiting)
        self.durable = durable
        self.replicas = replicas
        self.maxlen = maxlen
        self.most_bytes = self.max_bytes = max_bytes
        self._fresh_until = 0.0

    async def look_up(self, connection: RedisConnection) -> None:
        """Learn the server's settings now and then. Raises ConfigError when it can lose what it confirms."""
        if time.monotonic() < self._fresh_until:
            return
        settings = await settings_of(connection)
        self.max_bytes = max_bytes_of(settings, self.most_bytes)
        problems = durability_problems(settings) if settings else [NOT_TOLD]
        if self.durable and problems:
            raise ConfigError(
                f"{connection.description} can lose confirmed events: {problems[0]}; or accept it with durable=false"
            )
        self._fresh_until = time.monotonic() + REFRESH_SECONDS

    def forget(self) -> None:
        """Learn again: a server that was started anew may have other settings."""
        self._fresh_until = 0.0

    def outcome(self, stream: str, error: ResponseError) -> Outcome:
        """Of events for a stream that the server refused."""
        name, kind, words = self.waiting.description, type(error).__name__, said(error)
        first = words.partition(" ")[0]
        if first == "WRONGTYPE":
            return self.refusals.refused(
                stream, f"{stream!r} on {name} is no stream; rename it, or name another stream ({words})"
            )
        if isinstance(error, NoPermissionError):
            return self.refusals.refused(stream, f"{name} refuses this user: {words}; give it the permission")
        if kind == "OutOfMemoryError":
            return outage(f"{name} has no memory left: {words}; read and trim its streams, or raise maxmemory")
        if kind in ("MovedError", "AskError"):
            return outage(f"{name} is a node of a cluster, and another node has {stream!r}; name a server of its own")
        if kind in ("ReadOnlyError", "ClusterDownError", "MasterDownError") or first in _DOWN:
            return outage(f"{name} takes no entries now: {words}")
        return retry(f"{name} refused the entry for {stream!r}: {words}", charged=False, ambiguous=True)


class Sender:
    """One connection, used by one call at a time. It is thrown away when the answer to a transaction is not known."""

    def __init__(self, server: Server, target: Target, *, connect_seconds: float, stuck_seconds: float) -> None:
        self._server = server
        self.target = target
        self.connect_seconds = connect_seconds
        self.stuck_seconds = stuck_seconds
        self.stop = asyncio.Event()
        self._connection: RedisConnection | None = None

    async def prepare(self) -> RedisConnection:
        """The open connection. Raises Outage when there can be none, and ConfigError when the server can lose what it
        confirms."""
        if self._connection is None or not self._connection.is_open:
            await self.drop()
            self._connection = await RedisConnection.connect(self._server, self.connect_seconds)
            self.target.forget()
        try:
            async with asyncio.timeout(self.connect_seconds):
                await self.target.look_up(self._connection)
        except ConfigError:
            raise
        except (TimeoutError, *_LOST) as error:
            await self.drop()
            raise Outage(f"{self._server.description} cannot be reached: {_lost_by(error)}") from error
        except asyncio.CancelledError:
            await self.drop()
            raise
        return self._connection

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
        work = begun.result()
        if isinstance(work, Outcome):
            return [work] * len(batch)
        try:
            return await work.run()
        finally:
            if work.unanswered or not work.connection.is_open:
                await self.drop()

    async def _begin(self, batch: Batch) -> "_Work | Outcome":
        try:
            return _Work(self, await self.prepare(), batch)
        except (Outage, ConfigError) as error:
            return outage(str(error))

    async def drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.abort()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _Work:
    """One call of ``publish``. Its transactions go one after the other, so that a lost answer lets nothing overtake."""

    def __init__(self, sender: Sender, connection: RedisConnection, batch: Batch) -> None:
        self._sender = sender
        self._target = sender.target
        self.connection = connection
        self._call = Call(batch)
        self._answers = 0
        self._lost_by = "the connection was lost"
        self._is_down = False
        # The events of the transaction that has no answer yet.
        self.unanswered: Sequence[int] = ()

    async def run(self) -> list[Outcome]:
        work = asyncio.create_task(self._publish())
        stopping = asyncio.create_task(self._sender.stop.wait())
        try:
            reason = await self._watch(work, stopping)
        finally:
            await ended(work)
            await ended(stopping)
        if self._call.any_confirmed:
            self._target.waiting.confirmed()
        name = self.connection.description
        for index in self.unanswered:
            self._call.record(index, UNTRIED if reason is None else outage(f"{name} {reason}"))
        return self._call.outcomes

    async def _watch(self, work: "asyncio.Task[None]", stopping: "asyncio.Task[bool]") -> str | None:
        """Wait for the end of the call. Returns why the last answer is missing; None: the publisher is closed."""
        quiet_since, answers = time.monotonic(), -1
        while True:
            await asyncio.wait((work, stopping), timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return f"closed the connection: {self._lost_by}"
            if stopping.done():
                await asyncio.wait((work,), timeout=GRACE_SECONDS)
                return None
            now = time.monotonic()
            if self._answers > answers:
                quiet_since, answers = now, self._answers
                continue
            quiet_seconds = now - quiet_since
            if quiet_seconds >= min(QUIET_SECONDS, self._sender.stuck_seconds):
                self._target.waiting.silent(quiet_seconds, None)
            if quiet_seconds >= self._sender.stuck_seconds:
                return f"confirmed nothing for {self._sender.stuck_seconds:g} s"

    async def _publish(self) -> None:
        left: Sequence[int] = range(len(self._call.events))
        try:
            while left and not self._is_over():
                postings, left = self._wave(left)
                for chunk in _chunks(postings):
                    await self._store([each for each in chunk if not self._call.is_behind_a_stop(each[0])])
        except _LOST as error:
            self._lost_by = _lost_by(error)

    def _is_over(self) -> bool:
        return self._is_down or self._sender.stop.is_set()

    def _wave(self, left: Sequence[int]) -> tuple[dict[str, list[tuple[int, Posting]]], list[int]]:
        """The events that can go now, by stream; and those whose key goes to another stream first."""
        runs, later = Runs(strict=False), []
        postings: dict[str, list[tuple[int, Posting]]] = {}
        for index in left:
            event = self._call.events[index]
            if self._call.is_behind_a_stop(index):
                continue
            posting = self._posting(event)
            stream = event.topic or self._target.stream
            if runs.must_wait(event.key, stream):
                later.append(index)
            elif isinstance(posting, Outcome):
                self._call.record(index, posting)
            else:
                postings.setdefault(stream, []).append((index, posting))
        return postings, later

    def _posting(self, event: Event) -> Posting | Outcome:
        target = self._target
        stream = event.topic or target.stream
        if not stream:
            return target.refusals.without_address(NO_STREAM)
        try:
            return post(event, stream, target.message_of, max_bytes=target.max_bytes, maxlen=target.maxlen)
        except PillarboxError as error:
            return rejected(str(error))
        except Exception as error:
            logger.debug("the envelope failed on event %s", event.id, exc_info=error)
            # Only the kind: the text might quote the payload.
            return rejected(f"the envelope or header builder failed with {type(error).__name__}; correct it")

    async def _store(self, chunk: Sequence[tuple[int, Posting]]) -> None:
        """Store a chunk for one stream."""
        if not chunk or self._is_over():
            return
        stream = chunk[0][1].stream
        indexes = self.unanswered = [index for index, _ in chunk]
        try:
            results = await self.connection.transaction([posting.command for _, posting in chunk])
        except ResponseError as error:
            results = [error] * len(chunk)
        copies = await self._copies() if self._target.replicas else 0
        self._answers += 1
        self.unanswered = ()
        for index, result in zip(indexes, results, strict=True):
            self._record(index, stream, result, copies)

    async def _copies(self) -> int:
        """The number of replicas that have all that this connection has written."""
        milliseconds = max(1, round(self._sender.stuck_seconds * 1000))
        return int(await self.connection.ask("WAIT", self._target.replicas, milliseconds))

    def _record(self, index: int, stream: str, result: Any, copies: int) -> None:
        target = self._target
        if isinstance(result, ResponseError):
            outcome = target.outcome(stream, result)
        elif copies < target.replicas:
            outcome = outage(f"{copies} of {target.replicas} replicas of {self.connection.description} have the event")
        else:
            target.refusals.accepted(stream)
            self._call.confirm(index)
            return
        self._is_down = self._is_down or outcome.is_outage
        self._call.record(index, outcome)


def _chunks(postings: dict[str, list[tuple[int, Posting]]]) -> "list[list[tuple[int, Posting]]]":
    """What shares a transaction: entries of one stream, not too many and not too large."""
    chunks = []
    for each in postings.values():
        chunk, size = list[tuple[int, Posting]](), 0
        for index, posting in each:
            if chunk and (len(chunk) == CHUNK_EVENTS or size + posting.size > CHUNK_BYTES):
                chunks.append(chunk)
                chunk, size = [], 0
            chunk.append((index, posting))
            size += posting.size
        chunks.append(chunk)
    return chunks


def _lost_by(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer"
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    return reason_of(cause) if isinstance(cause, OSError) else said(cause)
