"""Tasks that are cancelled, and a driver that turns a cancellation into an error of its own."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pillarbox.errors import StoreDown
from pillarbox.stores.mongo.wake import Watcher
from pillarbox.tasks import ended, run_to_completion

pytestmark = pytest.mark.asyncio


async def test_a_task_that_loses_its_first_cancellation_still_ends() -> None:
    cancelled = 0

    async def deaf() -> None:
        nonlocal cancelled
        while cancelled < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled += 1

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await ended(task)
    assert cancelled == 2


class Changes:
    """A database and its change stream that raise the driver's error instead of the cancellation."""

    def __init__(self) -> None:
        self.opened = 0

    @contextmanager
    def errors(self) -> Iterator[None]:
        yield

    def collection(self, name: str) -> "Changes":
        return self

    async def watch(self, pipeline: Any) -> "Changes":
        self.opened += 1
        return self

    async def __aenter__(self) -> "Changes":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    def __aiter__(self) -> "Changes":
        return self

    async def __anext__(self) -> Any:
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise StoreDown("connection closed") from None


async def test_a_change_stream_that_loses_its_cancellation_does_not_keep_the_worker() -> None:
    changes: Any = Changes()
    watcher = Watcher(changes)
    watcher.listen(lambda stream: None)
    async with asyncio.timeout(20):
        await watcher.doze("default", "worker", True)
        await watcher.doze("default", "worker", False)
    assert changes.opened == 1


async def test_a_transaction_runs_to_completion_although_it_is_cancelled_three_times() -> None:
    goes_on = asyncio.Event()
    done: list[str] = []

    async def work() -> None:
        await goes_on.wait()
        done.append("committed")

    task = asyncio.create_task(run_to_completion(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    goes_on.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert done == ["committed"]
