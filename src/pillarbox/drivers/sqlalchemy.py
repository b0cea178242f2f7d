"""SQLAlchemy: a connection, an engine or a session, on any of the SQL databases."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, exc
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.pool import QueuePool, StaticPool

from pillarbox.drivers._sqlalchemy_session import Buffer, current
from pillarbox.drivers.contract import (
    OUTBOX,
    Answer,
    BuildLater,
    Driver,
    Feature,
    PoolDriver,
    Statement,
    not_in_transaction,
    unknown_handle,
)
from pillarbox.drivers.sqlite3 import Sqlite3
from pillarbox.errors import ConfigError
from pillarbox.sql.dialects import MYSQL, POSTGRES, POSTGRES_NUMBERED, SQLITE, Dialect, ErrorKind
from pillarbox.tasks import run_to_completion

T = TypeVar("T")
_ASYNC: Final = "sqlalchemy.ext.asyncio"
_LOST_BEFORE: Final = "8s2b"  # an earlier statement lost the connection, and its error was caught
_DIALECTS: Final = {"mysql": MYSQL, "mariadb": MYSQL, "sqlite": SQLITE, "postgresql": POSTGRES}


class SqlAlchemy(Driver):
    """A Connection. It runs the driver's own statements, past SQLAlchemy's compiler."""

    handle_name = "SQLAlchemy connection"
    remedy = "use an engine without isolation_level='AUTOCOMMIT'"

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @cached_property
    def connection(self) -> Any:
        return self._handle

    @property
    def dialect(self) -> Dialect:  # type: ignore[override]
        own = self._bind().dialect
        dialect = _DIALECTS.get(own.name)
        if dialect is None:
            known = ", ".join(sorted(_DIALECTS))
            raise ConfigError(f"Pillarbox cannot write to {own.name} by SQLAlchemy; it knows {known}")
        return POSTGRES_NUMBERED if own.paramstyle.startswith("numeric") else dialect

    def _bind(self) -> Any:
        return self._handle

    def in_transaction(self) -> bool:
        return bool(self._handle.in_transaction())

    def begins_by_itself(self) -> bool:
        connection = self.connection
        if connection.dialect.name == "sqlite":
            # Asked of the driver: SQLAlchemy's own recipe for SQLite is no isolation level and an explicit BEGIN.
            below = Sqlite3(connection.connection.driver_connection)
            return below.begins_by_itself() or below.in_transaction()
        level = connection.get_execution_options().get("isolation_level")
        return level != "AUTOCOMMIT" and (level is not None or not _is_autocommit(connection))

    def check(self, feature: Feature = OUTBOX) -> None:
        # SQLAlchemy has transactions where the database commits every statement: what it says of them does not count.
        if not self.begins_by_itself():
            raise not_in_transaction(self.handle_name, self.remedy, feature)

    def ask(self, statement: Statement) -> Any:
        try:
            result = self.connection.exec_driver_sql(statement.text, tuple(statement.values))
        except exc.StatementError as error:
            error.hide_parameters = True  # the payloads are among them
            raise
        if not statement.has_rows:
            return Answer((), result.rowcount)
        rows = result.all()
        return Answer(rows, len(rows))

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        with self._handle.begin_nested() if self.in_transaction() else self._handle.begin():
            yield self._handle

    def classify(self, error: BaseException) -> ErrorKind:
        if isinstance(error, StaleDataError):
            return ErrorKind.CONFLICT
        if isinstance(error, exc.PendingRollbackError) and error.code == _LOST_BEFORE:
            return ErrorKind.AWAY
        if not isinstance(error, exc.DBAPIError) or error.orig is None:
            return ErrorKind.OTHER
        return ErrorKind.AWAY if error.connection_invalidated else self.dialect.classify(error.orig)


class SqlAlchemySession(SqlAlchemy):
    """A Session: writes wait for its flush, so that they come behind its own changes and their locks."""

    is_buffered = True

    @cached_property
    def connection(self) -> Any:
        current(self._handle)  # refuses a session that has no transaction and opens none by itself
        return self._handle.connection()

    def _bind(self) -> Any:
        # Not the connection: an error is classified too when there is none.
        return self._handle.get_bind()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with super().begin() as session:
            session.connection()  # now, so that a database that is away fails here and not in the caller's code
            yield session

    def defer(self, items: Sequence[Any], group: Any, build: BuildLater) -> None:
        Buffer.of(self._handle).add(self._handle, items, (group, build), _write, self._check_now)

    def _check_now(self) -> None:
        """Not at the flush: the session's own changes would be committed by then."""
        if self._bind().dialect.is_async:
            _check_bind(self._handle)
        else:
            self.check()

    def deferred(self) -> Iterable[tuple[Any, Any]]:
        return ((item, group) for item, (group, _) in Buffer.of(self._handle).items())


