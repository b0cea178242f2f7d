"""Backlogs on MySQL and MariaDB."""

from typing import Any

import asyncmy

from benchmarks.load_events import COLUMNS, KEYS, PAYLOAD_BYTES, SHARDS
from pillarbox.stores.mysql import MysqlStore
from pillarbox.stores.mysql.url import connect_settings

_COLUMNS = COLUMNS.replace(" key,", " `key`,")
_CHUNK = 100_000
_DIGITS = "(SELECT 0 AS d UNION ALL " + " UNION ALL ".join(f"SELECT {n}" for n in range(1, 10)) + ")"
_NUMBERS = "SELECT {first} + a.d + 10 * b.d + 100 * c.d + 1000 * e.d + 10000 * f.d AS n FROM " + ", ".join(
    f"{_DIGITS} AS {name}" for name in "abcef"
)
# The payload of event n, and the events from one number to another with the names of their keys.
TEXT = f"""CONCAT(RPAD(CONCAT('{{"number":', n, ',"text":"'), {PAYLOAD_BYTES - 2}, 'x'), '"}}')"""
NAMED = f"""(SELECT n, CONCAT('order-', n % {KEYS}) AS name FROM ({_NUMBERS}) AS numbers
        WHERE n < {{last}}) AS named ORDER BY n"""
# Ids in order of time, like those of uuid7.
_INSERT = f"""INSERT INTO {{p}}_event ({_COLUMNS})
    SELECT UNHEX(CONCAT(LPAD(HEX(FLOOR(UNIX_TIMESTAMP(NOW(3)) * 1000)), 12, '0'), '70008000', LPAD(HEX(n), 12, '0'))),
        'default', 'default', '', 'order.created', 'order', name, name, CRC32(name) & 2147483647,
        CONCAT(RPAD(CONCAT('{{{{"number":', n, ',"text":"'), {PAYLOAD_BYTES - 2}, 'x'), '"}}}}'),
        'application/json', 'pending'
    FROM {NAMED}"""


async def connect_mysql(url: str) -> Any:
    return await asyncmy.connect(**connect_settings(url), charset="utf8mb4", autocommit=True)


async def add_mysql(url: str, prefix: str, events: int) -> None:
    """Add events."""
    connection = await connect_mysql(url)
    try:
        cursor = connection.cursor()
        for first in range(0, events, _CHUNK):
            await cursor.execute(_INSERT.format(p=prefix, first=first, last=events))
    finally:
        connection.close()


async def fill_mysql(url: str, prefix: str, events: int) -> None:
    """Make a new outbox with so many pending events. A new table has no deleted rows to purge."""
    connection = await connect_mysql(url)
    try:
        cursor = connection.cursor()
        await cursor.execute("SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()")
        for (name,) in await cursor.fetchall():
            if name.startswith(f"{prefix}_"):
                await cursor.execute(f"DROP TABLE {name}")
    finally:
        connection.close()
    store = MysqlStore(url, prefix=prefix, shards=SHARDS)
    await store.migrate()
    await store.close()
    await add_mysql(url, prefix, events)
    connection = await connect_mysql(url)
    try:
        await connection.cursor().execute(f"ANALYZE TABLE {prefix}_event")
    finally:
        connection.close()
