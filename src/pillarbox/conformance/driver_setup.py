"""The application and the fixtures for the tests of a driver."""

import asyncio
import inspect
import itertools
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

import pytest
import pytest_asyncio

from pillarbox.drivers.contract import Answer, Build, Driver, Statement, Steps
from pillarbox.drivers.registry import driver_of

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., Any])
TYPES: Final = {
    "postgresql": {"{text}": "text", "{bytes}": "bytea", "{id}": "uuid", "{instant}": "timestamptz"},
    "mysql": {
        "{text}": "text CHARACTER SET utf8mb4",
        "{bytes}": "longblob",
        "{id}": "binary(16)",
        "{instant}": "datetime(6)",
    },
    "sqlite": {"{text}": "text", "{bytes}": "blob", "{id}": "text", "{instant}": "text"},
}
_numbers = itertools.count(1)


async def done(result: Any) -> Any:
    """The result, awaited if it has to be."""
    return await result if inspect.isawaitable(result) else result


class Application:
    """An application with one connection, and its own calls of the driver.

    ``handle`` is the object that it passes to Pillarbox. Override ``connect``, and each method whose default is wrong.
    """

    is_awaited: ClassVar[bool] = False  # whether a forgotten await is possible
    is_buffered: ClassVar[bool] = False  # whether writes wait for a flush
    has_pool: ClassVar[bool] = False
    has_savepoints: ClassVar[bool] = True

    def __init__(self, url: str) -> None:
        self.url = url
        self.handle: Any = None

    async def open(self, *, autocommit: bool = False) -> Any:
        """Connect; with autocommit every statement commits by itself."""
        self.handle = await self.connect(autocommit)
        return self.handle

    async def connect(self, autocommit: bool) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must say how it connects")

    async def begin(self) -> None:
        """Open a transaction, if the first statement does not do that."""

    async def execute(self, text: str) -> None:
        await done(self.handle.execute(text))

    async def commit(self) -> None:
        await done(self.handle.commit())

    async def rollback(self) -> None:
        await done(self.handle.rollback())

    async def close(self) -> None:
        await done(self.handle.close())

    async def pool(self) -> Any:
        """A handle besides a connection that ``outbox.transaction`` takes."""
        raise NotImplementedError(f"{type(self).__name__} has no pool")

    async def close_pool(self, pool: Any) -> None:
        await done(pool.close())


MakeApplication: TypeAlias = Callable[[], Application]


def only(condition: Callable[[Application], bool], where: str) -> Callable[[Test], Test]:
    """Run a test only for applications with this condition."""

    def mark(test: Test) -> Test:
        vars(test)["only"] = condition, where
        return test

    return mark


class Row(NamedTuple):
    """A row of the tests' table; ids and instants as a feature has them."""

    number: int
    amount: int | None = 0
    body: str | None = None
    data: bytes | None = None
    uid: UUID | None = None
    at: datetime | None = None


class Shop(NamedTuple):
    """An application, a second one that reads, and their table."""

    app: Application
    other: Application
    table: str


