"""Events in the caller's transaction on SQLAlchemy: connections write at once, sessions with their flush."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from pillarbox.errors import ConfigError
from pillarbox.writers._sqlalchemy_session import Buffer
from pillarbox.writers._sqlite_rules import commits_by_itself
from pillarbox.writers._statements import (
    MYSQL,
    POSTGRES,
    POSTGRES_NUMBERED,
    SQLITE,
    Flavour,
    not_in_transaction,
    question,
    statements,
    translated,
)
from pillarbox.writing import Asked, Batch, Deferred, Question

_FLAVOURS: Final = {"mysql": MYSQL, "mariadb": MYSQL, "sqlite": SQLITE, "postgresql": POSTGRES}


def write(handle: Any, batch: Batch) -> Deferred | None:
    """Insert events: with the flush of a session, at once on a connection, when awaited on an asynchronous one."""
    handle = _unscoped(handle)
    if isinstance(handle, Session | AsyncSession):
        session = handle.sync_session if isinstance(handle, AsyncSession) else handle
        Buffer.of(session).add(session, batch, write_now)
        return None
    if isinstance(handle, AsyncConnection):
        connection = handle.sync_connection
        if connection is None:
            raise ConfigError("this AsyncConnection is not started; use `async with engine.begin() as connection:`")
        return Deferred(partial(handle.run_sync, write_now, batch), handle.in_transaction, connection.invalidate)
    if not isinstance(handle, Connection):
        raise ConfigError(
            f"the outbox cannot write with a {type(handle).__qualname__}; pass a session or a connection of it"
        )
    write_now(handle, batch)
    return None


def write_now(connection: Connection, batch: Batch) -> None:
    """Insert events by the driver's own statements, past SQLAlchemy's compiler."""
    flavour = _flavour(connection)
    _refuse_autocommit(connection)
    with translated(batch.names, batch, judge):
        for text, values in statements(batch, flavour):
            try:
                connection.exec_driver_sql(text, tuple(values))
            except exc.StatementError as error:
                error.hide_parameters = True  # the payloads are among them
                raise


def exists(handle: Any, asked: Question) -> bool | Asked:
    """Whether the outbox knows this event: of a session also those that wait for its flush."""
    handle = _unscoped(handle)
    if isinstance(handle, Session):
        return Buffer.of(handle).holds(asked) or _exists(handle.connection(), asked)
    if isinstance(handle, AsyncSession):
        return partial(_exists_in_session, handle, asked)
    if isinstance(handle, AsyncConnection):
        return partial(handle.run_sync, _exists, asked)
    return _exists(handle, asked)


async def _exists_in_session(session: AsyncSession, asked: Question) -> bool:
    return await session.run_sync(lambda plain: bool(exists(plain, asked)))


def _exists(connection: Connection, asked: Question) -> bool:
    text, values = question(asked, _flavour(connection))
    with translated(asked.names, None, judge):
        return connection.exec_driver_sql(text, tuple(values)).first() is not None


@asynccontextmanager
async def begin(handle: Any) -> AsyncIterator[AsyncConnection]:
    """A transaction of this engine or on this connection, or a savepoint in the one that is open."""
    if not isinstance(handle, AsyncEngine | AsyncConnection):
        raise ConfigError(
            "outbox.transaction takes an AsyncEngine or an AsyncConnection; on a session call outbox.add(session, ...)"
        )
    async with AsyncExitStack() as stack:
        if isinstance(handle, AsyncEngine):
            yield await stack.enter_async_context(handle.begin())
            return
        await stack.enter_async_context(handle.begin_nested() if handle.in_transaction() else handle.begin())
        yield handle


def _unscoped(handle: Any) -> Any:
    return handle() if isinstance(handle, scoped_session | async_scoped_session) else handle


def _flavour(connection: Connection) -> Flavour:
    dialect = connection.dialect
    flavour = _FLAVOURS.get(dialect.name)
    if flavour is None:
        known = ", ".join(sorted(_FLAVOURS))
        raise ConfigError(f"the outbox cannot write to {dialect.name} by SQLAlchemy; it knows {known}")
    return POSTGRES_NUMBERED if dialect.paramstyle.startswith("numeric") else flavour


def _refuse_autocommit(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        # Asked of the driver: SQLAlchemy's own recipe for SQLite is no isolation level and an explicit BEGIN.
        refused = commits_by_itself(connection.connection.driver_connection)
    else:
        refused = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT" or _is_autocommit(
            connection
        )
    if refused:
        raise not_in_transaction("SQLAlchemy connection", "use an engine without isolation_level='AUTOCOMMIT'")


def _is_autocommit(connection: Connection) -> bool:
    if connection.get_execution_options().get("isolation_level") is not None:
        return False
    detect = getattr(connection.dialect, "detect_autocommit_setting", None)
    try:
        return detect is not None and bool(detect(connection.connection.dbapi_connection))
    except NotImplementedError:
        return False


def judge(error: Exception) -> str:
    if isinstance(error, exc.IntegrityError):
        return "duplicate"
    if isinstance(error, exc.DBAPIError):
        own = error.orig
        names = {kind.__name__ for each in (own, getattr(own, "__cause__", None)) for kind in type(each).__mro__}
        if names & {"UndefinedTable", "UndefinedTableError"}:
            return "no table"
        if own is not None and own.args and (own.args[0] == 1146 or "no such table" in str(own.args[0])):
            return "no table"
    return ""
