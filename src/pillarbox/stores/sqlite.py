"""The store on SQLite, with nothing but the standard library."""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar
from uuid import UUID

from pillarbox.errors import ConfigError, DuplicateEvent, PillarboxError, SchemaError, StoreDown, StoreError
from pillarbox.store import Features
from pillarbox.stores.sql import Connection, Dialect, Names, SqlStore, Statement
from pillarbox.stores.sql.rows import event_from_text_row, events_from_text_rows, instant

T = TypeVar("T")

# Text, because it can be read in any shell; of a fixed length, so that comparing it compares instants.
_FORMAT = "%Y-%m-%d %H:%M:%f"
_BUSY_SECONDS = 10.0

DIALECT = Dialect(
    now=f"strftime('{_FORMAT}', 'now')",
    later=f"strftime('{_FORMAT}', 'now', {{}} || ' seconds')",
    among="IN (SELECT value FROM json_each({}))",
    has_meta="FROM sqlite_master WHERE type = 'table' AND name = '{meta}'",
    tables="name FROM sqlite_master WHERE type = 'table'",
    version="sqlite_version()",
    param=":",
    use_ready="INDEXED BY {ready_index}",
)


def cell(value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "milliseconds")
    if isinstance(value, list):
        return json.dumps([cell(item) for item in value])
    return value


class SqliteDatabase:
    """One connection, used in one thread; asyncio waits for it outside the event loop."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        async with self._lock:
            if self._connection is not None:
                return
            self._thread = ThreadPoolExecutor(1, "pillarbox-sqlite")
            try:
                self._connection = await self._call(self._connect)
            except BaseException:
                self._thread.shutdown(wait=False)
                raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, uri=True)
        self._use_wal(connection)
        # FULL: what was settled stays settled after a power cut, and so does what was written.
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        # Changing the mode does not wait for another process that opens the same new file.
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
        connection, thread = self._connection, self._thread
        self._connection = self._thread = None
        if connection is not None and thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, connection.close)
            thread.shutdown()

    async def _call(self, function: Callable[[], T]) -> T:
        if self._thread is None:
            raise StoreDown(f"sqlite {self.path} is closed; open the store first")
        call = asyncio.get_running_loop().run_in_executor(self._thread, function)
        try:
            # A statement that runs cannot be called back: it is waited for, so that the next one finds it done.
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            raise
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _error(self, error: sqlite3.Error) -> PillarboxError:
        text = str(error)
        if isinstance(error, sqlite3.IntegrityError) and "UNIQUE" in text:
            return DuplicateEvent("an event with this id is in the outbox already; give another id, or leave it out")
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

    async def _fetch(self, statement: Statement, values: Mapping[str, Any]) -> Sequence[Any]:
        cells = {name: cell(values[name]) for name in statement.names}
        return await self._call(lambda: self._opened().execute(statement.text, cells).fetchall())

    async def _execute(self, statement: Statement, values: Mapping[str, Any]) -> int:
        cells = {name: cell(values[name]) for name in statement.names}
        return await self._call(lambda: self._opened().execute(statement.text, cells).rowcount)

    async def _execute_many(self, statement: Statement, rows: Sequence[Mapping[str, Any]]) -> None:
        cells = [{name: cell(row[name]) for name in statement.names} for row in rows]
        await self._call(lambda: self._opened().executemany(statement.text, cells))

    async def fetch(self, statement: Statement, **values: Any) -> Sequence[Any]:
        async with self._lock:
            return await self._fetch(statement, values)

    async def execute(self, statement: Statement, **values: Any) -> int:
        async with self._lock:
            return await self._execute(statement, values)

    async def execute_many(self, statement: Statement, rows: Sequence[Mapping[str, Any]]) -> None:
        async with self.transaction() as tx:
            await tx.execute_many(statement, rows)

    async def run(self, text: str) -> None:
        async with self._lock:
            await self._call(lambda: self._opened().execute(text))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        async with self._lock:
            try:
                # IMMEDIATE: a transaction that reads first and writes later would fail when another has written.
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

    async def fetch(self, statement: Statement, **values: Any) -> Sequence[Any]:
        return await self._database._fetch(statement, values)

    async def execute(self, statement: Statement, **values: Any) -> int:
        return await self._database._execute(statement, values)

    async def execute_many(self, statement: Statement, rows: Sequence[Mapping[str, Any]]) -> None:
        await self._database._execute_many(statement, rows)

    async def run(self, text: str) -> None:
        await self._database._call(lambda: self._database._opened().execute(text))


class SqliteStore(SqlStore):
    """An outbox in a SQLite file, in WAL mode; ``path`` may be ``:memory:``."""

    features = Features(concurrent_writers=False)
    migrations = "sqlite"
    dialect = DIALECT
    _event = staticmethod(event_from_text_row)
    _batch = staticmethod(events_from_text_rows)

    def __init__(self, path: str, *, prefix: str = "outbox", shards: int = 16) -> None:
        self._path = path
        super().__init__(SqliteDatabase(path), Names(prefix), shards=shards, description=f"sqlite {path}")

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """``sqlite:///relative.db`` or ``sqlite:////absolute.db``."""
        path = url.removeprefix("sqlite:///")
        if path == url or not path:
            raise ConfigError(
                f"the store URL {url!r} names no file; write sqlite:///shop.db or sqlite:////path/shop.db"
            )
        return cls(path, **options)

    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        self._refuse_a_missing_file()
        await super().open(on_wake)

    async def remove(self) -> bool:
        return not self._is_missing() and await super().remove()

    async def prefixes(self) -> Sequence[str]:
        self._refuse_a_missing_file()
        return await super().prefixes()

    def _refuse_a_missing_file(self) -> None:
        # Connecting would make an empty file of any misspelt name.
        if self._is_missing():
            raise SchemaError(
                f"{self.description} does not exist; correct the path, "
                "or make it with `pillarbox init` or `await store.migrate()`"
            )

    def _is_missing(self) -> bool:
        return self._path != ":memory:" and not self._path.startswith("file:") and not Path(self._path).exists()

    @staticmethod
    def _as_uuid(value: str | None) -> UUID | None:
        return None if value is None else UUID(value)

    @staticmethod
    def _as_instant(value: str) -> datetime:
        return instant(value)
