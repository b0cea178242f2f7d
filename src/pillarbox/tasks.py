"""Tasks: end one for sure, or run one to completion; objects of asyncio in more than one event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_AGAIN_SECONDS: Final = 1.0


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end. Its result or error is dropped.

    One cancellation may not be enough: Python 3.11's ``wait_for`` loses one that comes together with its result, and a
    driver can turn it into an error of its own, which a loop takes for one more failure.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_SECONDS)


async def run_to_completion(work: Awaitable[T]) -> T:
    """Finish even if the caller is cancelled. The cancellation is raised when the work is done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


class PerLoop(Generic[T]):
    """An object for the running event loop; another loop gets a new one.

    A lock or an event of asyncio belongs to the first loop in which somebody waited for it. An object that outlives its
    loop (``asyncio.run`` twice, a loop for each test) could not be used again."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> T:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._made = loop, self._make()
        return self._made
