"""The contract of a driver: everything that a feature does with a caller's handle."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, TypeVar

from pillarbox.errors import ConfigError, NotInTransaction
from pillarbox.sql.dialects import Dialect, ErrorKind

T = TypeVar("T")


class Statement(NamedTuple):
    """SQL in the driver's dialect, with the values of its parameters."""

    text: str
    values: Sequence[Any] = ()
    has_rows: bool = False  # whether it answers with rows


class Answer(NamedTuple):
    """The answer to a statement."""

    rows: Sequence[Sequence[Any]]  # the columns by position, whatever rows the caller's connection makes
    affected: int  # the number of rows that were written; of a statement that has rows, the number of these


class Feature(NamedTuple):
    """The words of a feature for a handle that it cannot use."""

    loss: str  # what would happen if every statement committed by itself
    on_pool: str  # the remedy where a pool was passed
    on_client: str  # the remedy where a client, database or collection of MongoDB was passed


OUTBOX: Final = Feature(
    "your data and its event would not commit together",
    "pass a connection, or write `with outbox.transaction(pool) as tx:` and tx.add, with `async with` if it is awaited",
    "pass a session that has one, or declare the outbox as used without: Outbox(transactions=False)",
)

# A feature yields its statements and is sent their answers, so that one text serves plain and awaited drivers. An error
# of the driver is raised where the statement was yielded.
Steps: TypeAlias = Generator[Any, Any, T]


class Driver(ABC):
    """One handle of the caller's, for the length of a call. It never commits what it did not begin."""

    family: ClassVar[Literal["sql", "mongo"]] = "sql"  # of the steps that it runs
    is_awaited: bool = False  # whether ask returns an awaitable
    is_pool: bool = False  # whether each block of ``begin`` has a connection that nobody else uses
    places: int | None = None  # of a pool: the most connections that it has; None: unlimited
    is_buffered: ClassVar[bool] = False  # whether writes wait for the caller's flush: see defer
    needs_transaction: ClassVar[bool] = True  # False: the database can do without, if the caller says so
    handle_name: ClassVar[str] = "connection"  # as an error names it
    remedy: ClassVar[str] = "open a transaction first"  # how a transaction is opened on it
    tables_remedy: ClassVar[str] = "make its tables with `pillarbox init`"  # where the database has no outbox
    is_nested: bool = False  # whether others have written in the open transaction before the block of ``begin``
    dialect: Dialect

    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether a transaction is open now."""

    def begins_by_itself(self) -> bool:
        """Whether the next statement opens a transaction that the caller has to commit."""
        return False

    @abstractmethod
    def ask(self, statement: Any) -> Any:
        """Run a Statement in the caller's transaction: its Answer, or an awaitable of it.

        The error of a statement that fails must not show its values.
        """

    @abstractmethod
    def begin(self) -> AbstractAsyncContextManager[Any]:
        """A block with a transaction, or with a savepoint in the one that is open; gives the handle to work with.

        It commits, or rolls back and lets the error pass. On a plain driver it awaits nothing: see ``finish``.
        """

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["Driver"]:
        """A block with the driver to begin on: of a pool, that of one of its connections."""
        yield self

    def abandon(self) -> None:
        """Keep the open transaction from committing, without waiting: a write of it was not awaited."""
        raise NotImplementedError(f"{type(self).__name__} has to be awaited; it needs a way to end its transaction")

    def is_closed(self) -> bool:
        """Whether the connection was lost. Asked after an error, because drivers have many errors for that."""
        return False

    def classify(self, error: BaseException) -> ErrorKind:
        """The kind of an error of the database, of any statement of the transaction or of its commit."""
        kind = self.dialect.classify(error)
        return ErrorKind.AWAY if kind is ErrorKind.OTHER and self.is_closed() else kind

    def check(self, feature: Feature = OUTBOX) -> None:
        """Raise NotInTransaction if a statement would commit by itself."""
        if not self.begins_by_itself() and not self.in_transaction():
            raise not_in_transaction(self.handle_name, self.remedy, feature)

    def defer(self, items: Sequence[Any], group: Any, build: "BuildLater") -> None:
        """Keep items for the caller's flush, and run ``build(group, items)`` then. Equal groups in a row run as one."""
        raise NotImplementedError(f"{type(self).__name__} is not buffered")

    def deferred(self) -> Iterable[tuple[Any, Any]]:
        """The items that wait for the flush, each with its group."""
        return ()

    def run(self, build: "Build[T]") -> Any:
        """Run the steps that a feature builds for this driver: their result, or an awaitable of it."""
        running = self._run(build(self))
        return running if self.is_awaited else finish(running)

    async def _run(self, steps: Steps[T]) -> T:
        try:
            statement = next(steps)
            while True:
                try:
                    answer = self.ask(statement)
                    if self.is_awaited:
                        answer = await answer
                except BaseException as error:
                    statement = steps.throw(error)
                else:
                    statement = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result


