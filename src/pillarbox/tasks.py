"""Tasks that have to end."""

import asyncio
from typing import Any, Final

_AGAIN_SECONDS: Final = 1.0


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, whatever it ends with.

    Asked once, a task can go on: Python 3.11's ``wait_for`` loses a cancellation that comes together with its result,
    and a driver can make an error of its own of it, which a loop takes for one more failure.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_SECONDS)
