"""The decorator for views of Django."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from django.http import HttpResponse

from pillarbox.drivers.contract import finish
from pillarbox.drivers.django import Database
from pillarbox.errors import ConfigError
from pillarbox.idempotency.reply import Refused, Reply
from pillarbox.idempotency.requests import asked_of

if TYPE_CHECKING:
    from pillarbox.idempotency.idempotency import Idempotency

View = Callable[..., Any]


def decorated(once: "Idempotency", database: Any, view: View) -> View:
    """The view, run once for each key, in a transaction of its own."""
    if not isinstance(database, Database):
        raise ConfigError(
            "once.view is for sessions of Django; make it with Idempotency(connections, scope=...), where connections "
            "is django.db.connections"
        )
    name = getattr(view, "__qualname__", type(view).__qualname__)
    if inspect.iscoroutinefunction(view):
        raise ConfigError(f"the view {name} is async, and Django's transactions are not; write `def {name}`")

    @wraps(view)
    def once_view(request: Any, *arguments: Any, **options: Any) -> Any:
        given: Any = None
        reply: Reply | None = None

        async def work(_tx: Any) -> Reply:
            nonlocal given, reply
            given = view(request, *arguments, **options)
            reply = _reply(given, name)
            return reply

        sent = finish(_serve(once, request, work))
        if sent is reply:
            return given
        return HttpResponse(sent.body, status=sent.status, headers=dict(sent.headers))

    # With ATOMIC_REQUESTS Django would begin before it, and commit after it.
    others: frozenset[str] = frozenset(getattr(view, "_non_atomic_requests", ()))
    vars(once_view)["_non_atomic_requests"] = others | {database.alias}
    return once_view


async def _serve(once: "Idempotency", request: Any, work: Callable[[Any], Any]) -> Reply:
    try:
        key = await once.key_of(request, asked_of(request, once.body_limit))
    except Refused as refused:
        return refused.reply
    return await once.serve(key, work)


def _reply(response: Any, name: str) -> Reply:
    if hasattr(response, "render") and callable(response.render):
        response.render()  # of a template, while its transaction is open
    if getattr(response, "streaming", False) or not isinstance(response, HttpResponse):
        raise ConfigError(
            f"the view {name} returned a {type(response).__name__}, which cannot be stored; return an HttpResponse or "
            "a JsonResponse"
        )
    return Reply(response.status_code, response.content, list(response.items()))
