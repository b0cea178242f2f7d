"""Removing an outbox: all of it goes, and nothing else."""

import asyncio
from pathlib import Path

import pytest

from pillarbox.errors import SchemaError, StoreError
from pillarbox.publisher import rejected
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.store import Store
from pillarbox.stores.mongo import MongoStore
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.sqlite import SqliteStore
from tests.integration.relays import MongoOutbox, Outbox, SqlOutbox, execute, mixed, query, relay, stream
from tests.servers import Postgres

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

_CATALOGS = {
    "PostgresStore": (
        "SELECT relname FROM pg_class UNION ALL SELECT proname FROM pg_proc UNION ALL SELECT tgname FROM pg_trigger "
        "UNION ALL SELECT typname FROM pg_type"
    ),
    "MysqlStore": "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()",
    "SqliteStore": "SELECT name FROM sqlite_master UNION ALL SELECT name FROM sqlite_sequence",
}


async def left(store: Store) -> set[str]:
    """What the database's own catalog has of names with this outbox's prefix."""
    if isinstance(store, MongoStore):
        await store._db.open()
        names = await store._db.opened.list_collection_names()
    else:
        assert isinstance(store, SqlStore)
        await store._db.open()
        names = [name for (name,) in await query(store, _CATALOGS[type(store).__name__])]
    prefix = store._names.prefix
    return {name for name in names if name.startswith((f"{prefix}_", f"_{prefix}_"))}


async def test_an_outbox_in_use_is_removed_with_all_that_belongs_to_it(outbox: Outbox) -> None:
    store = outbox()
    assert isinstance(store, SqlStore | MongoStore)
    await store.migrate()
    await store.open()
    made = await left(store)
    assert len(made) > 8
    to = MemoryPublisher()
    to.fail_next(rejected("refused"), times=2)
    async with relay(store, stream(to)) as running:
        await store.add(mixed(["a", "b", "c"], 10))
        await running.drain()
    await store.pause("orders", "ann")
    assert len(await store.dead_letters()) == 2
    assert await store.remove() is True
    assert await left(store) == set()
    assert await store.remove() is False, "there is none any more"
    await store.close()
    anew = outbox()
    assert await anew.migrate(), "and the name is free"
    assert await left(anew) == made
    assert isinstance(anew, SqlStore | MongoStore)
    assert await anew.remove()
    await anew.close()


async def test_others_stay(outbox: Outbox) -> None:
    store = outbox()
    assert isinstance(store, SqlStore | MongoStore)
    prefix = store._names.prefix
    # One that starts with the name, and one whose tables could be taken for those of the first.
    others = [outbox(prefix=f"{prefix}_more"), outbox(prefix=f"{prefix}_event")]
    for other in others:
        await other.migrate()
    before = [await left(other) for other in others]
    await store.migrate()
    assert await store.remove()
    assert [await left(other) for other in others] == before
    found = set(await store.prefixes())
    assert {f"{prefix}_more", f"{prefix}_event"} <= found
    assert prefix not in found
    for other in others:
        await other.open()
        assert isinstance(other, SqlStore | MongoStore)
        assert await other.remove()
        await other.close()
        await other.close()
    await store.close()


async def test_one_of_a_newer_release_is_refused(outbox: Outbox) -> None:
    store = outbox()
    await store.migrate()
    if isinstance(store, MongoStore):
        await store._db.collection("meta").update_one({"_id": "schema"}, {"$set": {"version": 999}})
    else:
        assert isinstance(store, SqlStore)
        await store._db.execute(store._sql["set_meta"], name="schema_version", value="999")
    before = await left(store)
    with pytest.raises(SchemaError, match="999"):
        await store.remove()
    assert await left(store) == before
    await store.close()


async def test_two_at_once(outbox: Outbox) -> None:
    stores = [outbox(), outbox()]
    await stores[0].migrate()
    assert all(isinstance(store, SqlStore | MongoStore) for store in stores)
    removed = await asyncio.gather(*(store.remove() for store in stores if isinstance(store, SqlStore | MongoStore)))
    assert any(removed)
    assert await left(stores[0]) == set()
    for store in stores:
        await store.close()


async def test_what_a_migration_or_a_removal_that_was_cut_short_left_is_removed(my: SqlOutbox) -> None:
    store = my()
    await store.migrate()
    await execute(store, "DELETE FROM {meta}")
    for name in ("audit", "lease"):
        await store._db.run(f"DROP TABLE {store._names.parts[name]}")
    assert await store.remove()
    assert await left(store) == set()
    await store.close()


async def test_what_a_cut_short_removal_left_is_removed_on_mongodb(mg: MongoOutbox) -> None:
    store = mg()
    await store.migrate()
    await store._db.collection("event").drop()
    assert await store.remove()
    assert await left(store) == set()
    await store.close()


async def test_tables_that_are_not_an_outbox_are_refused(sql: SqlOutbox) -> None:
    store = sql()
    await store._db.open()
    meta, event = store._names.parts["meta"], store._names.parts["event"]
    await store._db.run(f"CREATE TABLE {event} (id integer)")
    assert not await store.remove()
    await store._db.run(f"CREATE TABLE {meta} (name varchar(9), value varchar(9))")
    await store._db.run(f"INSERT INTO {meta} VALUES ('colour', 'red')")
    with pytest.raises(SchemaError, match="is not of an outbox"):
        await store.remove()
    assert await query(store, "SELECT value FROM {meta}") == [("red",)]
    assert await query(store, "SELECT id FROM {event}") == []
    for table in (meta, event):
        await store._db.run(f"DROP TABLE {table}")
    await store.close()


async def test_what_others_depend_on_stays_as_a_whole(pg: SqlOutbox) -> None:
    store = pg()
    await store.migrate()
    before = await left(store)
    view = f"view_of_{store._names.prefix}"
    await store._db.run(f"CREATE VIEW {view} AS SELECT id FROM {store._names.parts['event']}")
    with pytest.raises(StoreError, match=view):
        await store.remove()
    assert await left(store) == before
    await store._db.run(f"DROP VIEW {view}")
    assert await store.remove()
    await store.close()


async def test_in_a_schema_of_its_own(pg: SqlOutbox, postgres: Postgres) -> None:
    outside = pg()
    await outside.migrate()
    prefix = outside._names.prefix
    schema = f"Own_{prefix}"
    await outside._db.run(f"CREATE SCHEMA {schema}")
    inside = PostgresStore(postgres.url, prefix=prefix, schema=schema)
    await inside.migrate()
    assert await inside.prefixes() == [prefix]
    assert await inside.remove()
    assert await inside.prefixes() == []
    assert prefix in await outside.prefixes()
    # Without CASCADE: it would fail if anything were left in it.
    await outside._db.run(f"DROP SCHEMA {schema}")
    assert await outside.remove()
    await inside.close()
    await outside.close()


async def test_looking_makes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    store = SqliteStore(str(path))
    assert not await store.remove()
    with pytest.raises(SchemaError, match="does not exist"):
        await store.prefixes()
    assert not path.exists()


async def test_the_server_says_its_version(outbox: Outbox) -> None:
    store = outbox()
    await store.migrate()
    assert isinstance(store, SqlStore | MongoStore)
    assert (await store.server_version())[0].isdigit()
    assert await store.remove()
    await store.close()
