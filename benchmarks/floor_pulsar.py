"""A bare drain with asyncpg and Pulsar's client: reads, publishes with the same safety, waits and settles."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pulsar

from benchmarks.child import answer, settings_from_parent
from benchmarks.floor_postgres import Floor
from benchmarks.wire import CONSTANT_HEADERS
from pillarbox.publishers.pulsar.hashing import java_hash

_CONSTANT = {name: value.decode() for name, value in CONSTANT_HEADERS}


class BareProducers:
    """A producer for each partition, with batches of one key, that wait for all confirmations."""

    def __init__(self, servers: str, topic: str) -> None:
        log = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
        self.client = pulsar.Client(f"pulsar://{servers}", logger=log, stats_interval_in_seconds=0)
        self.producers = [
            self.client.create_producer(
                name,
                send_timeout_millis=0,
                max_pending_messages=0,
                batching_enabled=True,
                batching_type=pulsar.BatchingType.KeyBased,
            )
            for name in self.client.get_topic_partitions(topic)
        ]

    def send(self, rows: list[Any]) -> None:
        """Send rows of id, key, instant and payload in order; returns when all are confirmed."""
        producers, count, confirmed, done = self.producers, len(self.producers), [0], threading.Event()

        def report(result: Any, _message_id: Any) -> None:
            if result.name == "Ok":
                confirmed[0] += 1
                if confirmed[0] == len(rows):
                    done.set()

        for event_id, key, occurred_at, payload in rows:
            headers = {
                "event_id": str(event_id), **_CONSTANT, "occurred_at": occurred_at.isoformat(), "aggregate_id": key
            }  # fmt: skip
            producers[java_hash(key) % count].send_async(payload, report, headers, key)
        for producer in producers:
            producer.flush()
        if not done.wait(60):
            raise RuntimeError(f"{len(rows) - confirmed[0]} of {len(rows)} events were not confirmed")


class PulsarFloor(Floor[BareProducers]):
    """A floor with producers and a thread for each slot."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.threads = ThreadPoolExecutor(settings["slots"])

    def destination(self) -> BareProducers:
        return BareProducers(self.settings["servers"], self.settings["topic"])

    async def send(self, destination: BareProducers, rows: list[Any]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.threads, destination.send, rows)


def main() -> None:
    floor = PulsarFloor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
