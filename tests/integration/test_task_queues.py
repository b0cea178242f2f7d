"""Tasks that a relay gives to task queues on real servers."""

import json
from typing import Any
from uuid import uuid4

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.redis import RedisBroker

from pillarbox import Event, Handlers, Outbox, Relay, Stream
from pillarbox.stores.memory import MemoryStore
from pillarbox.task_queues import send_to
from servers import RabbitMQ, Valkey


async def relayed(handlers: Handlers) -> Event:
    """Publish an event by a relay with these handlers."""
    store, event = MemoryStore(), Outbox().event("order.created", {"id": 7})
    await store.migrate()
    async with Relay(store, Stream("default", to=handlers)) as relay:
        await store.add([event])
        await relay.drain()
    await store.close()
    return event


@pytest.mark.asyncio
async def test_rabbitmq_has_the_task_of_celery(rabbitmq: RabbitMQ) -> None:
    app = Celery("shop", broker=rabbitmq.url, set_as_current=False)
    app.conf.update(
        task_default_queue=f"celery-{uuid4().hex}",
        task_default_queue_type="quorum",
        broker_transport_options={"confirm_publish": True},
    )

    @app.task
    def send_mail(event_id: str, order: dict[str, int]) -> None: ...

    handlers = Handlers()
    handlers.on("order.created")(send_to(send_mail))
    event = await relayed(handlers)
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue].bind(connection.channel())
        message: Any = queue.get(no_ack=True)
        queue.delete()
    assert message.headers["id"] == str(event.id)
    assert json.loads(message.body)[0] == [str(event.id), {"id": 7}]
    app.close()


@pytest.mark.asyncio
async def test_redis_has_the_message_of_dramatiq(valkey: Valkey) -> None:
    make: Any = RedisBroker  # without types
    broker = make(url=valkey.url, namespace=f"dramatiq-{uuid4().hex}")

    @dramatiq.actor(broker=broker)
    def send_mail(event_id: str, order: dict[str, int]) -> None: ...

    handlers = Handlers()
    handlers.on("order.created")(send_to(send_mail))
    event = await relayed(handlers)
    message = next(iter(broker.consume("default", timeout=100)))
    assert message is not None
    assert (message.message_id, message.args) == (str(event.id), (str(event.id), {"id": 7}))
    broker.close()
