"""The SQL that `pillarbox migrate --print` gives to those who run it by another tool."""

import os

import pytest

from pillarbox.errors import SchemaError
from pillarbox.stores.mysql import MysqlStore
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.sql import SqlStore


def connected(request: pytest.FixtureRequest, database: str) -> SqlStore:
    url: str = request.getfixturevalue(database).url
    prefix = f"printed_{os.getpid()}"
    if database == "postgres":
        return PostgresStore(url, prefix=prefix, shards=8)
    # What is printed cannot ask the server what it is: the URL says it.
    return MysqlStore(url.replace("mysql:", f"{database}:", 1), prefix=prefix, shards=8)


@pytest.mark.asyncio
@pytest.mark.parametrize("database", ["postgres", "mysql", "mariadb"])
async def test_the_printed_sql_makes_an_outbox(request: pytest.FixtureRequest, database: str) -> None:
    script = connected(request, database).script()
    store = connected(request, database)
    with pytest.raises(SchemaError):
        await store.open()
    await store._db.open()
    await store._db.run(script)
    await store.open()
    assert store.shards == 8
    assert await store.migrate() == []
    await store.close()