class DriverSetup:
    """Shared by the tests of a driver: two applications on their own table, and its statements."""

    drivers: ClassVar[Sequence[type[Driver]]] = ()  # the classes to test
    limit_seconds: ClassVar[float] = 10.0
    has_tables: ClassVar[bool] = True  # False: a table that is missing is made by the first write

    @pytest.fixture
    def application(self) -> MakeApplication:
        """Override it: each call makes an Application that is not open yet, on the same database."""
        raise NotImplementedError("give the class a fixture `application` that makes applications")

    @pytest_asyncio.fixture
    async def shop(self, application: MakeApplication, request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
        condition, where = getattr(request.function, "only", (None, ""))
        if condition is not None and not condition(application()):
            pytest.skip(f"only where {where}")
        async with self.opened(application) as shop:
            yield shop

    def driver(self, handle: Any) -> Driver:
        """The driver to test."""
        return driver_of(handle)

    @asynccontextmanager
    async def opened(self, application: MakeApplication) -> AsyncIterator[Shop]:
        shop = Shop(application(), application(), f"driver_{os.getpid()}_{next(_numbers)}")
        await shop.app.open()
        await shop.other.open()
        await self.alone(shop.other, self.create(shop.table))
        yield shop
        for each in (shop.app, shop.other):
            # A test may have ended the connection, or left a transaction open on it.
            for end in (each.rollback, each.close):
                with suppress(Exception):
                    await asyncio.wait_for(end(), self.limit_seconds)
        last = application()
        await last.open()
        await self.alone(last, self.drop(shop.table))
        await last.close()

    async def alone(self, application: Application, build: Build[Any]) -> None:
        """Run it in a transaction of its own."""
        await application.begin()
        await self.run(application, build)
        await application.commit()

    async def run(self, application: Application, build: Build[T]) -> T:
        """Check, then run the steps, as a feature does."""

        def checked(driver: Driver) -> Steps[T]:
            driver.check()
            return (yield from build(driver))

        result: T = await done(self.driver(application.handle).run(checked))
        return result

    async def block(self, handle: Any, build: Build[Any], error: BaseException | None = None) -> None:
        async with self.driver(handle).begin() as connection:
            await done(self.driver(connection).run(build))
            if error is not None:
                raise error

    async def committed(self, shop: Shop) -> list[int]:
        """The numbers of the rows that another connection sees."""
        await shop.other.begin()
        answer = await self.run(shop.other, self.rows(shop.table))
        await shop.other.rollback()
        return [row[0] for row in answer.rows]

    # The statements of the tests. A driver that does not speak SQL brings its own, with the same answers.

    def ask(self, text: str, *values: Any, has_rows: bool = False) -> Build[Answer]:
        """One statement, with ? for each value."""

        def steps(driver: Driver) -> Steps[Answer]:
            cell, marks = driver.dialect.cell or (lambda value: value), iter(driver.dialect.marks(len(values)))
            types = TYPES[driver.dialect.database]
            own = re.sub(r"\?|\{\w+\}", lambda found: types.get(found[0]) or next(marks), text)
            answer: Answer = yield Statement(own, [cell(value) for value in values], has_rows)
            return answer

        return steps

    def create(self, table: str) -> Build[Answer]:
        columns = (
            "number integer PRIMARY KEY, amount bigint NOT NULL, body {text}, data {bytes}, uid {id}, at {instant}"
        )
        return self.ask(f"CREATE TABLE {table} ({columns})")

    def drop(self, table: str) -> Build[Answer]:
        return self.ask(f"DROP TABLE {table}")

    async def write_own(self, shop: Shop) -> None:
        """Write row 0 by the application's own means."""
        await shop.app.execute(f"INSERT INTO {shop.table} (number, amount) VALUES (0, 0)")

    def insert(self, table: str, *rows: Row) -> Build[Answer]:
        values = [value for row in rows for value in row]
        return self.ask(f"INSERT INTO {table} VALUES {', '.join(['(?, ?, ?, ?, ?, ?)'] * len(rows))}", *values)

    def rows(self, table: str) -> Build[Answer]:
        """Number, amount and body of each row."""
        return self.ask(f"SELECT number, amount, body FROM {table} ORDER BY number", has_rows=True)

    def equal(self, table: str, row: Row) -> Build[Answer]:
        """The rows that have all these values."""
        same = " AND ".join(f"{name} = ?" for name in Row._fields)
        return self.ask(f"SELECT number FROM {table} WHERE {same}", *row, has_rows=True)

    def pay(self, table: str, least: int) -> Build[Answer]:
        """Add 1 to each amount from ``least`` on."""
        return self.ask(f"UPDATE {table} SET amount = amount + 1 WHERE amount >= ?", least)

    def pay_at_once(self, table: str) -> Build[Answer]:
        """Add 1 to each amount, and fail where another transaction has locked a row, without a long wait."""

        def steps(driver: Driver) -> Steps[Answer]:
            if driver.dialect.database == "sqlite":
                yield Statement("PRAGMA busy_timeout = 10")
            else:
                yield Statement(f"SELECT number FROM {table} FOR UPDATE NOWAIT", has_rows=True)
            return (yield from self.pay(table, 0)(driver))

        return steps

    def refused(self, table: str) -> Build[Answer]:
        """A statement that fails, but not for a duplicate or a table."""
        return self.insert(table, Row(2, None))
