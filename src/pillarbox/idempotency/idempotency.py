"""Runs a request once for each key: the class that applications use."""

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import cached_property, partial
from importlib import import_module
from typing import Any, Final

from pillarbox.drivers import Driver, driver_of
from pillarbox.drivers.contract import Build, finish, settled
from pillarbox.errors import ConfigError, NotInTransaction, PillarboxError
from pillarbox.idempotency import reply as replies
from pillarbox.idempotency import sql
from pillarbox.idempotency.keys import checked_scope, digest, parsed
from pillarbox.idempotency.middleware import METHODS, App, Middleware, Scope, transaction_of
from pillarbox.idempotency.reply import Refused, Reply, reply_of, stored_headers
from pillarbox.idempotency.requests import Asked, asked_of
from pillarbox.idempotency.work import Answer, Claim, Key, Stored
from pillarbox.names import Names
from pillarbox.observe import Observer, Observers
from pillarbox.sql.dialects import ErrorKind
from pillarbox.tasks import PerLoop

log = logging.getLogger("pillarbox.idempotency")

_TEMPORARY: Final = (ErrorKind.CONFLICT, ErrorKind.AWAY)


class Idempotency:
    """Gives a request with an ``Idempotency-Key`` one effect: key, data, events and answer commit together.

    sessions: begins the transactions: an engine, a sessionmaker, a pool, PyMongo's client, or a function that opens a
    connection. scope: called with the request; returns text that names the caller, such as a user's id, because without
    it one caller could read another's answers; None: the request has no key. required: refuse a request without a key.
    body_limit, answer_limit: the most bytes of a request's and of an answer's body. concurrency: the most requests that
    have a transaction at the same time; default: half of the pool, so that handlers which need a second connection do
    not wait for each other. prefix, schema: where the tables are. observers: learn what became of each request.
    """

    def __init__(
        self,
        sessions: Any,
        *,
        scope: Callable[[Any], str | Awaitable[str | None] | None],
        required: bool = False,
        body_limit: int = 1_000_000,
        answer_limit: int = 1_000_000,
        concurrency: int | None = None,
        prefix: str = "outbox",
        schema: str | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        for setting, value in (
            ("body_limit", body_limit),
            ("answer_limit", answer_limit),
            ("concurrency", concurrency),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{setting} is {value}; use a number above 0")
        self._driver = driver_of(sessions)
        if not self._driver.is_pool:
            raise ConfigError(
                f"a {type(sessions).__qualname__} cannot begin a transaction for each request; pass an engine, a "
                "sessionmaker, a pool, a MongoDB client, Django's connections, or a function that opens a connection"
            )
        self._names = Names(prefix, schema)
        self._observers = Observers(observers)
        self._scope = scope
        self._required = required
        self.body_limit = body_limit
        self.answer_limit = answer_limit
        if concurrency is None and self._driver.places is not None:
            concurrency = max(1, self._driver.places // 2)
        self._places: Callable[[], Any] | None = None
        if concurrency is not None and self._driver.is_awaited:
            self._places = PerLoop(partial(asyncio.Semaphore, concurrency))
        elif concurrency is not None:
            places = threading.BoundedSemaphore(concurrency)
            self._places = lambda: places

    def run(self, request: Any, work: Callable[[Any], Any]) -> Any:
        """Run ``work(tx)`` once for the request's key: its Reply, the stored one, or a problem.

        Await it if ``sessions`` has to be awaited.
        request: of Starlette, FastAPI or Flask, a WSGI environ, or a :class:`pillarbox.idempotency.Request`. work:
        writes with the transaction's handle and returns a status and a body, or a Reply; it must not commit. If it
        raises or returns a status from 400 on, the transaction is rolled back and the key stays free.
        """
        if self._driver.is_awaited:
            return self._run(request, work)
        if inspect.iscoroutinefunction(work):
            raise ConfigError(
                "once.run was given an async function, and its sessions are plain ones, which would block the event "
                "loop; pass a plain function, or sessions that are awaited, such as an async_sessionmaker"
            )
        return finish(self._run(request, work))

    def middleware(self, app: App, *, paths: Collection[str] = ("/",), methods: Collection[str] = METHODS) -> App:
        """A pure ASGI middleware: ``app.add_middleware(once.middleware, paths=["/orders"])``.

        It begins a transaction for each request to these paths and what is below them, also for one without a key. It
        holds the answer back, stores it and commits, and then sends it. paths: the default is all; methods: the default
        is POST, PUT, PATCH and DELETE.
        """
        if not self._driver.is_awaited:
            raise ConfigError(
                "the middleware needs sessions that are awaited, such as an async_sessionmaker or asyncpg's pool; "
                "on plain ones call once.run"
            )
        return Middleware(self, app, paths, methods)

    def transaction(self, scope: Scope) -> Any:
        """The handle of the transaction that the middleware began for a request. scope: that of ASGI."""
        return transaction_of(self, scope)

    @cached_property
    def session(self) -> Callable[..., Any]:
        """The same handle as a dependency of FastAPI: ``Depends(once.session)``."""
        made: Callable[..., Any] = import_module("pillarbox.idempotency.starlette").dependency(self)
        return made

    def view(self, view: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates a view of Django: ``@once.view``. ``sessions`` is ``django.db.connections`` or a
        :class:`pillarbox.django.Database`.

        The view runs in an atomic block of its own, also with ATOMIC_REQUESTS.
        """
        decorated: Callable[..., Any] = import_module("pillarbox.idempotency.django").decorated(
            self, self._driver, view
        )
        return decorated

    async def _run(self, request: Any, work: Callable[[Any], Any]) -> Reply:
        async def replied(tx: Any) -> Reply:
            return reply_of(await settled(work(tx)))

        try:
            key = await self.key_of(request, asked_of(request, self.body_limit))
        except Refused as refused:
            return refused.reply
        return await self.serve(key, replied)

    async def key_of(self, request: Any, asked: Asked) -> Key | None:
        """The key of a request; None: it has none. Raises Refused."""
        scope = checked_scope(await settled(self._scope(request)))
        if scope is None:
            return None
        name = parsed(asked.request.key)
        if name is None:
            if self._required:
                raise Refused(replies.MISSING)
            return None
        method, path, query, body, _ = await asked.complete(self.body_limit)
        fingerprint = digest(method.encode(), path.encode("utf-8", "surrogateescape"), query, body)
        return Key(digest(scope.encode("utf-8", "surrogatepass"), name.encode()), fingerprint, self._names)

    async def serve(self, key: Key | None, work: Callable[[Any], Awaitable[Reply]]) -> Reply:
        """Run the work in a transaction, once for the key. An error of the work passes."""
        try:
            reply = await self._serve(key, work)
        except BaseException:
            self._observers.request_served("failed")
            raise
        self._observers.request_served(_outcome(key, reply))
        return reply

    async def _serve(self, key: Key | None, work: Callable[[Any], Awaitable[Reply]]) -> Reply:
        driver: Driver | None = None
        is_working = False
        try:
            async with self._place(), self._driver.begin() as tx:
                driver = driver_of(tx)
                if key is not None:
                    earlier = await self._claim(key, driver)
                    if earlier is not None:
                        return earlier  # with a commit: on MongoDB it waits until a majority has what was read
                is_working = True
                reply = await work(tx)
                is_working = False
                if not reply.is_kept:
                    raise Refused(reply)
                if len(reply.body) > self.answer_limit:
                    raise Refused(replies.answer_too_large(self.answer_limit))
                if key is not None:
                    await self._store(key, reply, driver)
            return reply
        except Refused as refused:
            return refused.reply
        except PillarboxError:
            raise
        except Exception as error:
            if is_working or (driver is not None and driver.classify(error) not in _TEMPORARY):
                raise
            log.warning(
                "a request was answered with 503: the database cannot be used now (%s)",
                type(error).__name__,
                extra={"action": "request_unavailable"},
            )
            return replies.UNAVAILABLE

    async def _claim(self, key: Key, driver: Driver) -> Reply | None:
        """The reply to a request whose key is not new. Raises Refused where there is nothing to commit."""
        found: Claim | Stored = await settled(driver.run(_steps(driver, "claim", key)))
        if found is Claim.NEW:
            return None
        if found is Claim.BUSY:
            raise Refused(replies.BUSY)
        assert isinstance(found, Stored)
        if found.fingerprint != key.fingerprint:
            return replies.OTHER_REQUEST
        return replies.UNFINISHED if found.status is None else replies.replay(found)

    async def _store(self, key: Key, reply: Reply, driver: Driver) -> None:
        answer = Answer(key, reply.status, stored_headers(reply.headers), reply.body)
        if not driver.in_transaction() or not await settled(driver.run(_steps(driver, "store", answer))):
            raise NotInTransaction(
                "the request's transaction was ended before its answer was stored; leave commit and rollback to "
                "Idempotency: it commits an answer below 400 and rolls back any other"
            )

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self._places is None:
            yield
        elif self._driver.is_awaited:
            async with self._places():
                yield
        else:
            with self._places():
                yield


def _outcome(key: Key | None, reply: Reply) -> str:
    """The outcome of a request, for observers."""
    if reply.is_replayed:
        return "replayed"
    refusals = (
        (replies.BUSY, "busy"),
        (replies.OTHER_REQUEST, "mismatch"),
        (replies.UNFINISHED, "unfinished"),
        (replies.UNAVAILABLE, "unavailable"),
    )
    for refusal, outcome in refusals:
        if reply is refusal:
            return outcome
    if not reply.is_kept:
        return "failed"
    return "done" if key is not None else "unkeyed"


def _steps(driver: Driver, verb: str, work: Key | Answer) -> Build[Any]:
    """The steps of one operation, for the driver's family of databases."""
    steps = sql if driver.family == "sql" else import_module("pillarbox.idempotency.mongo")
    return partial(getattr(steps, verb), work)
