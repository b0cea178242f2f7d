"""A bare drain with sqlite3 and confluent-kafka: the relay's work without the library, as fast as we can write it."""

import asyncio
import json
import sqlite3
import threading
from collections import deque
from datetime import UTC, datetime
from typing import Any

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.wire import BareProducer

_OWNER, _TOKEN, _STREAM = "floor", 1, "default"
_LEASE = """INSERT INTO outbox_lease (stream, shard, owner, token, lease_until)
    VALUES (?, ?, ?, ?, strftime('%Y-%m-%d %H:%M:%f', 'now', '1 hour'))
    ON CONFLICT (stream, shard) DO UPDATE SET owner = excluded.owner, token = excluded.token"""
_FENCE = "SELECT 1 FROM outbox_lease WHERE stream = ? AND shard = ? AND token = ? AND owner = ?"
_READ = f"""SELECT id, key, created_at, payload FROM outbox_event INDEXED BY outbox_ready
    WHERE stream = ? AND shard = ? AND status = 'pending' AND EXISTS ({_FENCE}) ORDER BY seq LIMIT ?"""
_MARK = """UPDATE outbox_event SET status = 'published', published_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    attempts = attempts + 1 WHERE id IN (SELECT value FROM json_each(?)) AND stream = ? AND status = 'pending'"""


class Floor:
    """Slots are threads. They share one connection, because SQLite has one writer anyway."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.clock = Clock(settings["events"])
        self.shards = deque(range(settings["shards"]))
        self.lock = threading.Lock()
        self.connection = sqlite3.connect(
            settings["url"].removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False
        )
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        for shard in self.shards:
            self.connection.execute(_LEASE, (_STREAM, shard, _OWNER, _TOKEN))

    async def run(self) -> None:
        settings = self.settings
        producers = [BareProducer(settings["servers"], settings["topic"]) for _ in range(settings["slots"])]
        await asyncio.gather(*(asyncio.to_thread(self._slot, producer) for producer in producers))
        self.connection.close()

    def _slot(self, producer: BareProducer) -> None:
        batch = self.settings["batch"]
        while True:
            with self.lock:
                if not self.shards:
                    return
                shard = self.shards.popleft()
                self.clock.begin()
                fence = (_STREAM, shard, _TOKEN, _OWNER)
                found = self.connection.execute(_READ, (_STREAM, shard, *fence, batch)).fetchall()
            if not found:
                continue
            producer.send([(event_id, key, _instant(at), payload) for event_id, key, at, payload in found])
            with self.lock:
                self._settle(fence, json.dumps([row[0] for row in found]))
                self.clock.settle(len(found))
                if len(found) == batch:
                    self.shards.append(shard)

    def _settle(self, fence: tuple[Any, ...], ids: str) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        if not self.connection.execute(_FENCE, fence).fetchall():
            raise RuntimeError("the lease is lost")
        self.connection.execute(_MARK, (ids, _STREAM))
        self.connection.execute("COMMIT")


def _instant(text: str) -> datetime:
    # The same header bytes as ours: instants with a zone.
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def main() -> None:
    floor = Floor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
