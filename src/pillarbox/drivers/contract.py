"""The contract of a driver: everything that a feature does with a caller's handle."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

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


# A feature yields its statements and is sent their answers, so that one text serves plain and awaited drivers. An error
# of the driver is raised where the statement was yielded.
Steps: TypeAlias = Generator[Any, Any, T]


class Driver(ABC):
    """One handle of the caller's, for the length of a call. It never commits what it did not begin."""

    family: ClassVar[Literal["sql", "mongo"]] = "sql"  # of the steps that it runs
    is_awaited: ClassVar[bool] = False  # whether ask returns an awaitable
    is_buffered: ClassVar[bool] = False  # whether writes wait for the caller's flush: see defer
    needs_transaction: ClassVar[bool] = True  # False: the database can do without, if the caller says so
    handle_name: ClassVar[str] = "connection"  # as an error names it
    remedy: ClassVar[str] = "open a transaction first"  # how a transaction is opened on it
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

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """A block with a transaction, or with a savepoint in the one that is open; gives the caller's connection."""
        raise ConfigError(
            f"outbox.transaction is for drivers that have to be awaited; on this {self.handle_name} call outbox.add"
        )

    def abandon(self) -> None:
        """Keep the open transaction from committing, without waiting: a write of it was not awaited."""
        raise NotImplementedError(f"{type(self).__name__} has to be awaited; it needs a way to end its transaction")

    def classify(self, error: BaseException) -> ErrorKind:
        """The kind of an error that ``ask`` raised."""
        return self.dialect.classify(error)

    def check(self) -> None:
        """Raise NotInTransaction if a statement would commit by itself."""
        if not self.begins_by_itself() and not self.in_transaction():
            raise not_in_transaction(self.handle_name, self.remedy)

    def defer(self, items: Sequence[Any], group: Any, build: "BuildLater") -> None:
        """Keep items for the caller's flush, and run ``build(group, items)`` then. Equal groups in a row run as one."""
        raise NotImplementedError(f"{type(self).__name__} is not buffered")

    def deferred(self) -> Iterable[tuple[Any, Any]]:
        """The items that wait for the flush, each with its group."""
        return ()

    def run(self, build: "Build[T]") -> Any:
        """Run the steps that a feature builds for this driver: their result, or an awaitable of it."""
        running = self._run(build(self))
        if self.is_awaited:
            return running
        # It awaits nothing, so that it ends at once.
        try:
            running.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError(f"{type(self).__name__} is not awaited, and waits")

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


class PoolDriver(Driver):
    """A pool of connections that have to be awaited: it begins transactions, and has none of its own."""

    is_awaited = True

    def __init__(
        self, acquire: Callable[[], AbstractAsyncContextManager[Any]], driver: Callable[[Any], Driver]
    ) -> None:
        self._acquire = acquire
        self._driver = driver

    def _refuse(self) -> ConfigError:
        return ConfigError(
            "a pool has no transaction; use `async with outbox.transaction(pool) as tx:` and tx.add, "
            "or pass a connection"
        )

    def in_transaction(self) -> bool:
        raise self._refuse()

    def ask(self, statement: Any) -> Awaitable[Answer]:
        raise self._refuse()

    @asynccontextmanager
    async def begin(self) -> Any:
        async with self._acquire() as connection, self._driver(connection).begin() as begun:
            yield begun


def not_in_transaction(handle_name: str, remedy: str) -> NotInTransaction:
    return NotInTransaction(
        f"this {handle_name} commits every statement by itself, so that your data and its event would not commit "
        f"together; {remedy}"
    )


def unknown_handle(handle: Any, remedy: str) -> ConfigError:
    return ConfigError(f"the outbox cannot write with a {type(handle).__qualname__}; {remedy}")
