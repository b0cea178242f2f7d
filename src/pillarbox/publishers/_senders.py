"""Senders that block, each with a thread of its own: one call of ``publish`` at a time has a sender."""

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from pillarbox.event import Event
from pillarbox.publisher import UNTRIED, Outcome
from pillarbox.threads import Thread, finished


class Sender(Protocol):
    """Delivers the events of one call after the other. ``stop`` asks a running call to end soon."""

    stop: threading.Event

    def deliver(self, events: Sequence[Event]) -> list[Outcome]: ...

    def close(self) -> None: ...


class Senders:
    """Open senders of one publisher; used until they are closed, and then never again."""

    def __init__(self, senders: Sequence[Sender], name: str) -> None:
        self._all = [(sender, Thread(f"pillarbox-{name}-{number}")) for number, sender in enumerate(senders, 1)]
        self._free: asyncio.LifoQueue[tuple[Sender, Thread]] = asyncio.LifoQueue()
        for pair in self._all:
            self._free.put_nowait(pair)
        self._is_closed = False

    async def deliver(self, events: Sequence[Event]) -> list[Outcome]:
        """One outcome per event, once a sender is free."""
        if self._is_closed:
            return [UNTRIED] * len(events)
        pair = sender, thread = await self._free.get()
        try:
            if sender.stop.is_set():  # closed while this call waited for its turn
                return [UNTRIED] * len(events)
            # The sender is free only when its thread is done, even if this call is cancelled.
            return await finished(thread.submit(partial(sender.deliver, events)), sender.stop.set)
        except asyncio.CancelledError:
            if not self._is_closed:
                sender.stop.clear()
            raise
        finally:
            self._free.put_nowait(pair)

    async def close(self) -> None:
        """Ask all to end, and close each when its call has ended. Safe to call again after a cancellation."""
        self._is_closed = True
        for sender, _ in self._all:
            sender.stop.set()
        while self._all:
            pair = sender, thread = await self._free.get()
            self._all.remove(pair)
            # Ending a client may block, so it happens in the sender's thread.
            await finished(thread.submit(sender.close))
            thread.stop()