def _write(connection: Connection, group: Any, items: Sequence[Any]) -> None:
    settings, build = group
    SqlAlchemy(connection).run(build(settings, items))


def driver(handle: Any) -> Driver:
    if any(kind.__module__.startswith(_ASYNC) for kind in type(handle).__mro__):
        # Only then: without greenlet, which a plain application needs not have, the package cannot be imported.
        from pillarbox.drivers import _sqlalchemy_async

        return _sqlalchemy_async.driver(handle)
    if isinstance(handle, scoped_session):
        handle = handle()
    if isinstance(handle, Engine):
        return PoolDriver(handle.connect, SqlAlchemy, is_awaited=False, places=places(handle))
    if isinstance(handle, sessionmaker):
        return PoolDriver(
            partial(for_one_transaction, handle), SqlAlchemySession, is_awaited=False, places=places(bound(handle))
        )
    if isinstance(handle, Session):
        return SqlAlchemySession(handle)
    if isinstance(handle, Connection):
        return SqlAlchemy(handle)
    raise unknown_sqlalchemy(handle)


def unknown_sqlalchemy(handle: Any) -> ConfigError:
    return unknown_handle(handle, "pass a session or a connection of it")


@asynccontextmanager
async def for_one_transaction(make: Callable[[], Any]) -> AsyncIterator[Any]:
    """A session that refuses work after its transaction: it would begin another one, which nobody commits."""
    session = make()
    try:
        yield session
    finally:
        getattr(session, "sync_session", session).autobegin = False
        closing = session.close()
        if closing is not None:
            await run_to_completion(closing)


def bound(make: Any) -> Any:
    """The engine of a sessionmaker, if it has one for all tables."""
    bind = make.kw.get("bind")
    return getattr(bind, "sync_engine", bind)


def places(engine: Any) -> int | None:
    pool = getattr(engine, "pool", None)
    if isinstance(pool, StaticPool):
        return 1
    overflow = getattr(pool, "_max_overflow", -1)  # there is no public name for it; below 0 is unlimited
    return pool.size() + overflow if isinstance(pool, QueuePool) and overflow >= 0 else None


def _check_bind(session: Session) -> None:
    """Refuse a session whose engine or connection commits by itself. Without a question to the database, which outside
    of a greenlet is impossible."""
    bind = session.get_bind()
    levels = [bind.get_execution_options().get("isolation_level")]
    if not isinstance(bind, Connection):
        levels.append(getattr(bind.dialect, "_on_connect_isolation_level", None))  # of create_engine
    if next(filter(None, levels), None) == "AUTOCOMMIT":
        raise not_in_transaction(SqlAlchemy.handle_name, SqlAlchemy.remedy)


def _is_autocommit(connection: Connection) -> bool:
    detect = getattr(connection.dialect, "detect_autocommit_setting", None)
    try:
        return detect is not None and bool(detect(connection.connection.dbapi_connection))
    except NotImplementedError:
        return False
