"""sqlite3 under the SQLite store: one connection in a thread of its own, and the driver's errors as ours."""

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pillarbox.errors import DuplicateEvent, PillarboxError, SchemaError, StoreDown, StoreError
from pillarbox.sql.cells import sqlite_cell
from pillarbox.sql.statements import SqlText
from pillarbox.stores.sql.database import Connection, NoDatabase
from pillarbox.tasks import PerLoop
from pillarbox.threads import Thread, finished

T = TypeVar("T")

_BUSY_SECONDS = 10.0
_MOST_READS = 100  # remembered; a worker has a few


def filled(statement: SqlText, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of a statement and its parameters, as the driver takes them."""
    return statement.text, {name: sqlite_cell(values[name]) for name in statement.names}


class SqliteDatabase:
    """One connection, used in one thread; asyncio waits for it outside the event loop."""

    can_skip_locked = True

    def __init__(self, path: str) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"
        self._connection: sqlite3.Connection | None = None
        self._thread: Thread | None = None
        self._lock = PerLoop(asyncio.Lock)
        # Only asks whether somebody has written, which takes microseconds and waits for nobody. None: in memory, where
        # every connection has a database of its own.
        self._watch: sqlite3.Connection | None = None
        self._empty: dict[Hashable, int] = {}  # the version of the database in which a read found nothing

    async def open(self, *, create: bool = False) -> None:
        async with self._lock():
            if self._connection is not None:
                return
            # Connecting would create an empty file for a misspelt name.
            if not create and not self.path.startswith(("file:", ":memory:")) and not os.path.exists(self.path):
                raise NoDatabase(
                    f"sqlite {self.path} does not exist; correct the path, "
                    "or make it with `pillarbox init` or `await store.migrate()`"
                )
            self._thread = Thread("pillarbox-sqlite")
            made: list[sqlite3.Connection] = []
            try:
                connection = await self._call(lambda: self._connect(made))
                self._empty.clear()  # each connection counts by itself
                if not self.path.startswith(("file:", ":memory:")):
                    self._watch = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
                self._connection = connection
            except BaseException:
                for each in made:
                    self._thread.submit(each.close)
                self._thread.stop()
                raise

    def _connect(self, made: list[sqlite3.Connection]) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, uri=True)
        made.append(connection)
        self._use_wal(connection)
        # FULL: commits survive a power cut.
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        # A change of the mode does not wait for another process that opens the same new file.
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    async def close(self) -> None:
        connection, thread, watch = self._connection, self._thread, self._watch
        self._connection = self._thread = self._watch = None
        if watch is not None:
            watch.close()
        if connection is not None and thread is not None:
            await finished(thread.submit(connection.close))
            thread.stop()

    async def trace(self, told: Callable[[str], None]) -> None:
        """Call ``told`` with each statement (for tests)."""
        await self._call(lambda: self._opened().set_trace_callback(told))

    async def _call(self, function: Callable[[], T]) -> T:
        if self._thread is None:
            raise StoreDown(f"sqlite {self.path} is closed; open the store first")
        try:
            return await finished(self._thread.submit(function))
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _error(self, error: sqlite3.Error) -> PillarboxError:
        text = str(error)
        if isinstance(error, sqlite3.IntegrityError) and "UNIQUE" in text:
            return DuplicateEvent("an event with this id is in this stream already; give another id, or leave it out")
        if "no such table" in text:
            return SchemaError(
                f"sqlite {self.path}: {text}; make the tables with `pillarbox init`, or `await store.migrate()`"
            )
        if "locked" in text or "busy" in text:
            return StoreDown(f"sqlite {self.path} was locked by another process for {_BUSY_SECONDS:.0f} s")
        if "unable to open" in text:
            return StoreError(f"sqlite {self.path} cannot be opened; check that its folder exists and is writable")
        if "full" in text or "I/O" in text or "readonly" in text:
            return StoreDown(f"sqlite {self.path}: {text}; free disk space and check that it is writable")
        return StoreError(f"sqlite {self.path}: {text}")

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreDown(f"sqlite {self.path} is closed; open the store first")
        return self._connection

    async def _fetch(self, statement: SqlText, values: Mapping[str, Any]) -> Sequence[Any]:
        text, cells = filled(statement, values)
        return await self._call(lambda: self._opened().execute(text, cells).fetchall())

    async def _execute(self, statement: SqlText, values: Mapping[str, Any]) -> int:
        text, cells = filled(statement, values)
        return await self._call(lambda: self._opened().execute(text, cells).rowcount)

    async def _execute_many(self, statement: SqlText, rows: Sequence[Mapping[str, Any]]) -> None:
        cells = [{name: sqlite_cell(row[name]) for name in statement.names} for row in rows]
        await self._call(lambda: self._opened().executemany(statement.text, cells))

    async def fetch(self, statement: SqlText, **values: Any) -> Sequence[Any]:
        async with self._lock():
            return await self._fetch(statement, values)

    async def fetch_unless_known(self, read: Hashable, statement: SqlText, **values: Any) -> Sequence[Any]:
        """The rows of a statement. ``read`` says what it asks for: a read that found nothing is not run again until
        somebody has written, so the answer may depend on nothing but the database, not even on the time."""
        version = self._version()
        if version is not None and self._empty.get(read) == version:
            return []
        rows = await self.fetch(statement, **values)
        if not rows and version is not None:
            if len(self._empty) >= _MOST_READS:
                self._empty.clear()
            self._empty[read] = version
        return rows

    def _version(self) -> int | None:
        """A number that every commit to the file changes; None: unknown."""
        if self._watch is None:
            return None
        try:
            version: int = self._watch.execute("PRAGMA data_version").fetchone()[0]
            return version
        except sqlite3.Error:
            return None  # the read says what is wrong

    async def execute(self, statement: SqlText, **values: Any) -> int:
        async with self._lock():
            return await self._execute(statement, values)

    async def execute_many(self, statement: SqlText, rows: Sequence[Mapping[str, Any]]) -> None:
        async with self.transaction() as tx:
            await tx.execute_many(statement, rows)

    async def run(self, text: str) -> None:
        async with self._lock():
            await self._call(lambda: self._opened().execute(text))

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        async with self.transaction() as tx:
            return await work(tx)

    async def together(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """A whole transaction in one call into the thread."""

        def call() -> T:
            connection = self._opened()
            connection.execute("BEGIN IMMEDIATE")
            try:
                done = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return done

        async with self._lock():
            return await self._call(call)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        async with self._lock():
            try:
                # IMMEDIATE: a transaction that reads first and writes later fails if another has written in between.
                await self._call(lambda: self._opened().execute("BEGIN IMMEDIATE"))
                yield _Transaction(self)
                await self._call(lambda: self._opened().execute("COMMIT"))
            except BaseException:
                if self._connection is not None and self._connection.in_transaction:
                    await self._call(lambda: self._opened().execute("ROLLBACK"))
                raise


class _Transaction:
    """The same connection while its lock is held."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def fetch(self, statement: SqlText, **values: Any) -> Sequence[Any]:
        return await self._database._fetch(statement, values)

    async def execute(self, statement: SqlText, **values: Any) -> int:
        return await self._database._execute(statement, values)

    async def execute_many(self, statement: SqlText, rows: Sequence[Mapping[str, Any]]) -> None:
        await self._database._execute_many(statement, rows)

    async def run(self, text: str) -> None:
        await self._database._call(lambda: self._database._opened().execute(text))
