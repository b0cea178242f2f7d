"""The middleware for ASGI: it owns the transaction of a request, and sends no answer before the commit."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pillarbox.errors import ConfigError, NotInTransaction
from pillarbox.idempotency import reply as replies
from pillarbox.idempotency.reply import Refused, Reply
from pillarbox.idempotency.requests import Asked, from_asgi
from pillarbox.tasks import ended

if TYPE_CHECKING:
    from pillarbox.idempotency.idempotency import Idempotency

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("pillarbox.idempotency")

METHODS: Final = ("POST", "PUT", "PATCH", "DELETE")
_IN_SCOPE: Final = "pillarbox.idempotency"


class Disconnected(Exception):
    """The client has gone before its answer was complete: nothing is committed and nothing is sent."""


class Middleware:
    """Serves the requests of some paths and methods; all others pass."""

    def __init__(self, once: "Idempotency", app: App, paths: Collection[str], methods: Collection[str]) -> None:
        for setting, value in (("paths", paths), ("methods", methods)):
            if isinstance(value, str):
                raise ConfigError(f"{setting} is {value!r}; pass a list of them")
        self._once = once
        self._app = app
        self._paths = [path.rstrip("/") for path in paths]
        self._methods = frozenset(method.upper() for method in methods)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in self._methods or not self._has(scope["path"]):
            await self._app(scope, receive, send)
            return
        exchange = Exchange(self._app, scope, receive, self._once.answer_limit)
        try:
            key = await self._once.key_of(
                _request(scope), Asked(from_asgi(scope), exchange.body(self._once.body_limit))
            )
        except Refused as refused:
            await _send(refused.reply, send)
            return
        except Disconnected:
            return
        scope[_IN_SCOPE] = {**scope.get(_IN_SCOPE, {}), self._once: exchange}
        try:
            reply = await self._once.serve(key, exchange.answer)
        except Disconnected:
            return
        except BaseException as error:
            await exchange.stop()
            if exchange.reply is not None and isinstance(error, Exception):
                await _send(replies.FAILED, send)  # in place of the application's answer
            raise
        if reply is exchange.reply:
            await exchange.deliver(send)
        else:
            await exchange.stop()
            await _send(reply, send)

    def _has(self, path: str) -> bool:
        return any(path == each or path.startswith(f"{each}/") for each in self._paths)


class Exchange:
    """One request: its transaction, and the application's messages, which are held back until the commit.

    The application runs in a task of its own, so that a cancellation inside of it cannot break the commit.
    """

    def __init__(self, app: App, scope: Scope, receive: Receive, limit: int) -> None:
        self.reply: Reply | None = None
        self._app = app
        self._scope = scope
        self._receive = receive
        self._limit = limit
        self._body: bytes | None = None  # to be received by the application
        self._held: list[Message] = []
        self._size = 0
        self._task: asyncio.Task[None] | None = None
        self._answered = asyncio.get_running_loop().create_future()
        self._sent = asyncio.Event()
        self._failure: Exception | None = None  # of the sending
        self._tx: Any = None

    @property
    def tx(self) -> Any:
        if self._tx is None:
            raise NotInTransaction(
                "the transaction of this request has ended with its answer; use one of your own for later work"
            )
        return self._tx

    def body(self, limit: int) -> Callable[[], Awaitable[bytes]]:
        """A function that reads the request's body, which the application can then receive again."""

        async def read() -> bytes:
            parts, size, has_more = [], 0, True
            while has_more:
                message = await self._receive()
                if message["type"] != "http.request":
                    raise Disconnected
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                has_more = message.get("more_body", False)
                if size > limit:
                    raise Refused(replies.too_large(limit))
            self._body = b"".join(parts)
            return self._body

        return read

    async def answer(self, tx: Any) -> Reply:
        """Run the application until its answer is complete."""
        self._tx = tx
        # The application must not send a file by its path, or anything else that cannot be held back.
        extensions = self._scope.get("extensions") or {}
        self._scope["extensions"] = {name: each for name, each in extensions.items() if "response" not in name}
        self._task = asyncio.create_task(self._run())
        try:
            await asyncio.wait([self._task, self._answered], return_when=asyncio.FIRST_COMPLETED)
            if self.reply is not None:
                return self.reply
            if self._size > self._limit:
                log.error(
                    "the answer to %s %s has more than %d bytes and was rolled back; raise answer_limit, or take the "
                    "path out of the middleware's paths",
                    self._scope["method"],
                    self._scope["path"],
                    self._limit,
                    extra={"action": "answer_too_large"},
                )
                raise Refused(replies.answer_too_large(self._limit))
            await self._task
            raise Disconnected
        except BaseException:
            await self.stop()
            raise
        finally:
            self._tx = None

    async def _run(self) -> None:
        await self._app(self._scope, self._receive_again, self._hold)

    async def _receive_again(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _hold(self, message: Message) -> None:
        if self._answered.done():
            raise RuntimeError("the application has sent a message after its answer was complete")
        self._held.append(message)
        if message["type"] == "http.response.body":
            self._size += len(message.get("body", b""))
            is_too_large = self._size > self._limit
            if is_too_large or not message.get("more_body", False):
                if not is_too_large:
                    self.reply = self._complete()
                self._answered.set_result(None)
                await self._sent.wait()  # background tasks begin after the commit
                if self._failure is not None:
                    raise self._failure

    def _complete(self) -> Reply:
        start, *bodies = self._held
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start.get("headers", ())]
        return Reply(start["status"], b"".join([each.get("body", b"") for each in bodies]), headers)

    async def deliver(self, send: Send) -> None:
        """Send the answer, then let the application go on to its end."""
        assert self._task is not None
        try:
            for message in self._held:
                await send(message)
        except Exception as error:  # the client has gone; the application may want to know
            self._failure = error
        self._sent.set()
        await self._task

    async def stop(self) -> None:
        """End the application. Its answer is not sent, so its background tasks must not run."""
        if self._task is not None:
            await ended(self._task)


def transaction_of(once: "Idempotency", scope: Scope) -> Any:
    """The handle of the transaction of a request."""
    exchange: Exchange | None = scope.get(_IN_SCOPE, {}).get(once)
    if exchange is None:
        raise NotInTransaction(
            "this request has no transaction, because the middleware does not serve it; add its path to paths and its "
            "method to methods where you add once.middleware"
        )
    return exchange.tx


def _request(scope: Scope) -> Any:
    """The request for the caller's function ``scope``: of Starlette, if the application uses it, else ASGI's scope."""
    if "starlette.requests" in sys.modules:
        from starlette.requests import Request

        return Request(scope)
    return scope


async def _send(reply: Reply, send: Send) -> None:
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
