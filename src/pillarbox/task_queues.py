"""Handlers that give events to a task queue: Celery, Dramatiq or Taskiq. The task's id is that of the event."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from pillarbox.errors import ConfigError, Outage
from pillarbox.event import Event

_AMQP: Final = ("amqp", "pyamqp", "amqps")
# Of a broker that is away, in each library's own words.
_AWAY: Final = ("OperationalError", "ConnectionError", "TimeoutError", "SendTaskError")


def send_to(task: Any, *, arguments: Callable[[Event], Sequence[Any]] | None = None) -> Callable[[Event], Any]:
    """A handler that sends a task for each event: ``handlers.on("order.created")(send_to(send_mail))``.

    The event counts as published when the task queue's broker has taken the task. If the broker is away, that is an
    outage. A copy of an event is a task with the same id and the same event id: let the task call ``inbox.record``.

    task: a Celery task, a Dramatiq actor, or a Taskiq task. arguments: those of the task; default: the id of the event
    as text, and its payload, read as JSON.
    """
    make = arguments or _arguments
    for kind in type(task).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in _SENDERS:
            return _SENDERS[package](task, make)
    raise ConfigError(
        f"send_to was given a {type(task).__name__}; pass a Celery task, a Dramatiq actor or a Taskiq task, decorated "
        "with @app.task, @dramatiq.actor or @broker.task"
    )


def _arguments(event: Event) -> Sequence[Any]:
    return str(event.id), event.json()


def _celery(task: Any, make: Callable[[Event], Sequence[Any]]) -> Callable[[Event], None]:
    def send(event: Event) -> None:
        _check_celery(task.app)
        given = make(event)
        try:
            task.apply_async(args=given, task_id=str(event.id))
        except Exception as error:
            raise _failure("Celery", error) from error

    return send


def _check_celery(app: Any) -> None:
    url = str(app.conf.broker_write_url or app.conf.broker_url or "amqp:")  # RabbitMQ is Celery's default
    confirms = (app.conf.broker_transport_options or {}).get("confirm_publish")
    if url.partition(":")[0] in _AMQP and not confirms and not app.conf.task_always_eager:
        raise Outage(  # the event is not to blame
            "Celery does not wait until RabbitMQ has taken a task, so that tasks could be lost; set "
            'app.conf.broker_transport_options = {"confirm_publish": True}'
        )


def _dramatiq(actor: Any, make: Callable[[Event], Sequence[Any]]) -> Callable[[Event], None]:
    def send(event: Event) -> None:
        message = actor.message(*make(event)).copy(message_id=str(event.id))
        try:
            actor.broker.enqueue(message)
        except Exception as error:
            raise _failure("Dramatiq", error) from error

    return send


def _taskiq(task: Any, make: Callable[[Event], Sequence[Any]]) -> Callable[[Event], Any]:
    async def send(event: Event) -> None:
        given = make(event)
        try:
            await task.kicker().with_task_id(str(event.id)).kiq(*given)
        except Exception as error:
            raise _failure("Taskiq", error) from error

    return send


def _failure(queue: str, error: Exception) -> Exception:
    if isinstance(error, OSError) or any(kind.__name__ in _AWAY for kind in type(error).__mro__):
        return Outage(f"the broker of {queue} does not take tasks: {type(error).__name__}")
    return error


_SENDERS: Final = {"celery": _celery, "dramatiq": _dramatiq, "taskiq": _taskiq}
