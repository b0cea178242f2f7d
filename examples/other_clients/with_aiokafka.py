"""An inbox below aiokafka: the offset is committed after the transaction."""

import json

import asyncpg
from aiokafka import AIOKafkaConsumer

from pillarbox import Inbox

inbox = Inbox("counter")


async def count_orders(kafka: str, topic: str, pool: asyncpg.Pool) -> None:
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka, group_id="counter", enable_auto_commit=False, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        async for message in consumer:
            event_id = dict(message.headers)["event_id"].decode()
            async with pool.acquire() as tx, tx.transaction():
                if await inbox.record(tx, event_id):
                    cents = json.loads(message.value)["cents"]
                    await tx.execute("UPDATE total SET orders = orders + 1, cents = cents + $1", cents)
            await consumer.commit()
    finally:
        await consumer.stop()
