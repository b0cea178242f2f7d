"""A unit of work: one transaction that writes the events of the aggregates that it tracks."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Self, TypeVar, Unpack

from pillarbox.aggregates.aggregate import (
    RECORDER,
    Aggregate,
    Draft,
    current_tenant,
    late_event,
    take,
    with_tenant,
)
from pillarbox.drivers import Driver, driver_of
from pillarbox.drivers.contract import finish, settled
from pillarbox.errors import ConfigError, NotInTransaction, StaleAggregate
from pillarbox.event import Event
from pillarbox.outbox import EventFields, OnDuplicate, Outbox, Transaction
from pillarbox.sql.dialects import ErrorKind

T = TypeVar("T")
A = TypeVar("A", bound=Aggregate)
_FIRST_WAIT: Final = 0.01
_LONGEST_WAIT: Final = 1.0


class _RolledBack(Exception):
    """Ends the transaction's block when the caller asks for a rollback."""


class UnitOfWork:
    """A transaction that writes the events of its aggregates before it commits.

    ``with`` on plain handles, ``async with`` on those that have to be awaited. It commits at the end of the block, and
    rolls back if the block raises. handle: anything that has or begins transactions: a connection, a pool, an engine, a
    session, a sessionmaker, a client of MongoDB, or a function that opens a connection. On a connection whose
    transaction is open the block is a savepoint. tenant: of the events that name none; default: ``current_tenant``.
    repositories: for each class of aggregates a function of the unit of work that makes its repository.
    """

    def __init__(
        self,
        outbox: Outbox,
        handle: Any,
        *,
        tenant: str | None = None,
        repositories: Mapping[type, Callable[["UnitOfWork"], Any]] | None = None,
    ) -> None:
        self._outbox = outbox
        self._driver = driver_of(handle)
        self._tenant = tenant
        self._factories = dict(repositories or {})
        self._repositories: dict[type, Any] = {}
        self._tracked: list[Aggregate] = []
        self._block: AbstractAsyncContextManager[None] | None = None
        self._target: Any = None  # takes the events
        self._inner: Driver | None = None  # of the transaction
        self._must_roll_back = False
        self._tenant_before: str | None = None

    @property
    def tx(self) -> Any:
        """The connection or session of the transaction, for the application's own statements."""
        self._check_open()
        return self._target.connection if isinstance(self._target, Transaction) else self._target

    def add(
        self, type: str, payload: Any, *, on_duplicate: OnDuplicate = "raise", **fields: Unpack[EventFields]
    ) -> Event:
        """Add an event of no aggregate. It is written before the commit, in one order with those of aggregates."""
        self._check_open()
        with_own: EventFields = with_tenant(fields, self._tenant)
        return self._outbox.add(self._target, type, payload, on_duplicate=on_duplicate, **with_own)

    def track(self, aggregate: A) -> A:
        """Write the events of this aggregate: those that wait in it, and those that it records until the end."""
        self._check_open()
        own, is_session = vars(aggregate), self._inner is not None and self._inner.is_buffered
        if is_session and hasattr(aggregate, "_sa_instance_state"):
            if getattr(type(aggregate), RECORDER, None) is None:
                raise ConfigError(
                    f"{type(aggregate).__name__} is mapped by SQLAlchemy, and its session writes its events; "
                    "call outbox.follow(Base) once, with the base of your mapped classes"
                )
            return aggregate
        if own.get(RECORDER) is self:
            return aggregate
        if RECORDER in own:
            raise ConfigError(
                f"another unit of work tracks this {type(aggregate).__name__}; load it again in this one, "
                "or end the other"
            )
        own[RECORDER] = self
        self._tracked.append(aggregate)
        for draft in take(aggregate):
            self.record(aggregate, draft)
        return aggregate

    def record(self, aggregate: Aggregate, draft: Draft) -> None:
        """Called by the aggregates that are tracked."""
        self._outbox.add_all(self._target, [late_event(self._outbox, aggregate, draft, self._tenant)])

    def repository(self, kind: type) -> Any:
        """The repository of this class of aggregates, made once in a unit of work."""
        self._check_open()
        if kind not in self._repositories:
            if kind not in self._factories:
                name = kind.__name__
                raise ConfigError(f"no repository of {name} is known; pass repositories={{{name}: ...}} to UnitOfWork")
            self._repositories[kind] = self._factories[kind](self)
        return self._repositories[kind]

    def commit(self) -> Any:
        """Write the events and commit, before the end of the block; await it in an ``async with``."""
        self._check_open()
        return self._now(self._exit(None))

    def rollback(self) -> Any:
        """Roll back and drop the events; await it in an ``async with``. Without ``await`` the block's end does it."""
        self._check_open()
        self._must_roll_back = True
        return self._now(self._exit(None))

    def __enter__(self) -> Self:
        if self._driver.is_awaited:
            raise ConfigError("this handle has to be awaited; write `async with UnitOfWork(...)`")
        finish(self._enter())
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._block is not None:
            finish(self._exit(error))

    async def __aenter__(self) -> Self:
        if not self._driver.is_awaited:
            raise ConfigError("this handle is not awaited; write `with UnitOfWork(...)`")
        await self._enter()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._block is not None:
            await self._exit(error)

    @classmethod
    def run(
        cls,
        outbox: Outbox,
        handle: Any,
        work: Callable[["UnitOfWork"], Any],
        *,
        tenant: str | None = None,
        repositories: Mapping[type, Callable[["UnitOfWork"], Any]] | None = None,
        attempts: int = 10,
    ) -> Any:
        """Run ``work(uow)`` in a unit of work, and again if its transaction lost against another one.

        That is a conflict of MongoDB, a deadlock, a failed serialisation, or StaleAggregate. ``work`` must load its
        aggregates itself. Returns its result; await it if the handle has to be awaited, and then ``work`` may be an
        async function. attempts: the most runs; the error of the last one is raised.
        """
        if attempts < 1:
            raise ConfigError(f"attempts is {attempts}; use a whole number above 0")
        uow = cls(outbox, handle, tenant=tenant, repositories=repositories)
        return uow._now(uow._run(work, attempts))

    def _now(self, running: Coroutine[Any, Any, T]) -> Any:
        return running if self._driver.is_awaited else finish(running)

    async def _run(self, work: Callable[["UnitOfWork"], Any], attempts: int) -> Any:
        attempt = 1
        while True:
            try:
                await self._enter()
                try:
                    result = await settled(work(self))
                except BaseException as error:
                    await self._exit(error)
                    raise
                await self._exit(None)
            except Exception as error:
                if attempt == attempts or not self._is_conflict(error):
                    raise
            else:
                return result
            await self._wait(random.uniform(0, min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt)))
            attempt += 1

    def _is_conflict(self, error: Exception) -> bool:
        if isinstance(error, StaleAggregate):
            return True
        return self._inner is not None and self._inner.classify(error) is ErrorKind.CONFLICT

    async def _wait(self, seconds: float) -> None:
        if self._driver.is_awaited:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)  # noqa: ASYNC251 - a plain driver waits in its thread

    def _check_open(self) -> None:
        if self._block is None:
            raise NotInTransaction("this unit of work is not open; use it inside its `with` block, before its commit")

    async def _enter(self) -> None:
        if self._block is not None:
            raise ConfigError("this unit of work is open already; make another one")
        self._must_roll_back = False
        block = self._begun()
        await block.__aenter__()
        self._block = block
        if self._tenant:
            # For mapped aggregates too, whose sessions know no unit of work.
            self._tenant_before = current_tenant.get()
            current_tenant.set(self._tenant)

    async def _exit(self, error: BaseException | None) -> None:
        block, self._block = self._block, None
        if block is None:
            return  # commit or rollback was called
        if self._tenant:
            current_tenant.set(self._tenant_before)
        if error is None and self._must_roll_back:
            error = _RolledBack()
        await block.__aexit__(None if error is None else type(error), error, None)

    @asynccontextmanager
    async def _begun(self) -> AsyncIterator[None]:
        async with self._outbox._begun(self._driver) as self._target:
            self._inner = driver_of(self._target.connection if isinstance(self._target, Transaction) else self._target)
            try:
                yield
            finally:
                for aggregate in self._tracked:
                    vars(aggregate).pop(RECORDER, None)
                self._tracked.clear()
                self._repositories.clear()
