"""Tasks: end one for sure, or run one to completion."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Final, TypeVar

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
