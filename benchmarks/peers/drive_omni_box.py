"""omni-box with the loop of its documentation: a transaction claims a batch, publishes it and marks it."""

import asyncio
import logging
import sys
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer
from omni_box import OutboxPublisher
from omni_box.core.converters import RawEventConverter
from omni_box.infra.brokers.kafka import KafkaEventPublisher
from omni_box.infra.storage.postgres import OutboxEventDBBase, PostgresOutboxRepository
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.peers.backlog import NUMBERED, TEXT, load

# Each event has its own instant, as with the library's writer.
_FILL = f"""INSERT INTO outbox_events (id, event_type, aggregate_type, aggregate_id, topic, partition_key, payload,
    status, attempts_made, max_attempts, scheduled_at, created_at)
    SELECT uuidv7(), 'order.created', 'order', gen_random_uuid(), '{{topic}}', key, ({{text}})::jsonb, 'pending', 0, 6,
        at, at FROM (SELECT *, now() - ($1 - n) * interval '1 microsecond' AS at FROM {NUMBERED}) AS timed"""


class Base(DeclarativeBase):
    """The declarative base, as in its documentation."""


class OutboxEvents(Base, OutboxEventDBBase):
    """The table."""


async def run(settings: dict[str, Any]) -> Clock:
    clock = Clock(settings["goal"])
    url = settings["url"].replace("postgresql:", "postgresql+asyncpg:")
    engine = create_async_engine(url, pool_size=settings["workers"])
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    fill = _FILL.format(topic=settings["topic"], text=TEXT)
    await load(settings["url"], "outbox_events", fill, settings["events"])
    producer = AIOKafkaProducer(bootstrap_servers=settings["servers"], acks="all", enable_idempotence=True)
    await producer.start()
    broker = KafkaEventPublisher(producer=producer, converter=RawEventConverter())
    sessions = async_sessionmaker(engine, expire_on_commit=False)

    async def work(name: str) -> None:
        while not clock.done.is_set():
            clock.begin()
            async with sessions() as session, session.begin():
                publisher = OutboxPublisher(PostgresOutboxRepository(session, model_class=OutboxEvents), broker)
                done = await publisher.publish_batch(worker_id=name, batch_size=settings["batch_size"])
            if done.failed_counted or done.failed_noncounted or done.commit_failed:
                raise RuntimeError("a batch failed")
            clock.settle(len(done.processed_event_ids))

    await asyncio.gather(*(work(f"worker-{number}") for number in range(settings["workers"])))
    await producer.stop()
    await engine.dispose()
    return clock


def main() -> None:
    # Standard output is for the answers.
    quiet = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=quiet, logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    answer(asyncio.run(run(settings_from_parent())).report())


if __name__ == "__main__":
    main()
