"""Tasks that are cancelled, and a driver that turns a cancellation into an error of its own."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from pillarbox.errors import StoreDown
from pillarbox.stores.mongo.wake import Watcher
from pillarbox.tasks import ended, run_to_completion
from pillarbox.threads import Thread, finished

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
        self.watched = 0
        self.opened = SimpleNamespace(client=AsyncMongoClient[Any](connect=False))

    @contextmanager
    def errors(self) -> Iterator[None]:
        yield

    def collection(self, name: str) -> "Changes":
        return self

    async def watch(self, pipeline: Any, max_await_time_ms: int) -> "Changes":
        self.watched += 1
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
    assert changes.watched == 1


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


async def test_a_caller_that_is_cancelled_waits_for_the_thread_and_hears_no_error_of_it() -> None:
    thread, begun, ends = Thread("test"), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        ends.wait(20)
        raise RuntimeError("too late")

    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    task = asyncio.create_task(finished(thread.submit(call), lambda: told.append("cancelled")))
    await asyncio.to_thread(begun.wait, 20)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    ends.set()
    await asyncio.wait([task])
    thread.stop()
    assert task.cancelled()
    del task
    gc.collect()
    assert told == ["cancelled"]


async def test_a_call_that_has_not_begun_is_cancelled_with_its_caller() -> None:
    thread, ends = Thread("test"), threading.Event()
    done: list[int] = []
    busy = thread.submit(lambda: ends.wait(20))
    task = asyncio.create_task(finished(thread.submit(lambda: done.append(1))))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    ends.set()
    await asyncio.wrap_future(busy)
    await asyncio.wrap_future(thread.submit(lambda: None))
    thread.stop()
    assert task.cancelled()
    assert not done
