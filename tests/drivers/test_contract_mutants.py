"""Tests of the contract: a driver with a planted bug must fail it."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from sqlalchemy.orm import sessionmaker

from pillarbox.conformance.driver import DriverContract
from pillarbox.conformance.driver_setup import Application
from pillarbox.drivers import driver_of
from pillarbox.drivers.aiosqlite import AioSqlite
from pillarbox.drivers.contract import OUTBOX, Answer, BuildLater, Driver, Feature, PoolDriver, Statement
from pillarbox.drivers.sqlalchemy import SqlAlchemySession
from pillarbox.drivers.sqlite3 import Sqlite3
from pillarbox.sql.dialects import ErrorKind
from tests.drivers import applications


class SaysThatItWaits(Sqlite3):
    is_buffered = True


class CommitsByItself(Sqlite3):
    def ask(self, statement: Statement) -> Any:
        answer = super().ask(statement)
        self.connection.commit()
        return answer


class UsesAnotherConnection(Sqlite3):
    def ask(self, statement: Statement) -> Any:
        (_, _, path) = next(iter(self.connection.cursor().execute("PRAGMA database_list").fetchall())).values()
        with sqlite3.connect(path) as own:
            answer = Sqlite3(own).ask(statement)
        own.close()
        return answer


class TakesEveryHandle(Sqlite3):
    def begins_by_itself(self) -> bool:
        return True


class NeverInATransaction(Sqlite3):
    def in_transaction(self) -> bool:
        return False


class AlwaysInATransaction(Sqlite3):
    def in_transaction(self) -> bool:
        return True


class DoesNotCount(Sqlite3):
    def ask(self, statement: Statement) -> Any:
        return super().ask(statement)._replace(affected=1)


class KeepsTheCallersRows(Sqlite3):
    def ask(self, statement: Statement) -> Any:
        cursor = self.connection.execute(statement.text, statement.values)
        rows = cursor.fetchall()
        return Answer(rows, len(rows) if statement.has_rows else cursor.rowcount)


class ReturnsOneRow(Sqlite3):
    def ask(self, statement: Statement) -> Any:
        answer = super().ask(statement)
        return answer._replace(rows=answer.rows[:1])


class OnlyAscii(Sqlite3):
    def ask(self, statement: Statement) -> Any:
        plain = [
            value.encode("ascii", "replace").decode() if isinstance(value, str) else value for value in statement.values
        ]
        return super().ask(statement._replace(values=plain))


class EmptyIsNone(Sqlite3):
    def ask(self, statement: Statement) -> Any:
        return super().ask(statement._replace(values=[value if value != "" else None for value in statement.values]))


class KnowsNoDuplicate(Sqlite3):
    def classify(self, error: BaseException) -> ErrorKind:
        kind = super().classify(error)
        return ErrorKind.OTHER if kind is ErrorKind.DUPLICATE else kind


class EveryConflictIsADuplicate(Sqlite3):
    def classify(self, error: BaseException) -> ErrorKind:
        return ErrorKind.DUPLICATE if isinstance(error, sqlite3.IntegrityError) else super().classify(error)


class ShowsValues(Sqlite3):
    def ask(self, statement: Statement) -> Any:
        try:
            return super().ask(statement)
        except sqlite3.IntegrityError as error:
            raise sqlite3.IntegrityError(f"{error}: {statement.values}") from None


class KnowsNoConflict(Sqlite3):
    def classify(self, error: BaseException) -> ErrorKind:
        kind = super().classify(error)
        return ErrorKind.OTHER if kind is ErrorKind.CONFLICT else kind


class BlockWithoutEnd(Sqlite3):
    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        yield self.connection


class Abandons(AioSqlite):
    """Does not end the transaction."""

    def abandon(self) -> None:
        self.in_transaction()


class CannotBeClosed(AioSqlite):
    def abandon(self) -> None:
        super().abandon()
        self.connection.close = asyncio.Event().wait


class NeverCommits(AioSqlite):
    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        await self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        finally:
            await self.connection.rollback()


class AlwaysCommits(AioSqlite):
    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        try:
            yield self.connection
        finally:
            await self.connection.commit()


class CommitsWhenCancelled(AioSqlite):
    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        await self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        except Exception:
            await self.connection.rollback()
            raise
        finally:
            await self.connection.commit()


class RollsBackEverything(AioSqlite):
    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        try:
            async with super().begin() as connection:
                yield connection
        except ZeroDivisionError:
            await self.connection.rollback()
            raise


class CommitsTheCallersTransaction(AioSqlite):
    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        await self.connection.commit()
        async with super().begin() as connection:
            yield connection


class LeakyPool(PoolDriver):
    """Acquires a connection for each block, and keeps it."""

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        connection = await self._acquire().__aenter__()  # type: ignore[union-attr]
        async with self._driver(connection).begin() as begun:
            yield begun


class PoolThatTakesStatements(PoolDriver):
    def check(self, feature: Feature = OUTBOX) -> None:
        """Says nothing."""


class WritesAtOnce(SqlAlchemySession):
    def defer(self, items: Sequence[Any], group: Any, build: BuildLater) -> None:
        self.run(build(group, items))


class WritesOneByOne(SqlAlchemySession):
    def defer(self, items: Sequence[Any], group: Any, build: BuildLater) -> None:
        super().defer(items, group, lambda *work: build(*work))


class OutlivesARollback(SqlAlchemySession):
    def defer(self, items: Sequence[Any], group: Any, build: BuildLater) -> None:
        super().defer(items, group, build)
        if items[0].number == 3:
            self._handle.commit()


class Pool:
    """Two connections."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._free = asyncio.Semaphore(2)
        self._made: list[aiosqlite.Connection] = []

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[aiosqlite.Connection]:
        await self._free.acquire()
        connection = await aiosqlite.connect(self._path)
        self._made.append(connection)
        yield connection
        self._free.release()

    async def close(self) -> None:
        for connection in self._made:
            await connection.close()


