"""txoutbox on PostgreSQL: batches of 1000, all keys of a batch at once, LISTEN, and one flush for each batch."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import asyncpg
from confluent_kafka import Producer
from txoutbox import Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.peers.backlog import BYTES, NUMBERED, load, told_to_stop
from benchmarks.wire import PRODUCER_SETTINGS

BATCH = 1000
TABLE = "tx_outbox"
_FILL = f"INSERT INTO {TABLE} (topic, key, payload) SELECT '{{topic}}', key, {{bytes}} FROM {NUMBERED}"


class TimedStorage:
    """A storage that reports its claims and acknowledgements to the clock."""

    def __init__(self, storage: Any, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def claim(self, **wanted: Any) -> Any:
        self._clock.begin()
        return await self._storage.claim(**wanted)

    async def ack(self, ids: Sequence[Any], *, worker_id: str) -> None:
        await self._storage.ack(ids, worker_id=worker_id)
        self._clock.settle(len(ids))


class OneFlush:
    """A publisher that flushes once for all messages of a batch."""

    def __init__(self, servers: str) -> None:
        self._producer: Any = Producer({**PRODUCER_SETTINGS, "bootstrap.servers": servers})
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[asyncio.Future[None]] = []
        self._flushes: set[asyncio.Task[None]] = set()
        self._errors: list[Any] = []

    async def publish(self, message: Any) -> None:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # All tasks of the batch run before this one.
            loop.call_soon(self._flush_soon)
        confirmed = loop.create_future()
        self._waiting.append(confirmed)
        self._producer.produce(message.topic, message.payload, message.key.encode(), -1, self._report)
        await confirmed

    def _flush_soon(self) -> None:
        waiting, self._waiting = self._waiting, []
        flush = asyncio.create_task(self._flush(waiting))
        self._flushes.add(flush)
        flush.add_done_callback(self._flushes.discard)

    async def _flush(self, waiting: list[asyncio.Future[None]]) -> None:
        left = await asyncio.get_running_loop().run_in_executor(self._thread, self._producer.flush, 60)
        wrong = bool(left or self._errors)
        for confirmed in waiting:
            if not confirmed.done():
                if wrong:
                    confirmed.set_exception(RuntimeError(f"not everything was confirmed: {self._errors[:1]}"))
                else:
                    confirmed.set_result(None)

    def _report(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._errors.append(error)


async def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Publish a backlog; without one, run until told to stop."""
    events = settings.get("events", 0)
    clock = Clock(settings.get("goal", 0))
    pool = await asyncpg.create_pool(settings["url"])
    storage = PostgresStorage(pool, table=TABLE, notify_channel="tx_outbox_new")
    await storage.create_schema()
    await load(settings["url"], TABLE, _FILL.format(topic=settings["topic"], bytes=BYTES), events)
    config = RelayConfig(batch_size=BATCH, concurrency=BATCH)
    relay = Relay(TimedStorage(storage, clock) if events else storage, OneFlush(settings["servers"]), config=config)
    listener = await storage.listen(relay.wake)
    serving = asyncio.create_task(relay.run())
    if events:
        await clock.done.wait()
    else:
        answer({"ready": True})
        await told_to_stop()
    relay.stop()
    await serving
    await listener.close()
    await pool.close()
    return clock.report() if events else {}


def main() -> None:
    answer(asyncio.run(run(settings_from_parent())))


if __name__ == "__main__":
    main()
