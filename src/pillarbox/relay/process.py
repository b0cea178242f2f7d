"""A relay or a consumer as a process of its own: its name, its signals and its garbage collection."""

import asyncio
import gc
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from pillarbox.relay.readiness import Readiness


def worker_name(name: str | None = None) -> str:
    """Unique to this start of this process: a restarted worker must not be taken for the one that died.

    name: its first part; default: the host's name."""
    return f"{name or socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


async def run_until_asked(
    start: Callable[[], Awaitable[None]],
    stop: Callable[[], Awaitable[None]],
    readiness: Callable[[], Readiness],
    failed: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Run until SIGTERM or SIGINT, as the only task of this process. readiness: asked after the start.

    Raises an error that no waiting mends, if it comes before the program serves. failed: raises an error that ends the
    program later."""
    with relaxed_gc():
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked.set)
        try:
            await start()
            await _serve_until(asked, readiness(), failed)
        finally:
            # A second Ctrl-C ends the process at once; a second SIGTERM changes nothing.
            loop.remove_signal_handler(signal.SIGINT)
            await stop()
            loop.remove_signal_handler(signal.SIGTERM)


async def _serve_until(
    asked: asyncio.Event, readiness: Readiness, failed: Callable[[], Awaitable[None]] | None
) -> None:
    readiness.tells_errors = False
    signalled = asyncio.create_task(asked.wait())
    tasks = [signalled, asyncio.ensure_future(readiness.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not asked.is_set():
            tasks[1].result()
            readiness.tells_errors = True
            if failed is not None:
                tasks.append(asyncio.ensure_future(failed()))
            await asyncio.wait([signalled, *tasks[2:]], return_when=asyncio.FIRST_COMPLETED)
            if not asked.is_set():
                tasks[2].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Collect garbage less often: events come and go by the thousand and form no cycles."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
