"""faststream-outbox with the relay of its quick start: a Kafka publisher sends the answers of an outbox subscriber.

The handler's response has a key, which the quick start leaves out. Both brokers log nothing.
"""

import asyncio
from typing import Any

from faststream.kafka import KafkaBroker, KafkaResponse
from faststream_outbox import OutboxBroker, make_outbox_table
from faststream_outbox.annotations import OutboxMessage
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.peers.backlog import BYTES, NUMBERED, load

_TABLE = "faststream_outbox"
_FILL = f"""INSERT INTO {_TABLE} (queue, payload, headers) SELECT 'orders', {BYTES}, jsonb_build_object(
    'content-type', 'application/json', 'correlation_id', gen_random_uuid()::text, 'key', key) FROM {NUMBERED}"""


async def run(settings: dict[str, Any]) -> Clock:
    clock, options = Clock(settings["goal"]), settings["options"]
    workers = options.get("max_workers", 1)
    url = settings["url"].replace("postgresql:", "postgresql+asyncpg:")
    engine = create_async_engine(url, pool_size=workers + 1)
    metadata = MetaData()
    table = make_outbox_table(metadata, table_name=_TABLE)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await load(settings["url"], _TABLE, _FILL, settings["events"])

    def note(event: str, tags: Any) -> None:
        if event == "fetched" and tags["count"]:
            clock.begin()
        elif event == "acked":
            clock.settle(1)

    outbox = OutboxBroker(engine, outbox_table=table, metrics_recorder=note, logger=None)
    kafka = KafkaBroker(settings["servers"], acks="all", enable_idempotence=True, logger=None)

    @kafka.publisher(settings["topic"])
    @outbox.subscriber("orders", **options)
    async def relay(body: dict[str, Any], message: OutboxMessage) -> KafkaResponse:
        return KafkaResponse(body, key=message.headers["key"].encode())

    await kafka.connect()
    await outbox.start()
    await clock.done.wait()
    await outbox.stop()
    await kafka.stop()
    await engine.dispose()
    return clock


def main() -> None:
    answer(asyncio.run(run(settings_from_parent())).report())


if __name__ == "__main__":
    main()
