"""The floor of the rows `inbox-...`: the statements of a careful user, with the driver's own calls."""

import hashlib
import json
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from itertools import count
from typing import Any, Protocol, TypeAlias
from uuid import UUID

import sqlalchemy
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from psycopg.rows import tuple_row

from pillarbox import Event
from pillarbox.conformance.driver_setup import Application
from tests.drivers import applications

PREFIX = f"applied_{os.getpid()}"  # tests of several processes may share a server
BATCH = 100
CONSUMER = "by-hand"

Call: TypeAlias = Callable[..., Awaitable[Any]]
"""A statement of one text; called with its values, it gives the number of rows, or the rows."""


class Hand(Protocol):
    """One consumer's transactions, statement by statement."""

    async def prepare(self) -> None:
        """Make the place of the effects."""

    async def record(self, event: Event) -> bool: ...

    async def record_all(self, events: Sequence[Event]) -> list[Event]: ...

    async def newer(self, event: Event) -> bool: ...

    async def apply(self, events: Sequence[Event]) -> None:
        """Write the effects of one event or of a whole batch; ours does it with the same call."""

    async def effects(self) -> int: ...

    async def drop(self) -> None:
        """Drop the place of the effects."""


def hand_of(driver: Application) -> Hand:
    return OnMongo(driver) if isinstance(driver, applications.PyMongo) else OnSql(driver)


class OnSql:
    """Any SQL database. A text has ? for each value."""

    def __init__(self, driver: Application) -> None:
        self._driver = driver
        self._is_mysql = isinstance(driver, applications.PyMysql | applications.AsyncMy)
        self._is_sqlite = isinstance(driver, applications.Sqlite3)
        # Rows as tuples, which are the cheapest.
        if self._is_sqlite:
            driver.handle.row_factory = None
        elif isinstance(driver, applications.Psycopg):
            driver.handle.row_factory = tuple_row
        copy = "ON DUPLICATE KEY UPDATE copies = copies + 1" if self._is_mysql else "ON CONFLICT DO NOTHING"
        columns = "(consumer, event_id, aggregate_id, aggregate_version)"
        insert = f"INSERT INTO {PREFIX}_inbox {columns}"
        self._record = self._call(f"{insert} VALUES (?, ?, ?, ?) {copy}")
        rows = ", ".join(["(?, ?, ?, ?)"] * BATCH)
        if self._is_mysql:
            self._record_all = self._call(f"{insert} VALUES {rows} {copy}")
            self._lock = self._call(
                f"INSERT INTO {PREFIX}_inbox_version (consumer, aggregate, name) VALUES (?, ?, ?) "
                "ON DUPLICATE KEY UPDATE consumer = consumer"
            )
            self._raise = self._call(
                f"UPDATE {PREFIX}_inbox_version SET version = ?, event_id = ? WHERE consumer = ? AND aggregate = ? "
                "AND (version IS NULL OR version < ? OR version = ? AND event_id < ?)"
            )
        else:
            arrays = "SELECT ?, * FROM unnest(?::uuid[], ?::text[], ?::bigint[])"
            values = f"VALUES {rows}" if self._is_sqlite else arrays
            self._record_all = self._call(f"{insert} {values} {copy} RETURNING event_id", has_rows=True)
            self._raise = self._call(
                f"INSERT INTO {PREFIX}_inbox_version AS seen (consumer, aggregate, name, version, event_id) "
                "VALUES (?, ?, ?, ?, ?) ON CONFLICT (consumer, aggregate) DO UPDATE "
                "SET version = excluded.version, event_id = excluded.event_id "
                "WHERE (seen.version, seen.event_id) < (excluded.version, excluded.event_id)"
            )
        effect = f"INSERT INTO {PREFIX}_effect (id, amount) VALUES "
        self._apply = {size: self._call(effect + ", ".join(["(?, ?)"] * size)) for size in (1, BATCH)}

    async def prepare(self) -> None:
        await self._driver.begin()
        await self._driver.execute(
            f"CREATE TABLE {PREFIX}_effect (id varchar(36) PRIMARY KEY, amount integer NOT NULL)"
        )
        await self._driver.commit()

    async def record(self, event: Event) -> bool:
        values = (CONSUMER, self._cell(event.id), event.aggregate_id, event.aggregate_version)
        return bool(await self._record(*values) == 1)

    async def record_all(self, events: Sequence[Event]) -> list[Event]:
        ordered = sorted(events, key=lambda event: event.id)  # two transactions lock rows in the same order
        if self._is_mysql or self._is_sqlite:
            values: list[Any] = []
            for event in ordered:
                values += (CONSUMER, self._cell(event.id), event.aggregate_id, event.aggregate_version)
        else:
            values = [CONSUMER, [event.id for event in ordered], [event.aggregate_id for event in ordered]]
            values.append([event.aggregate_version for event in ordered])
        found = await self._record_all(*values)
        if self._is_mysql:
            assert found == len(events), "the copies have to be asked for"
            return list(events)
        new = {row[0] for row in found}
        return [event for event in events if self._cell(event.id) in new]

    async def newer(self, event: Event) -> bool:
        digest, name, event_id = _aggregate(event), _name(event), self._cell(event.id)
        if not self._is_mysql:
            return bool(await self._raise(CONSUMER, digest, name, event.aggregate_version, event_id) == 1)
        await self._lock(CONSUMER, digest, name)
        number = event.aggregate_version
        return bool(await self._raise(number, event_id, CONSUMER, digest, number, number, event_id) == 1)

    async def apply(self, events: Sequence[Event]) -> None:
        await self._apply[len(events)](*(cell for event in events for cell in (str(event.id), 7)))

    async def effects(self) -> int:
        await self._driver.begin()
        ((found,),) = await self._call(f"SELECT COUNT(*) AS found FROM {PREFIX}_effect", has_rows=True)()
        await self._driver.rollback()
        return int(found)

    async def drop(self) -> None:
        await self._driver.begin()
        await self._driver.execute(f"DROP TABLE {PREFIX}_effect")
        await self._driver.commit()

    def _cell(self, value: UUID) -> Any:
        if self._is_mysql:
            return value.bytes
        return str(value) if self._is_sqlite else value

    def _call(self, text: str, *, has_rows: bool = False) -> Call:
        handle = self._driver.handle
        if isinstance(self._driver, applications.Asyncpg):
            numbers = count(1)
            numbered = re.sub(r"\?", lambda _: f"${next(numbers)}", text)

            async def by_asyncpg(*values: Any) -> Any:
                if has_rows:
                    return await handle.fetch(numbered, *values)
                return int((await handle.execute(numbered, *values)).rpartition(" ")[2])

            return by_asyncpg
        if isinstance(self._driver, applications.SqlAlchemy):
            names = [f"p{number}" for number in range(text.count("?"))]
            given = iter(names)
            statement = sqlalchemy.text(re.sub(r"\?", lambda _: f":{next(given)}", text))

            async def by_session(*values: Any) -> Any:
                result = handle.execute(statement, dict(zip(names, values, strict=True)))
                return result.all() if has_rows else result.rowcount

            return by_session
        if self._is_mysql:
            text = text.replace("?", "%s")
            if isinstance(self._driver, applications.AsyncMy):

                async def by_asyncmy(*values: Any) -> Any:
                    async with handle.cursor() as cursor:
                        await cursor.execute(text, values)
                        return await cursor.fetchall() if has_rows else cursor.rowcount

                return by_asyncmy

            async def by_pymysql(*values: Any) -> Any:
                with handle.cursor() as cursor:
                    cursor.execute(text, values)
                    return [[*row.values()] for row in cursor.fetchall()] if has_rows else cursor.rowcount

            return by_pymysql
        text = text if self._is_sqlite else text.replace("?", "%s")

        async def by_connection(*values: Any) -> Any:
            cursor = handle.execute(text, values)
            return cursor.fetchall() if has_rows else cursor.rowcount

        return by_connection


