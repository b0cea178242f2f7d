"""A bare drain with asyncmy and confluent-kafka: the relay's work without the library, as fast as we can write it.

Table, shards, slots, batches, fences and the settle in one round trip are those of the store.
"""

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC
from typing import Any

import asyncmy
from asyncmy.constants.CLIENT import MULTI_STATEMENTS

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.wire import BareProducer
from pillarbox.stores.mysql.url import connect_settings

_OWNER, _TOKEN, _STREAM = "floor", 1, "default"
_LEASE = f"""INSERT INTO {{p}}_lease (stream, shard, owner, token, lease_until)
    VALUES ('{_STREAM}', {{shard}}, '{_OWNER}', {_TOKEN}, UTC_TIMESTAMP(6) + INTERVAL 1 HOUR)
    ON DUPLICATE KEY UPDATE owner = '{_OWNER}', token = {_TOKEN}"""
_FENCE = (
    f"FROM {{p}}_lease WHERE stream = '{_STREAM}' AND shard = {{shard}} AND token = {_TOKEN} AND owner = '{_OWNER}'"
)
_READ = f"""SELECT id, `key`, created_at, payload FROM {{p}}_event FORCE INDEX ({{p}}_ready)
    WHERE stream = '{_STREAM}' AND shard = {{shard}} AND status = 'pending' AND EXISTS (SELECT 1 {_FENCE})
    ORDER BY seq LIMIT {{batch}}"""
_SETTLE = f"""BEGIN; SET @held = (SELECT count(*) {_FENCE} LOCK IN SHARE MODE);
    UPDATE {{p}}_event FORCE INDEX (by_id) SET status = 'published', published_at = UTC_TIMESTAMP(6),
    attempts = attempts + 1
    WHERE id IN ({{ids}}) AND stream = '{_STREAM}' AND status = 'pending' AND @held = 1; COMMIT; SELECT @held"""


class Floor:
    """Slots that take shards from one queue, as in the relay."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.clock = Clock(settings["events"])
        self.shards = deque(range(settings["shards"]))
        self.threads = ThreadPoolExecutor(settings["slots"])

    async def run(self) -> None:
        slots = [await self._open() for _ in range(self.settings["slots"])]
        for shard in self.shards:
            await self._query(slots[0][0], _LEASE, shard=shard)
        await asyncio.gather(*(self._slot(connection, producer) for connection, producer in slots))
        for connection, _ in slots:
            connection.close()

    async def _open(self) -> tuple[Any, BareProducer]:
        settings = connect_settings(self.settings["url"])
        connection = await asyncmy.connect(**settings, autocommit=True, client_flag=MULTI_STATEMENTS)
        await connection.cursor().execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        return connection, BareProducer(self.settings["servers"], self.settings["topic"])

    async def _query(self, connection: Any, text: str, **values: Any) -> Any:
        cursor = connection.cursor()
        await cursor.execute(text.format(p=self.settings["prefix"], **values))
        while await cursor.nextset():
            pass
        return await cursor.fetchall()

    async def _slot(self, connection: Any, producer: BareProducer) -> None:
        batch, loop = self.settings["batch"], asyncio.get_running_loop()
        while self.shards and not self.clock.done.is_set():
            shard = self.shards.popleft()
            self.clock.begin()
            rows = await self._query(connection, _READ, shard=shard, batch=batch)
            if not rows:
                continue
            names = [row[0].hex() for row in rows]
            # The same header bytes as ours: ids with dashes, instants with a zone.
            sent = [
                (f"{i[:8]}-{i[8:12]}-{i[12:16]}-{i[16:20]}-{i[20:]}", row[1], row[2].replace(tzinfo=UTC), row[3])
                for i, row in zip(names, rows, strict=True)
            ]
            await loop.run_in_executor(self.threads, producer.send, sent)
            ids = ",".join([f"x'{name}'" for name in names])
            if list(await self._query(connection, _SETTLE, shard=shard, ids=ids)) != [(1,)]:
                raise RuntimeError("the lease is lost")
            self.clock.settle(len(rows))
            if len(rows) == batch:
                self.shards.append(shard)


def main() -> None:
    floor = Floor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
