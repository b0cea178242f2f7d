"""Upserts of projections, on every driver and its real database."""

import asyncio
import itertools
import json
import os
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import aiosqlite
import asyncpg
import psycopg
import pymysql
import pytest
import pytest_asyncio
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import DuplicateKeyError

from pillarbox import Event, Outbox, upsert
from pillarbox.conformance.driver_setup import Application, done
from pillarbox.conformance.events import make_event
from pillarbox.drivers import driver_of
from pillarbox.drivers.pymongo import PyMongo as MongoDriver
from pillarbox.errors import ConfigError
from pillarbox.projections.mongo import upsert as upsert_mongo
from pillarbox.projections.row import Row, Version
from pillarbox.sql.dialects import ErrorKind
from servers import MariaDB, Mongo, MongoStandalone, MySQL, Postgres
from tests.drivers.applications import (
    AsyncMy,
    Asyncpg,
    Psycopg,
    PyMongo,
    PyMongoAsync,
    PyMysql,
    SqlAlchemy,
    Sqlite3,
)
from tests.mongo_outbox import database_url

_numbers = itertools.count(1)
AWAITED: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: kind in (Asyncpg, AsyncMy, PyMongoAsync))
# On MySQL also through SQLAlchemy, whose connections count found rows.
CONCURRENT: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda database, kind: (
        kind in (Sqlite3, Asyncpg, PyMysql, PyMongo) or (kind is SqlAlchemy and database in ("mysql", "mariadb"))
    )
)
COLUMNS = {
    "sqlite": "id integer PRIMARY KEY, name text, `order` bigint, share real, data blob, uid text, at text, info text, "
    "version bigint, event_id text",
    "postgresql": 'id integer PRIMARY KEY, name text, "order" bigint, share float8, data bytea, uid uuid, '
    "at timestamptz, info jsonb, version bigint, event_id uuid",
    "mysql": "id integer PRIMARY KEY, name text CHARACTER SET utf8mb4, `order` bigint, share double, data longblob, "
    "uid binary(16), at datetime(6), info json, version bigint, event_id binary(16)",
}


