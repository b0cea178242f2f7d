"""What `pillarbox migrate --print` gives to those who run it by another tool."""

import json
import os
import re
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from pillarbox.conformance.probes import probe_of
from pillarbox.errors import SchemaError
from pillarbox.stores.mongo import MongoStore
from pillarbox.stores.mysql import MysqlStore
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.sql import SqlStore
from servers import Mongo
from tests.integration.relays import SqlOutbox
from tests.mongo_outbox import database_url


def connected(request: pytest.FixtureRequest, database: str) -> SqlStore:
    url: str = request.getfixturevalue(database).url
    prefix = f"printed_{os.getpid()}"
    if database == "postgres":
        return PostgresStore(url, prefix=prefix, shards=8)
    # What is printed cannot ask the server what it is: the URL says it.
    return MysqlStore(url.replace("mysql:", f"{database}:", 1), prefix=prefix, shards=8)


@pytest.mark.asyncio
@pytest.mark.parametrize("aggregate_index", [False, True])
@pytest.mark.parametrize("database", ["postgres", "mysql", "mariadb"])
async def test_the_printed_sql_makes_an_outbox(
    request: pytest.FixtureRequest, database: str, aggregate_index: bool
) -> None:
    script = connected(request, database).script(aggregate_index=aggregate_index)
    store = connected(request, database)
    with pytest.raises(SchemaError):
        await store.open()
    await probe_of(store).run(script)
    await store.open()
    assert store.shards == 8
    assert await store.migrate(aggregate_index=aggregate_index) == []
    newest = store.newest_version
    assert store.script(newest) == ""
    if not aggregate_index:
        await probe_of(store).run(store.script(newest, aggregate_index=True))
    assert await store.migrate(aggregate_index=True) == []
    assert await store.remove()
    await store.close()


@pytest.mark.asyncio
async def test_an_index_by_aggregate_is_made_where_it_is_asked_for(sql: SqlOutbox) -> None:
    store = sql()
    assert await store.migrate() == ["0001_outbox.sql"]
    assert await store.migrate(aggregate_index=True) == ["aggregate_index"]
    assert await store.migrate(aggregate_index=True) == []
    assert await store.remove()
    await store.close()
    anew = sql()
    assert await anew.migrate(aggregate_index=True) == ["0001_outbox.sql", "aggregate_index"]
    assert await anew.remove()
    await anew.close()


def run_as_the_shell_would(script: str, client: MongoClient[dict[str, Any]]) -> None:
    """A shell for the few calls that a script consists of: their arguments are JSON, and the driver has the same."""
    first, *lines = script.splitlines()
    name = re.fullmatch(r"const outbox = db\.getSiblingDB\((.+)\);", first)
    assert name
    database: Database[dict[str, Any]] = client[json.loads(name[1])]
    for line in lines:
        call = re.fullmatch(r"outbox\.(?:getCollection\(([^)]+)\)\.)?(\w+)\((.*)\);", line)
        assert call, line
        collection, method, written = call.groups()
        values = json.loads(f"[{written}]")
        match method:
            case "createCollection":
                database.create_collection(values[0], **values[1])
            case "createIndex":
                database[json.loads(collection)].create_index(list(values[0].items()), **values[1])
            case "insertOne":
                database[json.loads(collection)].insert_one(values[0])
            case other:
                raise AssertionError(other)


def made(database: Database[dict[str, Any]], prefix: str) -> dict[str, Any]:
    """Collections, their validators and indexes, whatever their prefix."""
    return {
        each["name"].removeprefix(prefix): (each["options"], database[each["name"]].index_information())
        for each in database.list_collections(filter={"name": {"$regex": f"^{prefix}_"}})
    }


@pytest.mark.parametrize("aggregate_index", [False, True])
@pytest.mark.asyncio
async def test_the_printed_script_makes_an_outbox_on_mongodb(mongo: Mongo, aggregate_index: bool) -> None:
    url = database_url(mongo.url)
    printed, migrated = (f"{name}{aggregate_index:d}_{os.getpid()}" for name in ("printed", "migrated"))
    store = MongoStore(url, prefix=printed, shards=8)
    with pytest.raises(SchemaError):
        await store.open()
    with MongoClient[dict[str, Any]](url) as client:
        run_as_the_shell_would(store.script(aggregate_index=aggregate_index), client)
        await store.open()
        assert store.shards == 8
        assert await store.migrate(aggregate_index=aggregate_index) == []
        newest = store.newest_version
        assert store.script(newest) == ""
        run_as_the_shell_would(store.script(newest, aggregate_index=True), client)
        assert await store.migrate(aggregate_index=True) == []
        await store.close()
        other = MongoStore(url, prefix=migrated, shards=8)
        await other.migrate(aggregate_index=True)
        await other.close()
        database = client.get_default_database()
        assert made(database, printed) == made(database, migrated)