# A feature builds its steps for the driver that runs them, which on SQLAlchemy is that of the plain connection.
Build: TypeAlias = Callable[[Driver], Steps[T]]
BuildLater: TypeAlias = Callable[[Any, Sequence[Any]], Build[None]]


class TextBlocks(Driver):
    """Begins and ends transactions by statements, for drivers without blocks of their own."""

    begin_text: ClassVar[str] = "BEGIN"
    connection: Any

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        is_nested = self.in_transaction()
        await settled(self.ask(Statement("SAVEPOINT pillarbox" if is_nested else self.begin_text)))
        try:
            yield self.connection
            await settled(self.ask(Statement("RELEASE SAVEPOINT pillarbox" if is_nested else "COMMIT")))
        except BaseException:
            # It fails where nothing is left to roll back: a cancelled statement may close the connection, and a
            # deadlock may end the transaction with its savepoints. The caller has to see the first error.
            with suppress(Exception):
                if self.in_transaction():
                    await settled(self.ask(Statement("ROLLBACK TO SAVEPOINT pillarbox" if is_nested else "ROLLBACK")))
            raise


class PoolDriver(Driver):
    """A pool, an engine or a factory: it begins transactions, and has none of its own.

    acquire: makes a context manager that gives a connection, asynchronous if ``is_awaited``. places: see Driver.
    """

    def __init__(
        self,
        acquire: Callable[[], AbstractAsyncContextManager[Any] | AbstractContextManager[Any]],
        driver: Callable[[Any], Driver],
        *,
        is_awaited: bool = True,
        places: int | None = None,
    ) -> None:
        self.is_awaited = is_awaited
        self.is_pool = True
        self.places = places
        self._acquire = acquire
        self._driver = driver

    def check(self, feature: Feature = OUTBOX) -> None:
        raise _no_transaction(feature.on_pool)

    def in_transaction(self) -> bool:
        raise _no_transaction()

    def ask(self, statement: Any) -> Awaitable[Answer]:
        raise _no_transaction()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Driver]:
        async with _entered(self._acquire()) as connection:
            yield self._driver(connection)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with self.connected() as driver, driver.begin() as begun:
            yield begun


def _no_transaction(remedy: str = "pass a connection") -> ConfigError:
    return ConfigError(f"a pool has no transaction; {remedy}")


@asynccontextmanager
async def _entered(
    block: AbstractAsyncContextManager[T] | AbstractContextManager[T],
) -> AsyncIterator[T]:
    """Enter a context manager of either kind."""
    if isinstance(block, AbstractAsyncContextManager):
        async with block as entered:
            yield entered
    else:
        with block as entered:
            yield entered


async def settled(result: Any) -> Any:
    """The result of a plain or an awaited call."""
    return await result if inspect.isawaitable(result) else result


def finish(running: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits nothing, because its driver is plain. So one text serves both kinds of drivers."""
    try:
        running.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    running.close()
    raise AssertionError("a driver that is not awaited waits")


def not_in_transaction(handle_name: str, remedy: str, feature: Feature = OUTBOX) -> NotInTransaction:
    return NotInTransaction(f"this {handle_name} commits every statement by itself, so that {feature.loss}; {remedy}")


def unknown_handle(handle: Any, remedy: str) -> ConfigError:
    return ConfigError(f"Pillarbox cannot write with a {type(handle).__qualname__}; {remedy}")