class Cards:
    """The table or collection of a projection, read and made past the driver under test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.table = f"card_{os.getpid()}_{next(_numbers)}"
        self.kind = urlsplit(url).scheme
        if self.kind in COLUMNS:
            self.run(f"CREATE TABLE {self.table} ({COLUMNS[self.kind]})")
        else:
            with MongoClient(self.url) as client:  # type: ignore[var-annotated]
                client.get_default_database().create_collection(self.table)

    def run(self, text: str) -> list[Any]:
        with closing(self._connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(text)
            rows = cursor.fetchall() if cursor.description else []
            connection.commit()
        return [tuple(row) for row in rows]

    def _connect(self) -> Any:
        if self.kind == "sqlite":
            return sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=10)
        if self.kind == "postgresql":
            return psycopg.connect(self.url)
        parts = urlsplit(self.url)
        return pymysql.connect(host=parts.hostname, port=parts.port or 0, user=parts.username, database=parts.path[1:])

    def read(self, *columns: str) -> list[Any]:
        """These columns of all cards, in order of their ids."""
        if self.kind in COLUMNS:
            mark = '"' if self.kind == "postgresql" else "`"
            chosen = ", ".join(f"{mark}{column}{mark}" for column in columns)
            return self.run(f"SELECT {chosen} FROM {self.table} ORDER BY id")
        with MongoClient(self.url, uuidRepresentation="standard", tz_aware=True) as client:  # type: ignore[var-annotated]
            found = client.get_default_database()[self.table].find(sort=[("id", 1)])
            return [tuple(card.get(column) for column in columns) for card in found]


@pytest_asyncio.fixture
async def cards(app: Application) -> AsyncIterator[Cards]:
    if isinstance(app, PyMongo):
        app.url = database_url(app.url, "projections")
    made = Cards(app.url)
    if isinstance(app, PyMongo):
        with MongoClient(app.url) as client:  # type: ignore[var-annotated]
            client.get_default_database()[made.table].create_index("id", unique=True)
    yield made
    if app.handle is not None:
        await app.close()


def event(version: int | None, number: int = 0) -> Event:
    """Its id grows with the number."""
    return make_event(id=UUID(int=number + (7 << 76)), aggregate_version=version)


@pytest.mark.asyncio
async def test_a_row_is_inserted_and_then_changed_in_the_transaction(app: Application, cards: Cards) -> None:
    handle = await app.open()
    await app.begin()
    assert await upsert(handle, cards.table, {"id": 1}, {"name": "Ann", "order": 3})
    assert cards.read("id") == []
    await app.commit()
    await app.begin()
    assert await upsert(handle, cards.table, {"id": 1}, {"name": "Bob"})
    assert await upsert(handle, cards.table, {"id": 2}, {"name": "Cat"})
    await app.commit()
    assert cards.read("id", "name", "order") == [(1, "Bob", 3), (2, "Cat", None)]
    await app.begin()
    assert await upsert(handle, cards.table, {"id": 1}, {"name": "nobody"}, 9)
    await app.rollback()
    assert cards.read("name", "version") == [("Bob", None), ("Cat", None)]


@pytest.mark.asyncio
async def test_the_newer_version_wins(app: Application, cards: Cards) -> None:
    """Of numbers, and of events with a number and an id. The first rows have no version, and no id."""
    handle = await app.open(autocommit=True)
    assert await upsert(handle, cards.table, {"id": 1}, {"name": "no version yet"})
    assert await upsert(handle, cards.table, {"id": 3}, {}, 2)
    numbers = [3, 2, 3, 5, 4, 5]
    answers: dict[int, list[bool]] = {1: [], 2: [], 3: []}
    for version, (card, written) in itertools.product(numbers, list(answers.items())[:2]):
        values = {"name": f"name {version}", "order": version}
        written.append(await upsert(handle, cards.table, {"id": card}, values, version))
    for version, number in ((2, 5), (2, 4), (2, 5), (2, 6), (1, 9), (3, 1), (3, 2), (2, 8)):
        values = {"name": f"name {version}.{number}"}
        answers[3].append(await upsert(handle, cards.table, {"id": 3}, values, event(version, number)))
    await _end(app)
    assert answers[1] == answers[2] == [True, False, False, True, False, False]
    assert answers[3] == [True, False, False, True, False, True, True, False]
    wanted = [(1, "name 5", 5, 5), (2, "name 5", 5, 5), (3, "name 3.2", None, 3)]
    assert cards.read("id", "name", "order", "version") == wanted


async def _end(app: Application) -> None:
    """A session of SQLAlchemy has a transaction even where the database commits every statement."""
    if app.is_buffered:
        await app.commit()


@pytest.mark.asyncio
async def test_values_of_many_types(app: Application, cards: Cards) -> None:
    handle = await app.open(autocommit=True)
    text = "\"'`\\ %s %% $1 :name {} é \N{OPEN MAILBOX WITH RAISED FLAG}"
    at, uid = datetime(2026, 2, 3, 4, 5, 6, 789000, timezone(timedelta(hours=5))), UUID(int=7)
    info = {"list": [1, 2.5, None, text], "at": {"$gt": 1}}
    values = {"name": text, "order": 2**62, "share": 0.1, "data": b"\0\xff'", "uid": uid, "at": at, "info": info}
    assert await upsert(handle, cards.table, {"id": 1}, values, 2)
    assert not await upsert(handle, cards.table, {"id": 1}, dict.fromkeys(values), 2)
    assert not await upsert(handle, cards.table, {"id": 1}, {**values, "info": [], "share": 1}, 1)
    assert await upsert(handle, cards.table, {"id": 2}, {**dict.fromkeys(values), "info": ["$name"]}, 1)
    assert not await upsert(handle, cards.table, {"id": 2}, {**values}, 1)
    await _end(app)
    one, two = cards.read(*values)
    stored = list(one[:3]), bytes(one[3])
    assert stored == ([text, 2**62, 0.1], b"\0\xff'")
    cells: Mapping[str, Any] = {
        "sqlite": (str(uid), "2026-02-02 23:05:06.789"),
        "mysql": (uid.bytes, at.astimezone(UTC).replace(tzinfo=None)),
    }
    assert one[4:6] == cells.get(cards.kind, (uid, at))
    assert [_plain(one[6]), _plain(two[6])] == [info, ["$name"]]
    assert two[:6] == (None,) * 6


def _plain(info: Any) -> Any:
    return json.loads(info) if isinstance(info, str) else info


@CONCURRENT
def test_of_sixteen_writers_the_highest_version_wins(app: Application, cards: Cards) -> None:
    """Each of them writes all versions in an order of its own: numbers into one row, events into another."""
    kind, url, table = type(app), app.url, cards.table
    last = 12

    async def write(writer: int) -> list[tuple[int, int]]:
        own = kind(url)
        await own.open(autocommit=True)
        chance = random.Random(writer)
        written = []
        for number in chance.sample(range(1, last + 1), last):
            for card, version in ((1, number), (2, event((number - 1) // 4, number))):
                if await _patiently(own, table, card, {"name": f"name {number}", "order": number}, version):
                    written.append((card, number))
        await own.close()
        return written

    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda writer: asyncio.run(write(writer)), range(16)))
    wins = Counter(win for each in done for win in each)
    assert set(wins.values()) == {1}, "nothing was written twice"
    assert (1, last) in wins
    assert (2, last) in wins
    assert cards.read("id", "name", "order", "version") == [
        (1, f"name {last}", last, last),
        (2, f"name {last}", last, (last - 1) // 4),
    ]


async def _patiently(app: Application, table: str, card: int, values: Any, version: Any) -> bool:
    """A database may end one of two writers that meet."""
    while True:
        try:
            written = await upsert(app.handle, table, {"id": card}, values, version)
        except Exception as error:
            if driver_of(app.handle).classify(error) is not ErrorKind.CONFLICT:
                raise
        else:
            await done(app.handle.commit()) if isinstance(app, SqlAlchemy) else None
            return written


@AWAITED
@pytest.mark.asyncio
async def test_a_forgotten_await_is_told(app: Application, cards: Cards) -> None:
    handle = await app.open(autocommit=True)
    with pytest.raises(TypeError, match="await upsert"):
        bool(upsert(handle, cards.table, {"id": 1}, {"name": "Ann"}))
    with pytest.warns(RuntimeWarning, match="never awaited"):
        upsert(handle, cards.table, {"id": 1}, {"name": "Ann"})
    assert cards.read("id") == []


@pytest.mark.asyncio
async def test_the_transaction_of_an_outbox_is_a_handle(tmp_path: Path) -> None:
    cards = Cards(f"sqlite:///{tmp_path}/shop.db")
    async with aiosqlite.connect(tmp_path / "shop.db") as connection, Outbox().transaction(connection) as tx:
        assert await upsert(tx, cards.table, {"id": 1}, {"name": "Ann"})
    assert cards.read("name") == [("Ann",)]


def test_a_pool_is_refused(postgres: Postgres) -> None:
    from psycopg_pool import ConnectionPool

    with ConnectionPool(postgres.url, open=False) as pool, pytest.raises(ConfigError, match="pass a connection"):
        upsert(pool, "card", {"id": 1}, {"name": "Ann"})


class TestNames:
    @pytest.fixture
    def card(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.execute('CREATE TABLE "order" ("select" integer PRIMARY KEY, "From" text, seen integer)')
            yield connection

    def test_words_of_the_language_are_names(self, card: sqlite3.Connection) -> None:
        assert upsert(card, "order", {"select": 1}, {"From": "Ann"}, 1, version_column="seen")
        assert not upsert(card, "main.order", {"select": 1}, {"From": "Bob"}, 1, version_column="seen")
        assert card.execute('SELECT * FROM "order"').fetchall() == [(1, "Ann", 1)]

    @pytest.mark.parametrize("kind", [Psycopg, PyMysql, Sqlite3])
    @pytest.mark.asyncio
    async def test_a_table_may_be_named_with_its_schema(
        self, kind: type[Application], postgres: Postgres, mariadb: MariaDB, tmp_path: Path
    ) -> None:
        urls = {Psycopg: postgres.url, PyMysql: mariadb.url, Sqlite3: f"sqlite:///{tmp_path}/shop.db"}
        cards = Cards(urls[kind])
        schema = {Psycopg: "public", PyMysql: urlsplit(mariadb.url).path[1:], Sqlite3: "main"}[kind]
        app = kind(cards.url)
        assert await upsert(await app.open(autocommit=True), f"{schema}.{cards.table}", {"id": 1}, {"name": "Ann"}, 1)
        await app.close()
        assert cards.read("name") == [("Ann",)]

    @pytest.mark.parametrize(
        "name",
        ["", "a b", 'a"b', "a`b", "a;b", "a--", "1a", "a\0", "é", "a%s", "a.b.c", ".a", "a" * 70, "a\n", 7, None],
    )
    @pytest.mark.parametrize("place", ["table", "key", "values", "version_column", "id_column"])
    def test_all_else_is_refused(self, card: sqlite3.Connection, place: str, name: Any) -> None:
        arguments: dict[str, Any] = {"table": "order", "key": {"select": 1}, "values": {"From": "x"}}
        arguments[place] = {name: 1} if place in ("key", "values") else name
        if "column" in place:
            arguments["version"] = event(1)
        with pytest.raises(ConfigError, match="cannot name a"):
            upsert(card, **arguments)
        assert card.execute('SELECT * FROM "order"').fetchall() == []

    def test_a_column_has_no_schema(self, card: sqlite3.Connection) -> None:
        with pytest.raises(ConfigError, match="cannot name a column"):
            upsert(card, "order", {"order.select": 1}, {"From": "x"})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"key": {}}, "key is empty"),
        ({"key": {"id": None}}, "'id' is None"),
        ({"values": {}}, "values is empty"),
        ({"values": {"id": 1}}, "'id' would be written twice"),
        ({"values": {"version": 1}, "version": 2}, "'version' would be written twice"),
        ({"values": {"name": "x"}, "version": event(1), "id_column": "name"}, "'name' would be written twice"),
        ({"version": True}, "no whole number"),
        ({"version": "2"}, "no whole number"),
        ({"version": 2**63}, "no whole number"),
        ({"version": event(None)}, "has no aggregate_version"),
        ({"values": {"name": {"a": float("nan")}}}, "no JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    cards = Cards(f"sqlite:///{tmp_path}/shop.db")
    arguments: dict[str, Any] = {"key": {"id": 1}, "values": {"name": "x"}, **wrong}
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, pytest.raises(ConfigError, match=said):
        upsert(connection, cards.table, **arguments)


@pytest.mark.asyncio
async def test_a_codec_of_the_application_does_not_encode_json_again(postgres: Postgres) -> None:
    cards = Cards(postgres.url)
    connection = await asyncpg.connect(postgres.url)
    for kind in ("json", "jsonb"):
        await connection.set_type_codec(kind, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    await connection.execute(f"ALTER TABLE {cards.table} ADD COLUMN other json")
    values = {"info": {"a": 1}, "other": [1], "name": {"b": 2}}
    assert await upsert(connection, cards.table, {"id": 1}, values)
    await connection.close()
    assert cards.read("info", "other", "name") == [({"a": 1}, [1], '{"b": 2}')]


class TestMysql:
    def _connect(self, server: MySQL | MariaDB, **options: Any) -> Any:
        parts = urlsplit(server.url)
        where: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port,
            "user": parts.username,
            "database": parts.path[1:],
        }
        return pymysql.connect(**where, autocommit=True, **options)

    def _write(self, connection: Any, table: str) -> Sequence[bool]:
        numbers = ((2, 1), (2, 1), (2, 2), (1, 3), (4, 1), (4, 2))
        written = [
            bool(upsert(connection, table, {"id": 1}, {"name": f"{version}.{number}"}, event(version, number)))
            for version, number in numbers
        ]
        return [*written, *(bool(upsert(connection, table, {"id": 2}, {"name": "x"}, each)) for each in (1, 1, 2, 0))]

    def test_assignments_may_be_simultaneous(self, mariadb: MariaDB) -> None:
        cards = Cards(mariadb.url)
        with self._connect(mariadb, sql_mode="SIMULTANEOUS_ASSIGNMENT,STRICT_ALL_TABLES") as connection:
            written = self._write(connection, cards.table)
        assert written == [True, False, True, False, True, True, True, False, True, False]
        assert cards.read("name", "version") == [("4.2", 4), ("x", 2)]

    @pytest.mark.parametrize("flag", [0, pymysql.constants.CLIENT.FOUND_ROWS])
    @pytest.mark.parametrize("kind", ["mysql", "mariadb"])
    def test_rows_may_be_counted_in_either_way(self, kind: str, flag: int, request: pytest.FixtureRequest) -> None:
        server = request.getfixturevalue(kind)
        cards = Cards(server.url)
        cards.run(f"ALTER TABLE {cards.table} ADD COLUMN serial integer NOT NULL AUTO_INCREMENT, ADD KEY (serial)")
        with self._connect(server, client_flag=flag) as connection:
            written = self._write(connection, cards.table)
            with connection.cursor() as cursor:
                assert cursor.execute("SHOW WARNINGS") == 0
        assert written == [True, False, True, False, True, True, True, False, True, False]


class TestMongo:
    def test_without_a_transaction_on_a_standalone_server(self, mongo_standalone: MongoStandalone) -> None:
        cards = Cards(database_url(mongo_standalone.url, "projections"))
        with MongoClient(cards.url) as client:  # type: ignore[var-annotated]
            database = client.get_default_database()
            handles = [client, database, database["other"]]
            for version, handle in enumerate(handles):
                assert upsert(handle, cards.table, {"_id": 1}, {"name": f"name {version}"}, version)
                assert not upsert(handle, cards.table, {"_id": 1}, {"name": "none"}, version)
            with client.start_session() as session:
                assert upsert(session, cards.table, {"_id": 1}, {"name": "last"})
        assert cards.read("_id", "name", "version") == [(1, "last", 2)]

    @pytest.mark.parametrize("name", ["", "$name", "a.b", "a\0b", 7, None])
    def test_a_path_or_an_operator_is_no_field(self, mongo: Mongo, name: Any) -> None:
        with MongoClient(mongo.url) as client:  # type: ignore[var-annotated]
            for arguments in ({"key": {name: 1}}, {"values": {name: 1}}, {"version": 1, "version_column": name}):
                given: dict[str, Any] = {"key": {"_id": 1}, "values": {"a": 1}, **arguments}
                with pytest.raises(ConfigError, match="cannot name a field"):
                    upsert(client["projections"], "cards", **given)
            if name != "a.b":
                with pytest.raises(ConfigError, match="cannot name a collection"):
                    upsert(client["projections"], name, {"_id": 1}, {"a": 1})

    def test_an_operator_in_a_key_is_no_condition(self, mongo: Mongo) -> None:
        cards = Cards(database_url(mongo.url, "projections"))
        with MongoClient(cards.url) as client:  # type: ignore[var-annotated]
            database = client.get_default_database()
            upsert(database, cards.table, {"id": 1}, {"name": "Ann"}, 1)
            for version in (None, 2):
                upsert(database, cards.table, {"id": {"$gt": 0}}, {"name": "$name"}, version)
        assert cards.read("id", "name", "version") == [(1, "Ann", 1), ({"$gt": 0}, "$name", 2)]

    def test_another_unique_index_raises(self, mongo: Mongo) -> None:
        cards = Cards(database_url(mongo.url, "projections"))
        with MongoClient(cards.url) as client:  # type: ignore[var-annotated]
            database = client.get_default_database()
            database[cards.table].create_index("name", unique=True)
            assert upsert(database, cards.table, {"_id": 1}, {"name": "Ann"}, 1)
            with pytest.raises(DuplicateKeyError):
                upsert(database, cards.table, {"_id": 2}, {"name": "Ann"}, 1)

    @pytest.mark.parametrize("pattern", [{"_id": 1}, {"name": 1}])
    def test_a_document_that_another_one_has_just_inserted_is_changed(self, pattern: dict[str, int]) -> None:
        """The server repeats most such upserts itself, so that its error comes too seldom for a test."""
        row = Row("cards", {"_id": 1}, {"name": "Ann"}, Version(1), "version", "event_id")
        steps = upsert_mongo(row, MongoDriver(None))
        call = next(steps)
        error = DuplicateKeyError("E11000", 11000, {"keyPattern": pattern})
        if pattern == {"_id": 1}:
            assert [steps.throw(error) for _ in range(9)] == [call] * 9
        with pytest.raises(DuplicateKeyError):
            steps.throw(error)

    @pytest.mark.asyncio
    async def test_a_handle_needs_a_database(self, mongo: Mongo) -> None:
        client: AsyncMongoClient[Any]
        async with AsyncMongoClient(database_url(mongo.url, "")) as client:
            with pytest.raises(ConfigError, match="does not know the database"):
                await upsert(client, "cards", {"_id": 1}, {"a": 1})
