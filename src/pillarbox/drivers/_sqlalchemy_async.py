"""SQLAlchemy's asynchronous connections, engines and sessions."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)

from pillarbox.drivers.contract import OUTBOX, Answer, Build, BuildLater, Driver, Feature, PoolDriver, Statement, Steps
from pillarbox.drivers.sqlalchemy import (
    SqlAlchemy,
    SqlAlchemySession,
    bound,
    for_one_transaction,
    places,
    unknown_sqlalchemy,
)
from pillarbox.errors import ConfigError
from pillarbox.sql.dialects import ErrorKind

T = TypeVar("T")


class SqlAlchemyAsync(Driver):
    """An AsyncConnection: all steps run in one of its greenlets, on the plain connection."""

    is_awaited = True
    plain: ClassVar[type[SqlAlchemy]] = SqlAlchemy

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def check(self, feature: Feature = OUTBOX) -> None:
        """Leave it to the steps: they check the plain handle, in the greenlet."""

    def in_transaction(self) -> bool:
        return bool(self._handle.in_transaction())

    def ask(self, statement: Statement) -> Any:
        return self.run(lambda driver: _one(statement))

    def run(self, build: Build[T]) -> Any:
        return self._handle.run_sync(lambda handle: self.plain(handle).run(build))

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with self._handle.begin_nested() if self.in_transaction() else self._handle.begin():
            yield self._handle

    def classify(self, error: BaseException) -> ErrorKind:
        return self._plain().classify(error)

    def _plain(self) -> SqlAlchemy:
        return SqlAlchemy(self._handle.sync_connection)

    def abandon(self) -> None:
        connection = self._handle.sync_connection
        if connection.dialect.driver == "aiosqlite":
            from pillarbox.drivers.aiosqlite import AioSqlite

            # SQLAlchemy too would have it answer to this event loop.
            AioSqlite(connection.connection.driver_connection).abandon()
        connection.invalidate()


class SqlAlchemyAsyncSession(SqlAlchemyAsync):
    """An AsyncSession: its plain session has the buffer."""

    is_buffered = True
    plain = SqlAlchemySession

    def _plain(self) -> SqlAlchemy:
        return SqlAlchemySession(self._handle.sync_session)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with super().begin() as session:
            await session.connection()
            yield session

    def defer(self, items: Sequence[Any], group: Any, build: BuildLater) -> None:
        SqlAlchemySession(self._handle.sync_session).defer(items, group, build)


def driver(handle: Any) -> Driver:
    if isinstance(handle, async_scoped_session):
        handle = handle()
    if isinstance(handle, AsyncEngine):
        return PoolDriver(handle.connect, SqlAlchemyAsync, places=places(handle.sync_engine))
    if isinstance(handle, async_sessionmaker):
        return PoolDriver(partial(for_one_transaction, handle), SqlAlchemyAsyncSession, places=places(bound(handle)))
    if isinstance(handle, AsyncConnection) and handle.sync_connection is None:
        raise ConfigError("this AsyncConnection is not started; use `async with engine.begin() as connection:`")
    for kind, made in _KINDS.items():
        if isinstance(handle, kind):
            return made(handle)
    raise unknown_sqlalchemy(handle)


_KINDS: Final[dict[type, Callable[[Any], Driver]]] = {
    AsyncSession: SqlAlchemyAsyncSession,
    AsyncConnection: SqlAlchemyAsync,
}


def _one(statement: Statement) -> Steps[Answer]:
    answer: Answer = yield statement
    return answer
