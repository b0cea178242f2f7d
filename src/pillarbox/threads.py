"""Threads for blocking calls that may never return."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Thread:
    """One thread that runs calls in order.

    It is a daemon. The interpreter joins the threads of a ThreadPoolExecutor at exit, so that one hung call would keep
    the whole process from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call. Cancelling its future works until it has begun."""
        future: Future[T] = Future()
        context = contextvars.copy_context()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = context.run(call)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(run)
        return future

    def stop(self) -> None:
        """End the thread once the calls before this one are done."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            # A thread that waits for its next call must not keep the event of the last one alive.
            del call


async def finished(call: Future[T], on_cancel: Callable[[], None] | None = None) -> T:
    """The result of a call in a thread. A caller that is cancelled leaves only when the call has ended, because a call
    that has begun cannot be stopped; ``on_cancel`` may ask it to end soon.

    Without a shield, which takes one more round of the event loop for each call."""
    try:
        return await asyncio.wrap_future(call)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        ending = asyncio.wrap_future(call)
        while not ending.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([ending])
        if not ending.cancelled():
            ending.exception()  # nobody else asks for it
        raise


class Threads:
    """Threads that are kept for the next call, so that thread-local connections live on.

    A thread whose call does not return in time is left behind. It is counted in ``hung`` until it returns, and is never
    used again.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._made = 0
        self._idle: list[Thread] = []
        self._lock = threading.Lock()
        self._hung = 0

    @property
    def hung(self) -> int:
        return self._hung

    def take(self) -> Thread:
        """An idle thread or a new one. Give it back or leave it behind."""
        if self._idle:
            return self._idle.pop()
        self._made += 1
        return Thread(f"{self._name}-{self._made}")

    def give_back(self, thread: Thread) -> None:
        self._idle.append(thread)

    def leave_behind(self, thread: Thread, call: Future[T]) -> None:
        """Let the thread end by itself when its call returns, if ever."""
        self._count(1)
        call.add_done_callback(lambda _: self._count(-1))
        thread.stop()

    def stop_idle(self) -> None:
        while self._idle:
            self._idle.pop().stop()

    def _count(self, change: int) -> None:
        # The event loop's thread calls this, and so do the hung threads.
        with self._lock:
            self._hung += change
