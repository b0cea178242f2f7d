"""Wake-ups: LISTEN on a connection of its own."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import asyncpg

from pillarbox.tasks import ended

log = logging.getLogger("pillarbox.stores.postgres")

_RETRY_SECONDS = 2.0
# A connection that was cut without a word receives nothing, and only a question shows it.
_ASK_SECONDS = 10.0
_ANSWER_SECONDS = 5.0


class PostgresListener:
    """Listens, and connects again when its connection is cut or does not answer; polling covers the gap."""

    def __init__(self, connect: Callable[[], Awaitable[Any]], name: str, channel: str) -> None:
        self._connect = connect
        self._name = name
        self._channel = channel
        self._on_wake: list[Callable[[str], None]] = []
        self._task: asyncio.Task[None] | None = None

    def start(self, on_wake: Callable[[str], None]) -> None:
        self._on_wake.append(on_wake)
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name="pillarbox-listen")

    async def stop(self) -> None:
        task, self._task = self._task, None
        self._on_wake.clear()
        if task is not None:
            await ended(task)

    def _notified(self, connection: Any, pid: int, channel: str, stream: object) -> None:
        for on_wake in self._on_wake:
            on_wake(str(stream))

    async def _listen(self) -> None:
        while True:
            closed = asyncio.Event()
            try:
                connection = await self._connect()
                try:
                    connection.add_termination_listener(partial(_set, closed))
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        await connection.add_listener(self._channel, self._notified)
                    while not await _is_set_within(closed, _ASK_SECONDS):
                        await connection.execute("SELECT 1", timeout=_ANSWER_SECONDS)
                finally:
                    connection.terminate()
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.warning(
                    "%s: cannot listen for wake-ups (%s); polling goes on until it can connect again",
                    self._name,
                    type(error).__name__,
                    extra={"action": "listen_failed"},
                )
            await asyncio.sleep(_RETRY_SECONDS)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def _set(event: asyncio.Event, connection: Any) -> None:
    event.set()
