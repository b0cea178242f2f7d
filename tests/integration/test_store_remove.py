"""Removing an outbox: all of it goes, and nothing else."""

import asyncio
from pathlib import Path

import pytest

from pillarbox.conformance.mongo_probe import MongoProbe
from pillarbox.conformance.probes import probe_of
from pillarbox.errors import SchemaError, StoreError
from pillarbox.publisher import rejected
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.store import Store
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.sqlite import SqliteStore
from servers import Postgres
from tests.integration.relays import MongoOutbox, Outbox, SqlOutbox, execute, mixed, query, relay, stream

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


async def left(store: Store) -> set[str]:
    """What the database's own catalog has of names with this outbox's prefix."""
    return await probe_of(store).made()


async def test_an_outbox_in_use_is_removed_with_all_that_belongs_to_it(outbox: Outbox) -> None:
    store = outbox()
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
    assert await anew.remove()
    await anew.close()


async def test_others_stay(outbox: Outbox) -> None:
    store = outbox()
    prefix = probe_of(store).prefix
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
        assert await other.remove()
        await other.close()
        await other.close()
    await store.close()


async def test_one_of_a_newer_release_is_refused(outbox: Outbox) -> None:
    store = outbox()
    await store.migrate()
    await probe_of(store).set_schema_version(999)
    before = await left(store)
    with pytest.raises(SchemaError, match="999"):
        await store.remove()
    assert await left(store) == before
    await store.close()


async def test_two_at_once(outbox: Outbox) -> None:
    stores = [outbox(), outbox()]
    await stores[0].migrate()
    removed = await asyncio.gather(*(store.remove() for store in stores))
    assert any(removed)
    assert await left(stores[0]) == set()
    for store in stores:
        await store.close()


async def test_what_a_migration_or_a_removal_that_was_cut_short_left_is_removed(my: SqlOutbox) -> None:
    store = my()
    await store.migrate()
    await execute(store, "DELETE FROM {meta}")
    for name in ("audit", "lease"):
        await probe_of(store).run(f"DROP TABLE {probe_of(store).tables[name]}")
    assert await store.remove()
    assert await left(store) == set()
    await store.close()


async def test_what_a_cut_short_removal_left_is_removed_on_mongodb(mg: MongoOutbox) -> None:
    store = mg()
    await store.migrate()
    await MongoProbe(store).collection("event").drop()
    assert await store.remove()
    assert await left(store) == set()
    await store.close()


async def test_tables_that_are_not_an_outbox_are_refused(sql: SqlOutbox) -> None:
    store = sql()
    meta, event = probe_of(store).tables["meta"], probe_of(store).tables["event"]
    await probe_of(store).run(f"CREATE TABLE {event} (id integer)")
    assert not await store.remove()
    await probe_of(store).run(f"CREATE TABLE {meta} (name varchar(9), value varchar(9))")
    await probe_of(store).run(f"INSERT INTO {meta} VALUES ('colour', 'red')")
    with pytest.raises(SchemaError, match="is not of an outbox"):
        await store.remove()
    assert await query(store, "SELECT value FROM {meta}") == [("red",)]
    assert await query(store, "SELECT id FROM {event}") == []
    for table in (meta, event):
        await probe_of(store).run(f"DROP TABLE {table}")
    await store.close()


async def test_what_others_depend_on_stays_as_a_whole(pg: SqlOutbox) -> None:
    store = pg()
    await store.migrate()
    before = await left(store)
    view = f"view_of_{probe_of(store).prefix}"
    await probe_of(store).run(f"CREATE VIEW {view} AS SELECT id FROM {probe_of(store).tables['event']}")
    with pytest.raises(StoreError, match=view):
        await store.remove()
    assert await left(store) == before
    await probe_of(store).run(f"DROP VIEW {view}")
    assert await store.remove()
    await store.close()


async def test_in_a_schema_of_its_own(pg: SqlOutbox, postgres: Postgres) -> None:
    outside = pg()
    await outside.migrate()
    prefix = probe_of(outside).prefix
    schema = f"Own_{prefix}"
    await probe_of(outside).run(f"CREATE SCHEMA {schema}")
    inside = PostgresStore(postgres.url, prefix=prefix, schema=schema)
    await inside.migrate()
    assert await inside.prefixes() == [prefix]
    assert await inside.remove()
    assert await inside.prefixes() == []
    assert prefix in await outside.prefixes()
    # Without CASCADE: it would fail if anything were left in it.
    await probe_of(outside).run(f"DROP SCHEMA {schema}")
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
    assert (await store.server_version())[0].isdigit()
    assert await store.remove()
    await store.close()