class OnMongo:
    """PyMongo's plain session."""

    def __init__(self, driver: Application) -> None:
        self._session = driver.handle
        database = self._session.client.get_default_database()
        options: CodecOptions[Any] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
        self._inbox, self._versions, self._effects = (
            database.get_collection(f"{PREFIX}_{name}", codec_options=options)
            for name in ("inbox", "inbox_version", "effect")
        )

    async def prepare(self) -> None:
        self._effects.database.create_collection(self._effects.name)

    async def record(self, event: Event) -> bool:
        # An upsert: the error of a duplicate insert would end the transaction.
        fields = {"processed_at": datetime.now(UTC), **_fields(event)}
        identity = {"_id": {"consumer": CONSUMER, "event_id": event.id}}
        result = self._inbox.update_one(identity, {"$setOnInsert": fields}, upsert=True, session=self._session)
        return result.upserted_id is not None

    async def record_all(self, events: Sequence[Event]) -> list[Event]:
        identities = {event.id: {"consumer": CONSUMER, "event_id": event.id} for event in events}
        wanted = {"_id": {"$in": [*identities.values()]}}
        known = {found["_id"]["event_id"] for found in self._inbox.find(wanted, {"_id": True}, session=self._session)}
        new, now = [event for event in events if event.id not in known], datetime.now(UTC)
        if new:
            documents = [{"_id": identities[event.id], "processed_at": now, **_fields(event)} for event in new]
            self._inbox.insert_many(documents, session=self._session)
        return new

    async def newer(self, event: Event) -> bool:
        identity = {"_id": {"consumer": CONSUMER, "aggregate": _aggregate(event)}}
        given = [event.aggregate_version, event.id]
        is_newer = {"$lt": [["$version", "$event_id"], given]}
        fields = {
            "name": {"$literal": _name(event)},
            "version": {"$cond": [is_newer, given[0], "$version"]},
            "event_id": {"$cond": [is_newer, given[1], "$event_id"]},
        }
        result = self._versions.update_one(identity, [{"$set": fields}], upsert=True, session=self._session)
        return result.upserted_id is not None or result.modified_count == 1

    async def apply(self, events: Sequence[Event]) -> None:
        effects = [{"_id": str(event.id), "amount": 7} for event in events]
        if len(effects) == 1:
            self._effects.insert_one(effects[0], session=self._session)
        else:
            self._effects.insert_many(effects, session=self._session)

    async def effects(self) -> int:
        return int(self._effects.count_documents({}))

    async def drop(self) -> None:
        self._effects.drop()


def _fields(event: Event) -> dict[str, Any]:
    return {"aggregate_id": event.aggregate_id, "aggregate_version": event.aggregate_version}


def _aggregate(event: Event) -> bytes:
    return hashlib.sha256(json.dumps([event.aggregate_type, event.aggregate_id]).encode()).digest()


def _name(event: Event) -> str:
    return f"{event.aggregate_type} {event.aggregate_id}"
