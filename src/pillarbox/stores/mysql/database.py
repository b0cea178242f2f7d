"""asyncmy under the MySQL store: a pool of sessions with our settings, and the driver's errors as ours."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar
from uuid import UUID

from pillarbox.errors import (
    DuplicateEvent,
    MissingExtra,
    NotAllowed,
    PillarboxError,
    SchemaError,
    StoreDown,
    StoreError,
)
from pillarbox.sql.cells import mysql_cell
from pillarbox.sql.migrations import COLLATIONS
from pillarbox.sql.statements import SqlText
from pillarbox.stores.mysql.url import connect_settings
from pillarbox.stores.sql.database import Connection
from pillarbox.tasks import PerLoop

try:
    import asyncmy
    from asyncmy.constants.CLIENT import FOUND_ROWS, MULTI_STATEMENTS
except ModuleNotFoundError as error:
    raise MissingExtra("MysqlStore", "mysql") from error

T = TypeVar("T")

_CONNECT_SECONDS = 10.0
_COMMAND_SECONDS = 60.0
_KILL_SECONDS = 5.0
_LOCK_SECONDS = 10
# A connection that was idle for longer is tested before its use.
_REST_SECONDS = 1.0
# The server ends the session of a process that froze between two statements after this time.
_IDLE_SECONDS = 30
_ATTEMPTS = 5
# Far below every server's limit; a larger row gets a statement of its own.
_PACKET_BYTES = 1_000_000
_SETTINGS = (
    "SET NAMES utf8mb4 COLLATE {collation}",
    # Strict, so that no value is truncated; all set here, whatever the server's defaults are.
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,"
    "NO_ENGINE_SUBSTITUTION', sql_safe_updates = 0, sql_select_limit = 18446744073709551615,"
    f" innodb_lock_wait_timeout = {_LOCK_SECONDS}, wait_timeout = {_IDLE_SECONDS}",
    # Pollers deadlock under REPEATABLE READ, and each statement must see all commits before its start.
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
)

_DUPLICATE = 1062
_TOO_LARGE = 1153
_NO_DATABASE = 1049
_NO_TABLE = frozenset({1054, 1146})
_REFUSED = frozenset({1045, 1698, 1820, 1862, 3118})
_NO_RIGHT = frozenset({1044, 1142, 1143, 1227, 1370})
# Another transaction was in the way; this one is rolled back and can be run again.
_CROSSED = frozenset({1205, 1213})
# The server cannot do it now: full, stopping, killed, read-only after a failover. 2000 to 2999 are the client's own.
_PASSING = frozenset({0, 1021, 1040, 1053, 1105, 1114, 1129, 1152, 1158, 1159, 1160, 1161, 1180, 1203, 1226, 1290})
_PASSING |= frozenset({1317, 1412, 1792, 1836, 1927, 3024, 3101, 3572, 4031})
# Their text may quote a value.
_QUOTING = frozenset({1064, 1292, 1366})


class Crossed(StoreDown):
    """A deadlock or a lock timeout: nothing was changed."""


async def again(call: Callable[[], Awaitable[T]]) -> T:
    """Run a transaction, and run it again after a conflict with another one."""
    for attempt in range(1, _ATTEMPTS):
        try:
            return await call()
        except Crossed:
            await asyncio.sleep(0.01 * attempt)
    return await call()


def _code(error: BaseException) -> int:
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


class Session:
    """One connection."""

    def __init__(self, connection: Any, max_packet: int) -> None:
        self._connection = connection
        self._max_packet = max_packet
        self.rested_at = time.monotonic()
        self.broken = False
        self.busy = False  # the server may still run its statement

    @property
    def number(self) -> int:
        """The server's id of this connection."""
        number: int = self._connection.thread_id()
        return number

    async def query(self, text: str) -> Any:
        """The cursor with all rows, of the last statement if there are several."""
        if len(text) > self._max_packet:
            raise StoreError(
                f"a statement of {len(text):,} bytes is more than the server's max_allowed_packet of "
                f"{self._max_packet:,}; raise it, or send smaller events"
            )
        cursor = self._connection.cursor()
        self.busy = True
        try:
            async with asyncio.timeout(_COMMAND_SECONDS):
                await cursor.execute(text)
                while await cursor.nextset():
                    pass
        except asyncmy.errors.Error as error:
            self.busy = False
            # Only after an error from the server is the connection still usable.
            self.broken = _code(error) < 1000 or 2000 <= _code(error) < 3000
            raise
        except BaseException:
            self.broken = True
            raise
        self.busy = False
        return cursor

    async def is_there(self) -> bool:
        if time.monotonic() - self.rested_at < _REST_SECONDS:
            return True
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                await self._connection.ping(reconnect=False)
        except (asyncmy.errors.Error, OSError, TimeoutError):
            return False
        return True

    def close(self) -> None:
        self._connection.close()

    def text(self, statement: SqlText, values: Mapping[str, Any]) -> str:
        return statement.text % tuple([self.literal(values[name]) for name in statement.names])

    def literal(self, value: Any) -> str:
        if isinstance(value, UUID):
            return f"x'{value.hex}'"
        if isinstance(value, list):
            if value and type(value[0]) is UUID:  # a settle has thousands
                return "(" + ",".join([f"x'{each.int:032x}'" for each in value]) + ")"
            return "(" + (",".join(map(self.literal, value)) or "NULL") + ")"
        if type(value) is int:
            return str(value)
        escaped: str = self._connection.literal(mysql_cell(value))
        return escaped


