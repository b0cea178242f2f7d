"""Faults on MongoDB: failing commands, and a store that is stopped between two of its steps."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandListener, CommandStartedEvent

from pillarbox.stores.mongo import database
from tests.integration.relays import WAIT
from tests.servers import Mongo

ALWAYS = "alwaysOn"


@contextmanager
def failing(server: Mongo, *commands: str, times: int | str = 1, **how: Any) -> Iterator[None]:
    """So many of these commands fail: ``closeConnection=True``, ``errorCode=91``, ``writeConcernError={...}``."""
    mode = times if isinstance(times, str) else {"times": times}
    data = {"failCommands": list(commands), **how}
    server.admin({"configureFailPoint": "failCommand", "mode": mode, "data": data})
    try:
        yield
    finally:
        server.admin({"configureFailPoint": "failCommand", "mode": "off"})


class Pause:
    """A store stops where it calls one of its own methods, until it is let go."""

    def __init__(self, store: Any, patch: pytest.MonkeyPatch, name: str, *, after: bool = False) -> None:
        self._reached = asyncio.Event()
        self.go = asyncio.Event()
        self._real = getattr(store, name)
        self._after = after
        patch.setattr(store, name, self)

    async def reached(self) -> None:
        async with asyncio.timeout(WAIT):
            await self._reached.wait()

    async def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._after:
            answer = await self._real(*arguments, **named)
            await self._stop()
            return answer
        await self._stop()
        return await self._real(*arguments, **named)

    async def _stop(self) -> None:
        self._reached.set()
        await self.go.wait()


class Recorder(CommandListener):
    """The commands that clients send which are opened from here on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent: list[dict[str, Any]] = []

        def client(*arguments: Any, **named: Any) -> Any:
            return AsyncMongoClient(*arguments, event_listeners=[self], **named)

        patch.setattr(database, "AsyncMongoClient", client)

    def started(self, event: CommandStartedEvent) -> None:
        self.sent.append(dict(event.command))

    def succeeded(self, event: Any) -> None:
        """Only what is sent matters."""

    def failed(self, event: Any) -> None:
        """Only what is sent matters."""

    def take(self, name: str) -> list[dict[str, Any]]:
        """The commands of this name since the last call; all others are forgotten."""
        found = [command for command in self.sent if next(iter(command)) == name]
        self.sent.clear()
        return found
