"""The peer of the rows `peer-faststream-...`: FastStream with confluent-kafka, and an inbox by hand."""

import asyncio
from typing import Any
from uuid import UUID

import asyncpg
from faststream.confluent import KafkaBroker, KafkaMessage

from benchmarks.clock import Clock
from benchmarks.consume import BATCH, CONSUMER, EFFECT, EFFECTS, PLACES, ids_of
from benchmarks.consume_bare import RECORD, RECORDS


async def faststream(settings: dict[str, Any], clock: Clock) -> None:
    broker: Any = KafkaBroker(settings["servers"], logger=None)
    pool = await asyncpg.create_pool(settings["url"], min_size=PLACES, max_size=PLACES)
    group = {"group_id": settings["topic"], "auto_offset_reset": "earliest"}
    kind = settings["kind"]
    if kind == "batch":

        async def all_(bodies: list[Any], message: KafkaMessage) -> None:
            clock.begin()
            raw: Any = message.raw_message
            ids = [UUID(dict(each.headers())["event_id"].decode()) for each in raw]
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute(EFFECTS, ids_of(await connection.fetch(RECORDS, CONSUMER, ids)))
            clock.settle(len(ids))

        broker.subscriber(settings["topic"], batch=True, max_records=BATCH, **group)(all_)
    else:

        async def each(body: Any, message: KafkaMessage) -> None:
            clock.begin()
            if kind == "single":
                event_id = UUID(message.headers["event_id"])
                async with pool.acquire() as connection, connection.transaction():
                    if await connection.execute(RECORD, CONSUMER, event_id) == "INSERT 0 1":
                        await connection.execute(EFFECT, event_id)
            clock.settle(1)

        broker.subscriber(settings["topic"], **group)(each)
    await broker.start()
    await clock.done.wait()
    await broker.stop()
    await pool.close()
    await asyncio.sleep(0)
