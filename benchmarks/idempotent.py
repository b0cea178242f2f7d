"""Rows: requests with an idempotency key, against the same work in a transaction of its own without one."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import psycopg_pool

from benchmarks.bed import Bed, say
from benchmarks.pairs import Work, medians, speeds
from benchmarks.report import Row
from benchmarks.scale import Scale
from pillarbox import Idempotency, Outbox
from pillarbox.idempotency import Request
from pillarbox.ids import uuid7
from pillarbox.urls import store_from_url

PREFIX = f"asked_{os.getpid()}"  # tests of several processes may share a server
TURNS = 200
ORDERS = f"{PREFIX}_order"
BODY = json.dumps({"customer": "c-17", "amount": 7}).encode()
_INSERT = f"INSERT INTO {ORDERS} (customer, amount) VALUES ({{}}) RETURNING id"


def new_key() -> str:
    return str(uuid7())


@asynccontextmanager
async def tables(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Makes those of the outbox, and that of the orders for a while; gives a connection."""
    store = store_from_url(url, prefix=PREFIX)
    await store.migrate()
    await store.close()
    connection = await asyncpg.connect(url)
    await connection.execute(
        f"CREATE TABLE {ORDERS} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text, amount int)"
    )
    try:
        yield connection
    finally:
        await connection.execute(f"DROP TABLE {ORDERS}")
        await connection.close()


async def pairs(connection: asyncpg.Connection, rounds: int, turns: int, ours: Work, floor: Work) -> list[list[float]]:
    """The medians of all rounds. A side that did not write all of its orders and events has no figure."""
    counts = f"SELECT (SELECT count(*) FROM {ORDERS}), (SELECT count(*) FROM {PREFIX}_event)"
    before = await connection.fetchval(f"SELECT count(*) FROM {PREFIX}_event")
    await medians(turns, new_key, ours, floor)
    found = [await medians(turns, new_key, ours, floor) for _ in range(rounds)]
    orders, events = await connection.fetchrow(counts)
    wanted = 2 * (1 + rounds) * turns
    if not orders == events - before == wanted:
        raise AssertionError(f"{wanted} requests have {orders} orders and {events - before} events")
    return found


def _request(key: str) -> Request:
    return Request("POST", "/orders", body=BODY, key=(key,))


async def by_psycopg(url: str, rounds: int, turns: int) -> list[list[float]]:
    outbox = Outbox(prefix=PREFIX)

    def work(tx: Any) -> tuple[int, Any]:
        order = json.loads(BODY)
        row = tx.execute(_INSERT.format("%s, %s"), [order["customer"], order["amount"]]).fetchone()
        outbox.add(tx, "order.created", order, key=row[0])
        return 201, {"id": row[0]}

    with psycopg_pool.ConnectionPool(url, min_size=2, max_size=2, open=True) as pool:
        once = Idempotency(pool, scope=lambda _: "c-17", prefix=PREFIX)

        async def ours(key: str) -> None:
            assert once.run(_request(key), work).status == 201

        async def floor(_key: str) -> None:
            with pool.connection() as connection:
                _, body = work(connection)
            json.dumps(body).encode()

        async with tables(url) as connection:
            return await pairs(connection, rounds, turns, ours, floor)


async def by_asyncpg(url: str, rounds: int, turns: int) -> list[list[float]]:
    outbox = Outbox(prefix=PREFIX)

    async def work(tx: Any) -> tuple[int, Any]:
        order = json.loads(BODY)
        number = await tx.fetchval(_INSERT.format("$1, $2"), order["customer"], order["amount"])
        await outbox.add(tx, "order.created", order, key=number)
        return 201, {"id": number}

    async with asyncpg.create_pool(url, min_size=2, max_size=2) as pool:
        once = Idempotency(pool, scope=lambda _: "c-17", prefix=PREFIX)

        async def ours(key: str) -> None:
            assert (await once.run(_request(key), work)).status == 201

        async def floor(_key: str) -> None:
            async with pool.acquire() as connection, connection.transaction():
                _, body = await work(connection)
            json.dumps(body).encode()

        async with tables(url) as connection:
            return await pairs(connection, rounds, turns, ours, floor)


FORMS: Mapping[str, Callable[[str, int, int], Awaitable[list[list[float]]]]] = {
    "psycopg": by_psycopg,
    "asyncpg": by_asyncpg,
}


async def measure(driver: str, url: str, rounds: int, turns: int) -> Row:
    return Row(f"idempotent-run-{driver}", "requests/s", *speeds(await FORMS[driver](url, rounds, turns)))


def runs(bed: Bed, scale: Scale) -> list[Row]:
    """The function form, on one plain and one awaited driver."""
    rows = []
    for driver in FORMS:
        rows.append(asyncio.run(measure(driver, bed.url, scale.rounds, TURNS)))
        say(f"  {rows[-1].name}: ratio {rows[-1].as_dict()['ratio']}")
    return rows
