"""A consumer with a store: dead letters, replays, reports, and effects that happen once."""

import asyncio
import logging
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession

from pillarbox import Consumer, Event, Fixed, Handlers, Inbox, Reject
from pillarbox.conformance.events import make_event
from pillarbox.consumer.unreadable import UNREADABLE_TYPE
from pillarbox.errors import ConfigError, StoreError
from pillarbox.publisher import rejected
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.sources.memory import MemorySource, MemoryTopic
from pillarbox.store import Ref, Store
from pillarbox.stores.mongo import MongoStore
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.sqlite import SqliteStore
from servers import Mongo, MongoStandalone, Postgres
from tests.integration.relays import WAIT, Outbox, SqlOutbox, by_key, eventually, mixed, number, numbered, until
from tests.mongo_outbox import database_url

AT_ONCE = Fixed(0.0)
PREFIX = f"cards_{os.getpid()}"
KEYS = [f"k{n}" for n in range(8)]


def consumer(topic: MemoryTopic, to: Any, store: Any, **settings: Any) -> Consumer:
    given = {"retry": AT_ONCE, "max_attempts": 2, "replay_every": 0.05, **settings}
    return Consumer("cards", MemorySource(topic), to=to, store=store, **given)


async def letters(store: Store) -> list[tuple[int, str]]:
    found = await store.dead_letters(consumer="cards")
    return [(number(letter.event), letter.errors[-1]["error"]) for letter in found]


@pytest.mark.asyncio
async def test_a_dead_event_is_a_letter_in_the_store_and_its_replay_is_applied(outbox: Outbox, store: Store) -> None:
    topic, handlers = MemoryTopic(), Handlers()
    handled: list[Event] = []
    mended = asyncio.Event()

    @handlers.on("order.created")
    async def handle(event: Event) -> None:
        if number(event) == 2 and not mended.is_set():
            raise RuntimeError("never")
        handled.append(event)

    events = numbered("k", 3)
    for event in events:
        topic.send(event)
    async with consumer(topic, handlers, outbox(), worker="ann") as cards:
        await topic.wait_settled("cards", timeout=WAIT)
        assert by_key(handled) == {"k": [1, 3]}
        assert await letters(store) == [(2, "RuntimeError: never")]
        ref = Ref(events[1].id, "default", "cards")
        # Nothing has changed, so it is dead again.
        errors = (await store.dead_letters(consumer="cards"))[0].errors
        assert [entry["attempts"] for entry in errors] == [1, 2]
        before = len(errors)
        assert await store.replay([ref], "ann") == 1
        await eventually(
            lambda: store.dead_letters(consumer="cards"), lambda found: len(found[0].errors) > before, seconds=WAIT
        )
        mended.set()
        assert await store.replay([ref], "ann") == 1
        await eventually(lambda: store.dead_count("cards"), lambda count: count == 0)
        assert by_key(handled) == {"k": [1, 3, 2]}
        (status,) = await eventually(store.consumers)
        assert (status.consumer, status.live) == ("cards", True)
        assert status.worker.startswith("ann-")
        assert (status.report.source, status.report.lanes, status.report.paused_lanes) == (
            cards.source.description,
            1,
            0,
        )
    assert await store.consumers() == []


@pytest.mark.asyncio
async def test_an_unreadable_message_is_a_letter_and_can_be_read_later(sqlite: SqlOutbox, store: Store) -> None:
    topic, to = MemoryTopic(), MemoryPublisher()
    readable = asyncio.Event()

    def decode(message: Any) -> Event:
        if not readable.is_set():
            raise Reject("an older form")
        return make_event(type="read", key=None, payload=message.body)

    topic.put(b"\xff\x00old", key=b"\x00\x07", headers=[("region", b"eu"), ("blob", b"\xff")])
    async with consumer(topic, to, sqlite(), decoder=decode):
        await topic.wait_settled("cards", timeout=WAIT)
        (letter,) = await store.dead_letters(consumer="cards")
        assert (letter.event.type, letter.event.payload, letter.event.key) == (
            UNREADABLE_TYPE,
            b"\xff\x00old",
            "0x0007",
        )
        readable.set()
        await store.replay([Ref(letter.event.id, "default", "cards")], "ann")
        await to.wait_for(1, timeout=WAIT)
        await eventually(lambda: store.dead_count("cards"), lambda count: count == 0)
    assert (to.deliveries[0].type, to.deliveries[0].payload) == ("read", b"\xff\x00old")


@pytest.mark.asyncio
async def test_a_store_without_tables_is_told_and_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cards = consumer(MemoryTopic(), MemoryPublisher(), f"sqlite:///{tmp_path}/none.db")
    async with cards:
        with pytest.raises(StoreError, match="does not exist"):
            await cards.ready()
    with pytest.raises(StoreError, match="does not exist"):
        await asyncio.wait_for(cards.run(), WAIT)


@pytest.mark.asyncio
async def test_a_database_without_transactions_is_refused_at_the_start(mongo_standalone: MongoStandalone) -> None:
    store = MongoStore(database_url(mongo_standalone.url, PREFIX))
    await store.migrate()
    cards = consumer(MemoryTopic(), MemoryPublisher(), store)
    with pytest.raises(ConfigError, match="is a standalone server, which has no transactions"):
        await asyncio.wait_for(cards.run(), WAIT)