class WithPool(applications.AioSqlite):
    has_pool = True

    async def pool(self) -> Pool:
        return Pool(self.url.removeprefix("sqlite:///"))


class Contract(DriverContract):
    limit_seconds = 1.0

    def __init__(self, mutant: type[Driver]) -> None:
        self.drivers = (mutant,)  # type: ignore[misc]
        self.mutant = mutant

    def driver(self, handle: Any) -> Driver:
        is_pool = issubclass(self.mutant, PoolDriver)
        if isinstance(handle, Pool):
            return self.mutant(handle.acquire, AioSqlite) if is_pool else PoolDriver(handle.acquire, AioSqlite)  # type: ignore[call-arg]
        if isinstance(handle, sessionmaker):
            return driver_of(handle)
        return AioSqlite(handle) if is_pool else self.mutant(handle)  # type: ignore[call-arg]


TESTS = [name for name in dir(DriverContract) if name.startswith("test_")]
HEALTHY: dict[type[Driver], type[Application]] = {
    AioSqlite: WithPool,  # before the one that it is derived from
    Sqlite3: applications.Sqlite3,
    SqlAlchemySession: applications.SqlAlchemySession,
}
MUTANTS: dict[type[Driver], str] = {
    SaysThatItWaits: "test_its_handles_are_known",
    CommitsByItself: "test_a_statement_commits_with_the_callers_data",
    UsesAnotherConnection: "test_a_statement_rolls_back_with_the_callers_data",
    TakesEveryHandle: "test_it_refuses_where_every_statement_commits_by_itself",
    NeverInATransaction: "test_it_knows_whether_a_transaction_is_open",
    AlwaysInATransaction: "test_it_knows_whether_a_transaction_is_open",
    DoesNotCount: "test_an_answer_has_rows_and_their_number",
    KeepsTheCallersRows: "test_an_answer_has_rows_and_their_number",
    ReturnsOneRow: "test_an_answer_has_rows_and_their_number",
    OnlyAscii: "test_values_arrive_as_they_were_given",
    EmptyIsNone: "test_values_arrive_as_they_were_given",
    KnowsNoDuplicate: "test_it_classifies_errors",
    EveryConflictIsADuplicate: "test_it_classifies_errors",
    ShowsValues: "test_an_error_shows_no_values",
    KnowsNoConflict: "test_a_row_that_another_transaction_has_locked_is_a_conflict",
    BlockWithoutEnd: "test_a_block_commits_or_rolls_back",
    Abandons: "test_an_abandoned_transaction_cannot_commit",
    CannotBeClosed: "test_an_abandoned_connection_can_be_closed",
    NeverCommits: "test_a_block_commits_or_rolls_back",
    AlwaysCommits: "test_a_block_commits_or_rolls_back",
    CommitsWhenCancelled: "test_a_block_commits_or_rolls_back",
    RollsBackEverything: "test_a_block_in_an_open_transaction_is_a_savepoint",
    CommitsTheCallersTransaction: "test_a_block_in_an_open_transaction_is_a_savepoint",
    LeakyPool: "test_a_block_on_a_pool",
    PoolThatTakesStatements: "test_a_block_on_a_pool",
    WritesAtOnce: "test_deferred_items_are_written_together_with_the_flush",
    WritesOneByOne: "test_deferred_items_are_written_together_with_the_flush",
    OutlivesARollback: "test_deferred_items_are_written_together_with_the_flush",
}


def application_of(driver: type[Driver]) -> type[Application]:
    return next((app for kind, app in HEALTHY.items() if issubclass(driver, kind)), WithPool)


async def fails(driver: type[Driver], test: str, path: Path) -> bool:
    contract, kind = Contract(driver), application_of(driver)
    async with contract.opened(lambda: kind(f"sqlite:///{path}/shop.db")) as shop:
        try:
            await getattr(contract, test)(shop)
        except (Exception, pytest.fail.Exception):
            return True
        return False


@pytest.mark.asyncio
@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("driver", HEALTHY)
async def test_a_healthy_driver_passes(driver: type[Driver], test: str, tmp_path: Path) -> None:
    condition, _ = getattr(getattr(DriverContract, test), "only", (lambda app: True, ""))
    if condition(HEALTHY[driver]):
        assert not await fails(driver, test, tmp_path)


@pytest.mark.asyncio
@pytest.mark.parametrize("mutant", MUTANTS)
async def test_a_mutant_is_caught(mutant: type[Driver], tmp_path: Path) -> None:
    assert await fails(mutant, MUTANTS[mutant], tmp_path), f"{mutant.__name__} survived {MUTANTS[mutant]}"


def test_every_test_of_the_contract_catches_a_mutant() -> None:
    assert set(MUTANTS.values()) == set(TESTS)
