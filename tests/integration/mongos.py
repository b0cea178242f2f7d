"""Faults on MongoDB: commands that fail, and a store that stops between two of its commands."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.monitoring import CommandListener, CommandStartedEvent

from pillarbox.stores.mongo import MongoStore, clients
from servers import Mongo
from tests.integration.relays import WAIT

ALWAYS = "alwaysOn"


@contextmanager
def failing(
    server: Mongo, *commands: str, times: int | str = 1, **how: Any
) -> Iterator[Callable[[], Awaitable[object]]]:
    """Make so many of these commands fail: ``closeConnection=True``, ``errorCode=91``, ``writeConcernError={...}``.

    Yields a function that waits until the first of them has failed.
    """
    mode = times if isinstance(times, str) else {"times": times}
    data = {"failCommands": list(commands), **how}
    before = server.admin({"configureFailPoint": "failCommand", "mode": mode, "data": data})["count"]
    first = {"waitForFailPoint": "failCommand", "timesEntered": before + 1, "maxTimeMS": int(WAIT * 1000)}
    try:
        yield lambda: asyncio.to_thread(server.admin, first, timeout=WAIT)
    finally:
        server.admin({"configureFailPoint": "failCommand", "mode": "off"})


class Pause:
    """Stops a store before or after it calls a method of one of its collections, until ``go`` is set."""

    def __init__(
        self, store: MongoStore, patch: pytest.MonkeyPatch, collection: str, method: str, *, after: bool = False
    ) -> None:
        self._reached = asyncio.Event()
        self.go = asyncio.Event()
        mine = store.database.collection(collection)
        real = getattr(AsyncCollection, method)

        async def call(called: Any, *arguments: Any, **named: Any) -> Any:
            # Two stores on one outbox have clients of their own.
            is_mine = called == mine and called.database.client is mine.database.client
            if is_mine and not after:
                await self._stop()
            answer = await real(called, *arguments, **named)
            if is_mine and after:
                await self._stop()
            return answer

        patch.setattr(AsyncCollection, method, call)

    async def reached(self) -> None:
        async with asyncio.timeout(WAIT):
            await self._reached.wait()

    async def _stop(self) -> None:
        self._reached.set()
        await self.go.wait()


class Recorder(CommandListener):
    """Records the commands of clients that are opened from here on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent: list[dict[str, Any]] = []

        def client(*arguments: Any, **named: Any) -> Any:
            return AsyncMongoClient(*arguments, event_listeners=[self], **named)

        patch.setattr(clients, "AsyncMongoClient", client)

    def started(self, event: CommandStartedEvent) -> None:
        self.sent.append(dict(event.command))

    def succeeded(self, event: Any) -> None:
        """Only commands are recorded."""

    def failed(self, event: Any) -> None:
        """Only commands are recorded."""

    def take(self, name: str) -> list[dict[str, Any]]:
        """The commands of this name since the last call; all others are forgotten."""
        found = [command for command in self.sent if next(iter(command)) == name]
        self.sent.clear()
        return found
