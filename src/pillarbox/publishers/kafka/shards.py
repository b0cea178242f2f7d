"""The transactional producers of the shards that a worker owns, and the threads that they work in."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from pillarbox.batch import Batch
from pillarbox.publisher import UNTRIED, Outcome, Place
from pillarbox.publishers.kafka.transactions import ShardProducer
from pillarbox.threads import Thread, finished

T = TypeVar("T")


class ShardProducers:
    """Used until it is closed, and then never again. calls: how many producers work at once."""

    def __init__(self, make: Callable[[Place], ShardProducer], calls: int) -> None:
        self._make = make
        self._open: dict[tuple[str, int], ShardProducer] = {}
        self._calls = calls
        self._free: asyncio.LifoQueue[Thread] = asyncio.LifoQueue()
        for number in range(calls):
            self._free.put_nowait(Thread(f"pillarbox-kafka-{number + 1}"))
        self._closing = Thread("pillarbox-kafka-closing")
        self._is_closed = False

    async def recover(self, place: Place) -> bytes:
        """See ``Publisher.recover``."""
        found = self._open.get((place.stream, place.shard))
        if found is None or found.place.token != place.token or found.stop.is_set():
            if found is not None:
                self._retire(found)
            found = self._open[place.stream, place.shard] = self._make(place)
        return await self._run(found, found.recover)

    async def deliver(self, batch: Batch) -> list[Outcome]:
        """One outcome per event. Each part has a transaction of its own."""
        outcomes: list[Outcome] = []
        for part in batch.parts:
            producer = None if part.shard is None else self._open.get((batch.stream, part.shard))
            if producer is None or self._is_closed:
                outcomes += [UNTRIED] * len(part.events)
            else:
                outcomes += await self._run(producer, partial(producer.deliver, part))
        return outcomes

    def leave(self, place: Place) -> None:
        """See ``Publisher.leave``."""
        found = self._open.get((place.stream, place.shard))
        if found is not None and found.place.token == place.token:
            del self._open[place.stream, place.shard]
            self._retire(found)

    def _retire(self, producer: ShardProducer) -> None:
        producer.stop.set()
        # To end a client may block.
        self._closing.submit(producer.close)

    async def _run(self, producer: ShardProducer, call: Callable[[], T]) -> T:
        thread = await self._free.get()
        try:
            return await finished(thread.submit(call), producer.stop.set)
        finally:
            self._free.put_nowait(thread)

    async def close(self) -> None:
        """Ask all to end, and close them when their calls have ended. Safe to call again after a cancellation."""
        self._is_closed = True
        for producer in self._open.values():
            producer.stop.set()
        while self._calls:
            thread = await self._free.get()
            self._calls -= 1
            if not self._calls:
                for producer in self._open.values():
                    await finished(thread.submit(producer.close))
                self._open.clear()
                self._closing.stop()
            thread.stop()
