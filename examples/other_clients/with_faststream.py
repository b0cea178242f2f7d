"""An inbox below a FastStream subscriber: it only needs the id that stands in the message's headers."""

from typing import Any

from faststream import AckPolicy
from faststream.confluent import KafkaBroker, KafkaMessage
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pillarbox import Inbox


def mailer(kafka: str, topic: str, engine: AsyncEngine) -> KafkaBroker:
    broker, inbox = KafkaBroker(kafka), Inbox("mailer")

    @broker.subscriber(topic, group_id="mailer", auto_offset_reset="earliest", ack_policy=AckPolicy.NACK_ON_ERROR)
    async def plan_mail(order: dict[str, Any], message: KafkaMessage) -> None:
        async with engine.begin() as tx:
            if await inbox.record(tx, message.headers["event_id"]):
                await tx.execute(text("INSERT INTO mail VALUES (:id)"), {"id": order["id"]})

    return broker