class _Statements:
    """Statements on one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def fetch(self, statement: SqlText, **values: Any) -> Sequence[Any]:
        cursor = await self._session.query(self._session.text(statement, values))
        rows: Sequence[Any] = await cursor.fetchall()
        return rows

    async def execute(self, statement: SqlText, **values: Any) -> int:
        cursor = await self._session.query(self._session.text(statement, values))
        count: int = cursor.rowcount
        return count

    async def execute_many(self, statement: SqlText, rows: Sequence[Mapping[str, Any]]) -> None:
        start, values, mark = statement.text.partition(" VALUES ")
        if values and mark.endswith(")"):
            # Rows of one INSERT get ascending numbers in their order.
            for some in self._packets(mark, statement.names, rows):
                await self._session.query(f"{start} VALUES {','.join(some)}")
        else:
            for some in self._packets(statement.text, statement.names, rows):
                await self._session.query(";".join(some))

    def _packets(self, text: str, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
        """The text for each row, as many together as fit into a packet."""
        literal = self._session.literal
        some: list[str] = []
        size = 0
        for row in rows:
            filled = text % tuple([literal(row[name]) for name in names])
            if some and size + len(filled) > _PACKET_BYTES:
                yield some
                some, size = [], 0
            some.append(filled)
            size += len(filled)
        if some:
            yield some

    async def run(self, text: str) -> None:
        await self._session.query(text)


class MysqlDatabase:
    """A pool of sessions."""

    def __init__(self, url: str, name: str, *, pool_size: int) -> None:
        self.url = url
        self._settings = connect_settings(url)
        self.name = name
        # From the URL until the server is asked, for migrations that are only printed.
        self.collation = COLLATIONS["MariaDB" if url.startswith("mariadb:") else "MySQL"]
        # MariaDB ignores SKIP LOCKED in the subquery of an UPDATE.
        self.can_skip_locked = not url.startswith("mariadb:")
        self._places = PerLoop(lambda: asyncio.Semaphore(pool_size))
        self._resting: list[Session] = []
        self._is_open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = PerLoop(asyncio.Lock)

    async def open(self, *, create: bool = False) -> None:
        async with self._opening():
            loop = asyncio.get_running_loop()
            if not self._is_open or self._loop is not loop:
                self._loop = loop
                self._resting.clear()  # sessions of another event loop cannot be used
                with self.errors():
                    self._resting.append(await self._connect())
                self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        resting, self._resting = self._resting, []
        for session in resting:
            session.close()

    async def _raw(self) -> Any:
        async with asyncio.timeout(_CONNECT_SECONDS):
            return await asyncmy.connect(
                **self._settings,
                charset="utf8mb4",
                autocommit=True,
                # Count the rows that were found, not only those that changed.
                client_flag=FOUND_ROWS | MULTI_STATEMENTS,
                program_name="pillarbox",
            )

    async def _connect(self) -> Session:
        connection = await self._raw()
        try:
            cursor = connection.cursor()
            await cursor.execute("SELECT VERSION(), @@max_allowed_packet")
            ((version, max_packet),) = await cursor.fetchall()
            self.collation = COLLATIONS["MariaDB" if "MariaDB" in version else "MySQL"]
            self.can_skip_locked = "MariaDB" not in version
            for setting in _SETTINGS:
                await cursor.execute(setting.format(collation=self.collation))
        except BaseException:
            connection.close()
            raise
        return Session(connection, max_packet)

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except asyncmy.errors.Error as error:
            raise self._error(error) from error
        except (OSError, TimeoutError) as error:
            raise StoreDown(f"{self.name} cannot be used now ({type(error).__name__}: {error})") from error

    def _error(self, error: Exception) -> PillarboxError:
        code = _code(error)
        text = "" if code in _QUOTING or len(error.args) < 2 else f": {error.args[1]}"
        if code == _DUPLICATE:
            return DuplicateEvent("an event with this id is in this stream already; give another id, or leave it out")
        if code in _CROSSED:
            return Crossed(f"{self.name} cannot be used now (error {code}{text})")
        if code in _NO_TABLE:
            return SchemaError(f"{self.name}{text}; make the tables with `pillarbox init`, or `await store.migrate()`")
        if code == _NO_DATABASE:
            return StoreError(f"{self.name}: there is no such database; create it, or correct the URL")
        if code in _REFUSED:
            return StoreError(f"{self.name}: user or password refused; correct the URL")
        if code in _NO_RIGHT:
            return NotAllowed(f"{self.name}{text}; grant it to the user of the relay")
        if code == _TOO_LARGE:
            return StoreError(f"{self.name}{text}; raise max_allowed_packet of the server, or send smaller events")
        if code in _PASSING or 2000 <= code < 3000:
            return StoreDown(f"{self.name} cannot be used now (error {code}{text})")
        return StoreError(f"{self.name}: error {code}{text}")

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        async with self._places():
            session = await self._take()
            try:
                yield session
            finally:
                if session.broken or not self._is_open:
                    session.close()
                    if session.busy:
                        await self._end(session.number)
                else:
                    session.rested_at = time.monotonic()
                    self._resting.append(session)

    async def _take(self) -> Session:
        while True:
            if not self._is_open:
                raise StoreDown(f"{self.name} is closed; open the store first")
            if not self._resting:
                return await self._connect()
            # The last first, so that connections that are not needed grow old at the other end.
            session = self._resting.pop()
            try:
                if await session.is_there():
                    return session
            except BaseException:
                session.close()
                raise
            session.close()

    async def _end(self, number: int) -> None:
        """Tell the server to stop the statement of a client that is gone: it would go on and keep its locks."""
        kill = asyncio.create_task(self._kill(number))
        with suppress(asyncio.CancelledError):
            await asyncio.wait([kill], timeout=_KILL_SECONDS)
        kill.cancel()

    async def _kill(self, number: int) -> None:
        with suppress(asyncmy.errors.Error, OSError, TimeoutError):
            connection = await self._raw()
            try:
                await connection.cursor().execute(f"KILL {number}")
            finally:
                connection.close()

    async def fetch(self, statement: SqlText, **values: Any) -> Sequence[Any]:
        return await again(lambda: self._single(lambda one: one.fetch(statement, **values)))

    async def execute(self, statement: SqlText, **values: Any) -> int:
        return await again(lambda: self._single(lambda one: one.execute(statement, **values)))

    async def execute_many(self, statement: SqlText, rows: Sequence[Mapping[str, Any]]) -> None:
        await self.transact(lambda tx: tx.execute_many(statement, rows))

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        async def call() -> T:
            async with self.transaction() as tx:
                return await work(tx)

        return await again(call)

    async def run(self, text: str) -> None:
        await self._single(lambda one: one.run(text))

    async def _single(self, call: Callable[[_Statements], Awaitable[T]]) -> T:
        with self.errors():
            async with self._session() as session:
                return await call(_Statements(session))

    async def together(self, statement: SqlText, **values: Any) -> Sequence[Any]:
        """A whole transaction in one round trip: a client that freezes or dies cannot leave it unfinished."""

        async def call() -> Sequence[Any]:
            with self.errors():
                async with self._session() as session:
                    try:
                        return await _Statements(session).fetch(statement, **values)
                    except asyncmy.errors.Error:
                        if not session.broken:
                            await session.query("ROLLBACK")
                        raise

        return await again(call)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[Connection]:
        """Statements on one connection, each of which commits by itself."""
        with self.errors():
            async with self._session() as session:
                yield _Statements(session)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        with self.errors():
            async with self._session() as session:
                await session.query("BEGIN")
                try:
                    yield _Statements(session)
                    await session.query("COMMIT")
                except Exception:
                    if not session.broken:
                        await session.query("ROLLBACK")
                    raise
                except BaseException:
                    session.broken = True  # cancelled: closing the connection rolls back without an answer
                    raise
