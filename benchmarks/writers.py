"""Rows: the cost of `outbox.add` in a transaction, against the same INSERT by hand."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from uuid import UUID

import sqlalchemy

from benchmarks.bed import Bed, say
from benchmarks.pairs import Work, in_transaction, medians, nothing, url_of, without_commit
from benchmarks.report import Row
from benchmarks.scale import Scale
from pillarbox import Outbox
from pillarbox.conformance.driver_setup import Application, done
from pillarbox.event import key_hash
from pillarbox.ids import uuid7
from pillarbox.urls import store_from_url
from tests.drivers import applications

TRANSACTIONS = 200
_PREFIX = "written"
_ORDER = {"order_id": 7, "customer": "c-17", "lines": [{"sku": "a", "quantity": 2, "price": "1.10"}] * 3}
_COLUMNS = (
    "id, stream, tenant, topic, type, aggregate_type, aggregate_id, {key}, key_hash, payload, content_type, status"
)
_Kinds: TypeAlias = Sequence[tuple[str, str, type[Application]]]
_DRIVERS: _Kinds = (
    ("sqlite3", "sqlite", applications.Sqlite3),
    ("aiosqlite", "sqlite", applications.AioSqlite),
    ("psycopg", "postgres", applications.Psycopg),
    ("psycopg-async", "postgres", applications.PsycopgAsync),
    ("asyncpg", "postgres", applications.Asyncpg),
    ("sqlalchemy-session", "postgres", applications.SqlAlchemySession),
    ("sqlalchemy-async-session", "postgres", applications.SqlAlchemyAsyncSession),
    ("pymysql", "mysql", applications.PyMysql),
    ("asyncmy", "mysql", applications.AsyncMy),
)
_DJANGO: _Kinds = (
    ("django-sqlite", "sqlite", applications.Django),
    ("django-postgres", "postgres", applications.Django),
    ("django-mysql", "mysql", applications.Django),
)

_IDS: dict[str, Callable[[UUID], Any]] = {
    "sqlite": str,
    "mysql": lambda event_id: event_id.bytes,
    "postgres": lambda event_id: event_id,
}


def _by_hand(driver: Application, database: str) -> Work:
    """The code of a careful user: the same columns, an id, JSON, one INSERT with the driver."""
    count = len(_COLUMNS.split(","))
    key_column = "`key`" if database == "mysql" else "key"
    is_django = isinstance(driver, applications.Django)
    mark = "?" if database == "sqlite" and not is_django else "%s"
    if isinstance(driver, applications.Asyncpg):
        mark = "$"
    is_session = isinstance(driver, applications.SqlAlchemy)
    names = [f"p{number}" for number in range(count)]
    if is_session:
        marks = [f":{name}" for name in names]
    else:
        marks = [f"${number}" for number in range(1, count + 1)] if mark == "$" else [mark] * count
    text = f"INSERT INTO {_PREFIX}_event ({_COLUMNS.format(key=key_column)}) VALUES ({', '.join(marks)})"
    as_id: Callable[[UUID], Any] = _IDS[database]
    statement = sqlalchemy.text(text) if is_session else text

    async def write(_: None) -> None:
        event_id = uuid7()
        body = json.dumps(_ORDER).encode()
        values = [as_id(event_id), "default", "default", "", "order.created", "order", "7", "7"]
        values += [key_hash(event_id, "7"), body, "application/json", "pending"]
        if is_session:
            await done(driver.handle.execute(statement, dict(zip(names, values, strict=True))))
        elif isinstance(driver, applications.Asyncpg):
            await driver.handle.execute(text, *values)
        elif is_django or isinstance(driver, applications.PyMysql):
            with driver.handle.cursor() as cursor:
                cursor.execute(text, values)
        elif isinstance(driver, applications.AsyncMy):
            async with driver.handle.cursor() as cursor:
                await cursor.execute(text, values)
        else:
            await done(driver.handle.execute(text, values))

    return write


def _by_outbox(driver: Application) -> Work:
    outbox = Outbox(prefix=_PREFIX)

    async def write(_: None) -> None:
        added = outbox.add(driver.handle, "order.created", _ORDER, aggregate_type="order", aggregate_id=7)
        if added.pending is not None:
            await added

    return write


async def _measure(name: str, database: str, kind: type[Application], url: str, rounds: int) -> Row:
    store = store_from_url(url, prefix=_PREFIX)
    await store.migrate()
    driver = kind(url)
    await driver.open()
    sides = (_by_outbox(driver), _by_hand(driver, database))
    whole = [in_transaction(driver, side) for side in sides]
    await medians(TRANSACTIONS, nothing, *whole)
    found = [await medians(TRANSACTIONS, nothing, *whole) for _ in range(rounds)]
    extra: dict[str, float] = {}
    if not driver.is_buffered:
        extra = await without_commit(driver, TRANSACTIONS, nothing, *sides)
        extra["ratio_without_commit"] = extra["ours_without_commit"] / extra["floor_without_commit"]
    await driver.close()
    await store.close()
    return Row(
        f"add-{name}",
        "us",
        [ours for ours, _ in found],
        [floor for _, floor in found],
        extra,
    )


def _rows(kinds: _Kinds) -> Callable[[Bed, Scale], list[Row]]:
    """One row for each driver: a transaction with one event."""

    def measure(bed: Bed, scale: Scale) -> list[Row]:
        rows = []
        for name, database, kind in kinds:
            row = asyncio.run(_measure(name, database, kind, url_of(bed, database), scale.rounds))
            rows.append(row)
            found = row.as_dict()
            alone = f", without commit {found['ratio_without_commit']}" if "ratio_without_commit" in found else ""
            say(f"  add-{name}: {found['ours']} us against {found['other']}, ratio {found['ratio']}{alone}")
        return rows

    return measure


drivers = _rows(_DRIVERS)
django = _rows(_DJANGO)
