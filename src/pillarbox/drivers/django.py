"""Django: the connection of a database, inside of ``transaction.atomic``, on any of the SQL databases."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

from django.core.exceptions import SynchronousOnlyOperation
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.utils import ConnectionHandler
from django.utils.connection import ConnectionProxy

from pillarbox.drivers.contract import (
    OUTBOX,
    Answer,
    Driver,
    Feature,
    PoolDriver,
    Statement,
    not_in_transaction,
    unknown_handle,
)
from pillarbox.errors import ConfigError
from pillarbox.sql.dialects import MYSQL, POSTGRES, SQLITE_FORMAT, Dialect, ErrorKind

_DIALECTS: Final = {"postgresql": POSTGRES, "mysql": MYSQL, "sqlite": SQLITE_FORMAT}
_ASYNC: Final = (
    "Django's connection cannot be used where an event loop runs; write your data and its event in one plain function, "
    "and call it with `await sync_to_async(function)()`"
)


class Django(Driver):
    """A connection. Statements go through Django's cursor, so that its logs, wrappers and checks see them."""

    handle_name = "Django connection"

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.dialect = _dialect(connection)

    @property
    def remedy(self) -> str:  # type: ignore[override]
        return f"write both inside of `with transaction.atomic({_using(self.connection.alias)}):`"

    @property
    def tables_remedy(self) -> str:  # type: ignore[override]
        alias = self.connection.alias
        option = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
        return (
            f"add 'pillarbox.django' to INSTALLED_APPS and run `manage.py migrate pillarbox{option}`; a migration that "
            "writes events needs ('pillarbox', '0001_outbox') in its dependencies"
        )

    @property
    def is_nested(self) -> bool:  # type: ignore[override]
        return bool(self.connection.savepoint_ids)

    def in_transaction(self) -> bool:
        return bool(self.connection.in_atomic_block)

    def begins_by_itself(self) -> bool:
        return not self.connection.get_autocommit()

    def check(self, feature: Feature = OUTBOX) -> None:
        connection = self.connection
        # The block of a TestCase does not count: without it the code under test would commit each statement by itself.
        for block in connection.atomic_blocks:
            if not getattr(block, "_from_testcase", False):
                return
        if _is_in_event_loop():
            raise ConfigError(_ASYNC)
        if connection.in_atomic_block or not self.begins_by_itself():
            raise not_in_transaction(self.handle_name, self.remedy, feature)

    def ask(self, statement: Statement) -> Answer:
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(statement.text, tuple(statement.values) or None)
                if not statement.has_rows:
                    return Answer((), cursor.rowcount)
                rows = cursor.fetchall()
                return Answer(rows, len(rows))
        except SynchronousOnlyOperation:
            raise ConfigError(_ASYNC) from None

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        with _refusing_event_loops(), transaction.atomic(using=self.connection.alias):
            yield self.connection

    def is_closed(self) -> bool:
        # Of the database's own package: Django knows only of connections that it has closed itself.
        below = self.connection.connection
        return below is None or bool(getattr(below, "closed", False)) or not getattr(below, "open", True)

    def classify(self, error: BaseException) -> ErrorKind:
        # Django raises errors of its own, from those of the database's package.
        return super().classify(error.__cause__ or error)


class Database(PoolDriver):
    """A database of the setting DATABASES: each thread has its own connection.

    alias: its name there.
    """

    def __init__(self, alias: str = DEFAULT_DB_ALIAS) -> None:
        if alias not in connections.settings:
            raise ConfigError(f"there is no database {alias!r} in DATABASES; use one of: {', '.join(connections)}")
        self.alias = alias
        super().__init__(lambda: _connected(alias), Django, is_awaited=False)


def driver(handle: Any) -> Driver:
    if isinstance(handle, ConnectionHandler):
        return Database()
    if isinstance(handle, CursorWrapper):
        handle = handle.db
    if isinstance(handle, ConnectionProxy):
        handle = connections[handle.alias]
    if isinstance(handle, BaseDatabaseWrapper):
        return Django(handle)
    raise unknown_handle(handle, "pass django.db.connection, or connections[alias] for another database")


@contextmanager
def _connected(alias: str) -> Iterator[Any]:
    """This thread's connection, made anew if the server has ended it since it was used."""
    connection = connections[alias]
    with _refusing_event_loops():
        _close_if_old(connection)
    try:
        yield connection
    finally:
        with suppress(Exception):
            _close_if_old(connection)


def close_old_connections() -> None:
    """Close this thread's connections that are too old or were ended by the server."""
    for connection in connections.all(initialized_only=True):
        _close_if_old(connection)


def _close_if_old(connection: Any) -> None:
    # In a block Django would close any connection, because autocommit is off: in a TestCase that of the whole test.
    if not connection.in_atomic_block:
        connection.close_if_unusable_or_obsolete()


@contextmanager
def _refusing_event_loops() -> Iterator[None]:
    try:
        yield
    except SynchronousOnlyOperation:
        raise ConfigError(_ASYNC) from None


def _is_in_event_loop() -> bool:
    if os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _dialect(connection: Any) -> Dialect:
    dialect = _DIALECTS.get(connection.vendor)
    if dialect is None:
        raise ConfigError(
            f"Pillarbox cannot write to {connection.vendor} by Django; use a database of: {', '.join(_DIALECTS)}"
        )
    return dialect


def _using(alias: str) -> str:
    return "" if alias == DEFAULT_DB_ALIAS else f"using={alias!r}"