async def apply_twice(topic: MemoryTopic, handlers: Handlers, store: Any, events: list[Event]) -> None:
    """Give the events to a consumer whose lanes are lost again and again, and write each of them twice."""
    for event in [*events, *events]:
        topic.send(event)
    async with consumer(topic, handlers, store, max_attempts=20) as cards:
        await cards.ready()
        for lane in (0, 1, 0, 1):
            await until(lambda: sum(topic.settled("cards")) > 0)
            await topic.lose("cards", lane)
        await topic.wait_settled("cards", timeout=60)


def in_order(rows: list[tuple[str, int]], keys: list[str], count: int) -> None:
    for key in keys:
        assert [n for own, n in rows if own == key] == list(range(1, count + 1))


@pytest.mark.asyncio
async def test_effects_on_postgres_happen_once_and_in_order(postgres: Postgres) -> None:
    handlers, table = Handlers(), f"{PREFIX}_table"
    store = PostgresStore(postgres.url, prefix=PREFIX)
    await store.migrate()
    pool = await asyncpg.create_pool(postgres.url, min_size=2, max_size=16)
    await pool.execute(f"CREATE TABLE {table} (place bigserial, key text, n int)")
    inbox = Inbox("cards", prefix=PREFIX)

    @handlers.on("order.created")
    @inbox.once(pool)
    async def handle(event: Event, tx: asyncpg.Connection) -> None:
        await tx.execute(f"INSERT INTO {table} (key, n) VALUES ($1, $2)", event.key, number(event))

    await apply_twice(MemoryTopic(2), handlers, store, mixed(KEYS, 10))
    rows = [tuple(row) for row in await pool.fetch(f"SELECT key, n FROM {table} ORDER BY place")]
    await pool.execute(f"DROP TABLE {table}")
    await pool.close()
    in_order(rows, KEYS, 10)


def granted_to_consumers() -> list[tuple[str, str]]:
    """Rights and tables, as the documentation tells them for PostgreSQL."""
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    (cell,) = re.findall(r"^\| consumer with a store \| (.+?) \|", page, re.MULTILINE)
    pairs = [part.partition(" on ")[::2] for part in cell.replace("`", "").split("; ")]
    return [(rights, tables.replace("outbox", PREFIX)) for rights, tables in pairs]


@pytest.mark.asyncio
async def test_the_documented_rights_are_enough(postgres: Postgres, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pillarbox")
    owner = PostgresStore(postgres.url, prefix=PREFIX)
    await owner.migrate()
    role, topic, to = f"{PREFIX}_role", MemoryTopic(), MemoryPublisher()
    connection = await asyncpg.connect(postgres.url)
    await connection.execute(f"CREATE ROLE {role} LOGIN")
    try:
        for rights, tables in granted_to_consumers():
            await connection.execute(f"GRANT {rights} ON {tables} TO {role}")
        store = PostgresStore(postgres.url.replace("postgres@", f"{role}@"), prefix=PREFIX)
        dead = make_event()
        to.fail_next(rejected("no"), key=dead.key)
        topic.send(dead)
        async with consumer(topic, to, store, prune_every=0.05, keep_inbox=0.001):
            await topic.wait_settled("cards", timeout=WAIT)
            await owner.open()
            assert await owner.replay([Ref(dead.id, "default", "cards")], "olga") == 1
            await eventually(lambda: owner.dead_count("cards"), lambda count: count == 0)
            await until(lambda: any(getattr(each, "action", "") == "pruned" for each in caplog.records))
        await owner.close()
    finally:
        await connection.execute(f"DROP OWNED BY {role}")
        await connection.execute(f"DROP ROLE {role}")
        await connection.close()
    assert not [each.getMessage() for each in caplog.records if getattr(each, "action", "").endswith("_failed")]


@pytest.mark.asyncio
async def test_effects_on_mongodb_happen_once(mongo: Mongo) -> None:
    handlers = Handlers()
    url = database_url(mongo.url, "relays")
    store = MongoStore(url, prefix=PREFIX)
    await store.migrate()
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(url)
    cards = client.get_default_database()[f"{PREFIX}_cards"]
    inbox = Inbox("cards", prefix=PREFIX)

    @handlers.on("order.created")
    @inbox.once(client)
    async def handle(event: Event, session: AsyncClientSession) -> None:
        await cards.update_one({"_id": event.key}, {"$push": {"n": number(event)}}, upsert=True, session=session)

    await apply_twice(MemoryTopic(2), handlers, store, mixed(KEYS, 5))
    found = {card["_id"]: card["n"] async for card in cards.find()}
    await cards.drop()
    await client.close()
    assert found == {key: [1, 2, 3, 4, 5] for key in KEYS}


@pytest.mark.asyncio
async def test_effects_on_sqlite_happen_once(tmp_path: Path) -> None:
    handlers = Handlers()
    path = str(tmp_path / "cards.db")
    store = SqliteStore(path, prefix=PREFIX)
    await store.migrate()
    inbox = Inbox("cards", prefix=PREFIX)

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=30)

    with closing(connect()) as connection, connection:
        connection.execute("CREATE TABLE cards (key text, n int)")

    @handlers.on("order.created")
    @inbox.once(connect)
    def handle(event: Event, tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO cards VALUES (?, ?)", [event.key, number(event)])

    await apply_twice(MemoryTopic(2), handlers, store, mixed(KEYS, 3))
    with closing(connect()) as connection:
        in_order(connection.execute("SELECT key, n FROM cards ORDER BY rowid").fetchall(), KEYS, 3)
