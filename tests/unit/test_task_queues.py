"""Events given to task queues, whose own brokers in memory take them."""

import asyncio
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
import taskiq
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from taskiq.exceptions import SendTaskError

from pillarbox import Handlers, Outbox
from pillarbox.errors import ConfigError, Outage
from pillarbox.task_queues import send_to
from pillarbox.testing import deliver

EVENT = Outbox().event("order.created", {"id": 7})
Taken = list[tuple[Any, ...]]


def celery_app(url: str = "memory://") -> Celery:
    return Celery("shop", broker=url, set_as_current=False)


def test_celery_gets_tasks() -> None:
    app, taken = celery_app(), Taken()
    app.conf.task_always_eager = True

    @app.task(bind=True)
    def send_mail(self: Any, event_id: str, order: dict[str, Any]) -> None:
        taken.append((self.request.id, event_id, order))

    asyncio.run(deliver(send_to(send_mail), EVENT))
    assert taken == [(str(EVENT.id), str(EVENT.id), {"id": 7})]


def test_celery_must_wait_for_rabbitmq() -> None:
    app = celery_app("amqp://nobody@127.0.0.1:1//")

    @app.task(name="send")
    def task(event_id: str, order: Any) -> None: ...

    with pytest.raises(Outage, match=r'broker_transport_options = \{"confirm_publish": True\}'):
        asyncio.run(deliver(send_to(task), EVENT))
    app.conf.broker_transport_options = {"confirm_publish": True}
    app.conf.task_publish_retry = False
    with pytest.raises(Outage, match="the broker of Celery does not take tasks: OperationalError"):
        asyncio.run(deliver(send_to(task), EVENT))


def test_dramatiq_gets_messages() -> None:
    broker = StubBroker()

    def send_mail(order: dict[str, Any]) -> None: ...

    actor = dramatiq.actor(broker=broker)(send_mail)
    asyncio.run(deliver(send_to(actor, arguments=lambda event: [event.json()]), EVENT))
    message = dramatiq.Message.decode(broker.queues["default"].get_nowait())
    assert (message.message_id, message.args) == (str(EVENT.id), ({"id": 7},))


def test_taskiq_gets_tasks() -> None:
    broker, taken = taskiq.InMemoryBroker(), Taken()

    @broker.task
    async def send_mail(event_id: str, order: dict[str, Any]) -> None:
        taken.append((event_id, order))

    handlers = Handlers()
    handlers.on("order.created")(send_to(send_mail))

    async def run() -> None:
        await deliver(handlers, EVENT)
        await broker.wait_all()
        assert await broker.result_backend.is_result_ready(str(EVENT.id))
        await broker.shutdown()

    asyncio.run(run())
    assert taken == [(str(EVENT.id), {"id": 7})]


@pytest.mark.parametrize("error", [SendTaskError(), ConnectionError("refused")])
def test_a_broker_that_is_away_is_an_outage(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = taskiq.InMemoryBroker()

    async def kick(message: Any) -> None:
        raise error

    monkeypatch.setattr(broker, "kick", kick)
    task: Callable[..., Any] = broker.task("send")(lambda event_id, order: None)
    with pytest.raises(Outage, match="the broker of Taskiq does not take tasks"):
        asyncio.run(deliver(send_to(task), EVENT))


def test_a_plain_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="send_to was given a function; pass a Celery task"):
        send_to(lambda event: None)
