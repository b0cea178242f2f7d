"""Connections of the PostgreSQL store: kept between statements, shared when there are too few, replaced when cut."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from pillarbox.errors import StoreDown
from pillarbox.sql.statements import SqlText
from pillarbox.stores.postgres import connections
from pillarbox.stores.postgres.connections import OwnPool
from pillarbox.stores.postgres.database import PostgresDatabase
from servers import Postgres
from tests.integration.relays import eventually

pytestmark = pytest.mark.asyncio

POOL_SIZE = 3


def statement(text: str) -> SqlText:
    return SqlText(text, "$", {})


PID = statement("SELECT pg_backend_pid()")
SLEEP = statement("SELECT pg_backend_pid() FROM pg_sleep(:seconds)")
FAIL = statement("SELECT 1 / 0")


@pytest_asyncio.fixture
async def database(postgres: Postgres) -> AsyncIterator[PostgresDatabase]:
    found = PostgresDatabase(OwnPool(postgres.url, POOL_SIZE, 256), "postgresql")
    await found.open()
    yield found
    await found.close()


async def pid(database: PostgresDatabase) -> int:
    return int((await database.fetch(PID))[0][0])


async def connected(postgres: Postgres, pids: set[int]) -> set[int]:
    """Which of these backends are there."""
    connection = await asyncpg.connect(postgres.url)
    try:
        rows = await connection.fetch("SELECT pid FROM pg_stat_activity WHERE pid = ANY($1)", list(pids))
        return {row[0] for row in rows}
    finally:
        await connection.close()


async def gone(postgres: Postgres, pids: set[int]) -> None:
    async def none_left() -> bool:
        return not await connected(postgres, pids)

    await eventually(none_left)


async def together(database: PostgresDatabase, count: int) -> set[int]:
    """The backends of so many statements at once."""
    rows = await asyncio.gather(*(database.fetch(SLEEP, seconds=0.05) for _ in range(count)))
    return {each[0][0] for each in rows}


async def test_the_server_lists_them_under_our_name_or_that_of_the_url(
    database: PostgresDatabase, postgres: Postgres
) -> None:
    name = statement("SELECT current_setting('application_name')")
    assert [tuple(row) for row in await database.fetch(name)] == [("pillarbox",)]
    other = PostgresDatabase(OwnPool(f"{postgres.url}?application_name=orders", 1, 256), "postgresql")
    await other.open()
    assert [tuple(row) for row in await other.fetch(name)] == [("orders",)]
    await other.close()


async def test_one_after_the_other_needs_one(database: PostgresDatabase) -> None:
    assert len({await pid(database) for _ in range(20)}) == 1


async def test_more_at_once_than_there_are_wait_for_each_other(database: PostgresDatabase) -> None:
    assert len(await together(database, 10 * POOL_SIZE)) == POOL_SIZE


async def test_the_pool_gets_back_what_is_not_needed_any_more(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    await together(database, POOL_SIZE)
    monkeypatch.setattr(connections, "_KEPT_SECONDS", -1.0)
    for _ in range(POOL_SIZE):
        await pid(database)
    own: Any = database._connections
    assert own._kept == []
    assert own._pool.get_idle_size() == own._pool.get_size()


async def test_what_was_cut_is_replaced(database: PostgresDatabase, postgres: Postgres) -> None:
    before = await together(database, POOL_SIZE)
    killer = await asyncpg.connect(postgres.url)
    await killer.fetch("SELECT pg_terminate_backend(pid) FROM unnest($1::int[]) AS pid", list(before))
    await killer.close()
    await gone(postgres, before)

    async def replaced() -> bool:
        try:
            assert not before & await together(database, POOL_SIZE)
        except StoreDown:
            return False  # the end of one was not read yet
        return True

    await eventually(replaced)


async def test_a_statement_that_fails_or_is_cancelled_costs_no_place(database: PostgresDatabase) -> None:
    for _ in range(2 * POOL_SIZE):
        with pytest.raises(Exception, match="division by zero"):
            await database.fetch(FAIL)
        task = asyncio.create_task(database.fetch(SLEEP, seconds=60.0))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(await together(database, 2 * POOL_SIZE)) == POOL_SIZE


async def test_one_that_the_driver_closes_by_itself_costs_no_place(database: PostgresDatabase) -> None:
    own: Any = database._connections
    for _ in range(2 * POOL_SIZE):
        async with own.one() as connection:
            connection._con._protocol.abort()  # as after bytes that it does not understand
    assert len(await together(database, 2 * POOL_SIZE)) == POOL_SIZE


async def test_the_error_of_a_connection_that_is_lost_is_not_hidden(database: PostgresDatabase) -> None:
    own: Any = database._connections

    async def fail() -> None:
        async with own.one() as connection:
            connection.terminate()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    async with own.one() as connection:
        connection.terminate()
    await pid(database)
    ((kept, _),) = own._kept
    kept.terminate()
    await pid(database)


async def test_closing_leaves_none(database: PostgresDatabase, postgres: Postgres) -> None:
    pids = await together(database, POOL_SIZE)
    await database.close()
    await gone(postgres, pids)
    with pytest.raises(StoreDown):
        await pid(database)
