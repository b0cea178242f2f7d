"""The running handlers of a publisher."""

import asyncio
import logging
from typing import Any

from pillarbox.publisher import UNTRIED, Outcome, retry
from pillarbox.publishers._calls import Handler

logger = logging.getLogger("pillarbox.publishers.handlers")


class Session:
    """The state from one ``open`` to its ``close``."""

    def __init__(self, concurrency: int) -> None:
        self.closing = False
        self.is_cut = False  # ``close`` waits no longer
        self._waiting: set[asyncio.Future[None]] = set()
        self._places = asyncio.Semaphore(concurrency)
        self._running = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    async def __aenter__(self) -> None:
        """Wait for a place to run a handler in."""
        await self._places.acquire()
        self._running += 1
        self._quiet.clear()

    async def __aexit__(self, *_: object) -> None:
        self._places.release()
        self._running -= 1
        if not self._running:
            self._quiet.set()

    async def wait(self, call: asyncio.Future[Any], timeout: float | None) -> None:
        """Return when the call is done, its time is up, or ``close`` waits no longer."""
        # asyncio.wait would cost more than most handlers.
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(_: object = None) -> None:
            if not waiter.done():
                waiter.set_result(None)

        timer = None if timeout is None else loop.call_later(timeout, wake)
        call.add_done_callback(wake)
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)
            if not call.done():
                call.remove_done_callback(wake)
            if timer is not None:
                timer.cancel()

    def unfinished(self, handler: Handler) -> Outcome:
        if self.is_cut:
            return UNTRIED
        return retry(
            f"handler {handler.name} did not finish within {handler.timeout_seconds:g} s", limits=handler.limits
        )

    async def close(self, grace_seconds: float) -> None:
        self.closing = True
        try:
            async with asyncio.timeout(grace_seconds):
                await self._quiet.wait()
        except TimeoutError:
            logger.warning("%d handlers did not finish within %g s of closing", self._running, grace_seconds)
        finally:
            self.is_cut = True
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
        await self._quiet.wait()
