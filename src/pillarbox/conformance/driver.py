"""The contract of a driver as tests on a real database."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from traceback import format_exception
from typing import Any, Final
from uuid import uuid4

import pytest

from pillarbox.conformance.driver_setup import DriverSetup, Row, Shop, only
from pillarbox.drivers.contract import Build, Driver, Steps
from pillarbox.errors import ConfigError, NotInTransaction
from pillarbox.sql.dialects import ErrorKind

AWKWARD: Final = """snow ☃ 😀 "double" 'single' \\ back % percent %s %(name)s $1 ? :name ; -- `tick`"""


class DriverContract(DriverSetup):
    """Subclass it as ``Test...`` with a fixture ``application`` that makes applications."""

    @pytest.mark.asyncio
    async def test_its_handles_are_known(self, shop: Shop) -> None:
        driver = self.driver(shop.app.handle)
        assert type(driver) in self.drivers, "handles of this kind get another driver"
        assert driver.is_buffered == shop.app.is_buffered
        assert not driver.is_pool
        assert driver.is_awaited == shop.app.is_awaited or driver.is_buffered

    @pytest.mark.asyncio
    async def test_a_statement_commits_with_the_callers_data(self, shop: Shop) -> None:
        await shop.app.begin()
        await self.write_own(shop)
        await self.run(shop.app, self.insert(shop.table, Row(1)))
        assert await self.committed(shop) == []
        await shop.app.commit()
        assert await self.committed(shop) == [0, 1]

    @pytest.mark.asyncio
    async def test_a_statement_rolls_back_with_the_callers_data(self, shop: Shop) -> None:
        await shop.app.begin()
        await self.run(shop.app, self.insert(shop.table, Row(1)))
        await self.write_own(shop)
        await shop.app.rollback()
        assert await self.committed(shop) == []

    @pytest.mark.asyncio
    async def test_it_refuses_where_every_statement_commits_by_itself(self, shop: Shop) -> None:
        await shop.app.close()
        await shop.app.open(autocommit=True)
        with pytest.raises(NotInTransaction) as caught:
            await self.run(shop.app, self.insert(shop.table, Row(1)))
        assert "; " in str(caught.value), "the error must name a remedy"
        assert await self.committed(shop) == []

    @pytest.mark.asyncio
    async def test_it_knows_whether_a_transaction_is_open(self, shop: Shop) -> None:
        assert not self.driver(shop.app.handle).in_transaction()
        await shop.app.begin()
        await self.run(shop.app, self.insert(shop.table, Row(1)))
        assert self.driver(shop.app.handle).in_transaction()
        await shop.app.commit()
        assert not self.driver(shop.app.handle).in_transaction()

    @pytest.mark.asyncio
    async def test_an_answer_has_rows_and_their_number(self, shop: Shop) -> None:
        await shop.app.begin()
        added = await self.run(shop.app, self.insert(shop.table, Row(1, 10, "a"), Row(2, 20, None), Row(3, 30, "c")))
        paid = await self.run(shop.app, self.pay(shop.table, 20))
        unpaid = await self.run(shop.app, self.pay(shop.table, 50))
        assert [(list(each.rows), each.affected) for each in (added, paid, unpaid)] == [([], 3), ([], 2), ([], 0)]
        answer = await self.run(shop.app, self.rows(shop.table))
        assert [(row[0], row[1], row[2]) for row in answer.rows] == [(1, 10, "a"), (2, 21, None), (3, 31, "c")]
        assert answer.affected == 3

    @pytest.mark.asyncio
    async def test_values_arrive_as_they_were_given(self, shop: Shop) -> None:
        at = datetime(2024, 2, 29, 23, 59, 59, 123000, tzinfo=UTC)
        row = Row(1, 2**62, AWKWARD, bytes(range(256)), uuid4(), at)
        await shop.app.begin()
        await self.run(shop.app, self.insert(shop.table, row, row._replace(number=2, body="", data=b"")))
        assert [found[0] for found in (await self.run(shop.app, self.equal(shop.table, row))).rows] == [1]
        bodies = [found[2] for found in (await self.run(shop.app, self.rows(shop.table))).rows]
        assert bodies == [AWKWARD, ""]

    @pytest.mark.asyncio
    async def test_it_classifies_errors(self, shop: Shop) -> None:
        await self.alone(shop.app, self.insert(shop.table, Row(1)))
        cases = [(self.insert(shop.table, Row(1)), ErrorKind.DUPLICATE), (self.refused(shop.table), ErrorKind.OTHER)]
        if self.has_tables:
            cases.append((self.insert(f"{shop.table}_nowhere", Row(1)), ErrorKind.NO_TABLE))
        for build, kind in cases:
            await shop.app.begin()
            assert await self.run(shop.app, _classified(build)) is kind
            await shop.app.rollback()

    @pytest.mark.asyncio
    async def test_a_row_that_another_transaction_has_locked_is_a_conflict(self, shop: Shop) -> None:
        await self.alone(shop.app, self.insert(shop.table, Row(1)))
        await shop.other.begin()
        await self.run(shop.other, self.pay(shop.table, 0))
        await shop.app.begin()
        assert await self.run(shop.app, _classified(self.pay_at_once(shop.table))) is ErrorKind.CONFLICT
        for each in (shop.app, shop.other):
            await each.rollback()

    @pytest.mark.asyncio
    async def test_an_error_shows_no_values(self, shop: Shop) -> None:
        card = "4111" * 4  # not in one piece: a traceback shows these lines
        await shop.app.begin()
        await self.run(shop.app, self.insert(shop.table, Row(1, body=card)))
        with pytest.raises(Exception) as caught:  # noqa: PT011
            await self.run(shop.app, self.insert(shop.table, Row(1, body=card)))
        assert card not in "".join(format_exception(caught.value))

    @only(lambda app: app.is_awaited, "it has to be awaited")
    @pytest.mark.asyncio
    async def test_an_abandoned_transaction_cannot_commit(self, shop: Shop) -> None:
        await shop.app.begin()
        await self.write_own(shop)
        self.driver(shop.app.handle).abandon()
        with suppress(Exception):  # in the driver's own words
            await shop.app.commit()
            pytest.fail("the commit of an abandoned transaction must raise")
        assert await self.committed(shop) == []

    @only(lambda app: app.is_awaited, "it has to be awaited")
    @pytest.mark.asyncio
    async def test_an_abandoned_connection_can_be_closed(self, shop: Shop) -> None:
        await shop.app.begin()
        await self.write_own(shop)
        self.driver(shop.app.handle).abandon()
        closing = asyncio.ensure_future(shop.app.close())
        ended, _ = await asyncio.wait([closing], timeout=self.limit_seconds)
        assert ended, f"close takes more than {self.limit_seconds:g} s"
        closing.exception()  # it may say that it is closed already
        assert await self.committed(shop) == []

    @pytest.mark.asyncio
    async def test_a_block_commits_or_rolls_back(self, shop: Shop) -> None:
        await self.block(shop.app.handle, self.insert(shop.table, Row(1)))
        assert await self.committed(shop) == [1]
        with pytest.raises(ZeroDivisionError):
            await self.block(shop.app.handle, self.insert(shop.table, Row(2)), ZeroDivisionError())
        with pytest.raises(asyncio.CancelledError):
            await self.block(shop.app.handle, self.insert(shop.table, Row(3)), asyncio.CancelledError())
        assert await self.committed(shop) == [1]
        await self.block(shop.app.handle, self.insert(shop.table, Row(4)))
        assert await self.committed(shop) == [1, 4], "the next block on the same connection must commit too"

    @only(lambda app: app.has_savepoints, "it has savepoints")
    @pytest.mark.asyncio
    async def test_a_block_in_an_open_transaction_is_a_savepoint(self, shop: Shop) -> None:
        await shop.app.begin()
        await self.write_own(shop)
        await self.block(shop.app.handle, self.insert(shop.table, Row(1)))
        with pytest.raises(ZeroDivisionError):
            await self.block(shop.app.handle, self.insert(shop.table, Row(2)), ZeroDivisionError())
        assert await self.committed(shop) == []
        await shop.app.commit()
        assert await self.committed(shop) == [0, 1]

    @only(lambda app: app.has_pool, "it has a pool")
    @pytest.mark.asyncio
    async def test_a_block_on_a_pool(self, shop: Shop) -> None:
        pool = await shop.app.pool()
        try:
            assert self.driver(pool).is_pool
            with pytest.raises(ConfigError):
                self.driver(pool).check()
            async with asyncio.timeout(self.limit_seconds):
                for number in range(1, 6):  # more than a pool of tests has connections
                    await self.block(pool, self.insert(shop.table, Row(number)))
            with pytest.raises(ZeroDivisionError):
                await self.block(pool, self.insert(shop.table, Row(6)), ZeroDivisionError())
        finally:
            await shop.app.close_pool(pool)
        assert await self.committed(shop) == [1, 2, 3, 4, 5]

    @only(lambda app: app.is_buffered, "its writes wait for a flush")
    @pytest.mark.asyncio
    async def test_deferred_items_are_written_together_with_the_flush(self, shop: Shop) -> None:
        runs: list[int] = []

        def build(table: str, rows: Sequence[Row]) -> Build[Any]:
            runs.append(len(rows))
            return self.insert(table, *rows)

        for number in (1, 2):
            self.driver(shop.app.handle).defer([Row(number)], shop.table, build)
        assert runs == []
        await shop.app.commit()
        assert runs == [2]
        self.driver(shop.app.handle).defer([Row(3)], shop.table, build)
        await shop.app.rollback()
        await shop.app.commit()
        assert await self.committed(shop) == [1, 2]


def _classified(build: Build[Any]) -> Build[ErrorKind]:
    def steps(driver: Driver) -> Steps[ErrorKind]:
        try:
            yield from build(driver)
        except Exception as error:
            return driver.classify(error)
        return pytest.fail("the statement must fail")

    return steps
