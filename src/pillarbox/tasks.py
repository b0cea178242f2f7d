"""Tasks that have to end."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

_AGAIN_SECONDS: Final = 1.0


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, whatever it ends with.

    Asked once, a task can go on: Python 3.11's ``wait_for`` loses a cancellation that comes together with its result,
    and a driver can make an error of its own of it, which a loop takes for one more failure.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_SECONDS)


async def to_its_end(work: Awaitable[T]) -> T:
    """What must not stay half done, or be done nobody knows when: whoever is called back, however often, waits for its
    end before he goes."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise
