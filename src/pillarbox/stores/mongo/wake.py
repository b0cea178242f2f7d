"""Wake-up by a change stream. It is open only while a worker sleeps, so it costs nothing under load."""

import asyncio
import logging
import time
from collections.abc import Callable

from pillarbox.errors import PillarboxError
from pillarbox.stores.mongo.clients import Client
from pillarbox.stores.mongo.database import MongoDatabase
from pillarbox.tasks import ended

log = logging.getLogger("pillarbox.stores.mongo")

_RETRY_SECONDS = 2.0
# How long the server waits for an event before it answers that there is none. An event ends the wait.
_AWAIT_SECONDS = 5.0
# After an answer the next question waits, so that frequent events share an answer: one wake-up is enough for all of
# them. A change that took less time was in the last answer.
_BETWEEN_SECONDS = 0.004
_AT_HAND_SECONDS = 0.0002
_INSERTS = [{"$match": {"operationType": "insert"}}, {"$project": {"stream": "$fullDocument.stream"}}]


class Watcher:
    """One change stream for all sleeping workers of a store. Polls find the events that it misses.

    The driver resumes it after a lost connection or an election. If its position is no longer in the oplog, or after
    any other error, it is opened again and every sleeper polls once.
    """

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database
        self._on_wake: list[Callable[[str], None]] = []
        self._sleepers: set[tuple[str, str]] = set()
        self._task: asyncio.Task[None] | None = None

    def listen(self, on_wake: Callable[[str], None]) -> None:
        if on_wake not in self._on_wake:
            self._on_wake.append(on_wake)

    async def doze(self, stream: str, worker: str, asleep: bool) -> None:
        """Once this returns, an event that is added wakes the sleeper, unless the server cannot be reached."""
        if not asleep:
            self._sleepers.discard((stream, worker))
            if not self._sleepers:
                await self.stop()
            return
        self._sleepers.add((stream, worker))
        if self._task is None and self._on_wake:
            opened = asyncio.Event()
            self._task = asyncio.create_task(self._watch(opened), name="pillarbox-watch")
            # Also if it is stopped before it begins: else this would wait forever.
            self._task.add_done_callback(lambda _: opened.set())
            await opened.wait()

    async def close(self) -> None:
        """Forget sleepers and listeners."""
        self._sleepers.clear()
        self._on_wake.clear()
        await self.stop()

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await ended(task)

    async def _watch(self, opened: asyncio.Event) -> None:
        # Not `while True`: in an outage the driver can turn a cancellation into an error of its own.
        while self._task is asyncio.current_task():
            try:
                await self._watch_once(opened)
            except PillarboxError as error:
                log.info("the change stream is opened again: %s", error, extra={"action": "watch_again"})
            except Exception:
                log.exception("the change stream failed and is opened again", extra={"action": "watch_again"})
            opened.set()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _watch_once(self, opened: asyncio.Event) -> None:
        with self._db.errors():
            events = self._db.collection("event")
            async with await events.watch(_INSERTS, max_await_time_ms=_await_ms(self._db.opened.client)) as changes:
                opened.set()
                # Events may have come before it was open: a poll finds them.
                for stream in {stream for stream, _ in self._sleepers}:
                    self._wake(stream)
                asked = time.monotonic()
                async for change in changes:
                    self._wake(change["stream"])
                    if time.monotonic() - asked > _AT_HAND_SECONDS:
                        await asyncio.sleep(_BETWEEN_SECONDS)
                    asked = time.monotonic()

    def _wake(self, stream: str) -> None:
        for on_wake in self._on_wake:
            on_wake(stream)


def _await_ms(client: Client) -> int:
    """A client of the application may give up earlier: an answer in half of its time limit comes before that."""
    limits = (client.options.timeout, client.options.pool_options.socket_timeout)
    return int(1000 * min([_AWAIT_SECONDS, *(limit / 2 for limit in limits if limit)]))
