"""Rows that somebody writes past the outbox. The database refuses what its checks see; whatever is left, every healthy
event is delivered, and each bad one is delivered or dead with a line in the log that names it."""

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from bson import Binary, Int64, ObjectId, Timestamp
from bson.datetime_ms import DatetimeMS
from pymongo.errors import WriteError

from pillarbox import operations
from pillarbox.conformance.mongo_probe import MongoProbe
from pillarbox.conformance.probes import probe_of
from pillarbox.errors import StoreError
from pillarbox.event import Event, Mode, Status
from pillarbox.mongo.documents import identity
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay.report import Limit
from pillarbox.store import Filter, Store
from pillarbox.stores.mongo import MongoStore
from tests.integration.commands import Command
from tests.integration.relays import (
    STREAM,
    MongoOutbox,
    SqlOutbox,
    by_key,
    counts,
    eventually,
    in_order,
    key_of,
    mixed,
    numbered,
    relay,
    stream,
)

pytestmark = pytest.mark.asyncio

# Values as SQL, by column.
SQL_VALUES: Final[Mapping[str, Sequence[str]]] = {
    "headers": (
        *("'{'", "'[]'", "'7'", "'null'", "''", """'{"a": 1}'""", """'{"a": {"b": "c"}}'""", """'{"a": null}'"""),
        *("""'{"a": "\\ud800"}'""", "'" + "[" * 5000 + "'", """'{"a":' """, "x'ff'"),
    ),
    "occurred_at": ("'0044-03-15 00:00:00 BC'", "'10000-01-01'", "'infinity'", "'soon'", "'0000-00-00 00:00:00'", "7"),
    "created_at": ("'0044-03-15 00:00:00 BC'", "'infinity'", "'soon'", "7"),
    "attempts": ("2147483647", "9223372036854775807", "-1", "'many'", "1.5"),
    "max_attempts": ("0", "-1", "'many'", "2147483647"),
    "aggregate_version": ("'x'", "9223372036854775807"),
    "key": (f"'{'k' * 9000}'", "x'ff'", "''"),
    "payload": ("'text'", "7"),
    "status": ("'strange'", "''"),
    "type": ("x'ff'", "''"),
    "tenant": ("x'ff'",),
    "id": ("'xyz'", "7"),
}
DROP_CHECKS: Final = {
    "postgres": "SELECT conname FROM pg_constraint WHERE contype = 'c' AND conrelid = '{event}'::regclass",
    "mysql": "SELECT constraint_name FROM information_schema.table_constraints"
    " WHERE constraint_type = 'CHECK' AND table_schema = DATABASE() AND table_name = '{event}'",
}
# In MongoDB any field can have any type.
FIELDS: Final = (
    *("stream", "shard", "tenant", "topic", "type", "aggregate_type", "aggregate_id", "aggregate_version", "key"),
    *("routing_key", "payload", "content_type", "schema_id", "schema_version", "headers", "created_at", "occurred_at"),
    *("attempts", "max_attempts", "available_at", "status", "occurred_us", "errors"),
)
ODD: Final[Sequence[Any]] = (
    *("text", 7, Int64(2**62), 1.5, True, {}, {"a": 1}, ["a"], ObjectId(), Binary(b"x", 5), Timestamp(1, 1)),
    *(DatetimeMS(-(2**62)), DatetimeMS(2**52), b"bytes"),
)


@pytest.fixture(autouse=True)
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many die here that the log would only count them."""
    monkeypatch.setattr(Limit, "passes", lambda self, now: True)


async def check(store: Store, good: Sequence[Event], log: pytest.LogCaptureFixture, mode: Mode = Mode.ORDERED) -> None:
    """Every event is over, healthy ones are delivered, and the log names those that are dead."""
    to = MemoryPublisher()
    async with relay(store, stream(to, mode=mode)):
        await eventually(
            lambda: counts(store), lambda found: found.keys() <= {Status.PUBLISHED, Status.DEAD}, seconds=30
        )
    keys = {event.key for event in good}
    delivered = by_key(event for event in to.deliveries if event.key in keys)
    if mode is Mode.QUEUE:
        delivered = {key: sorted(numbers) for key, numbers in delivered.items()}
    assert delivered == in_order(keys, 5)
    said = [record.getMessage() for record in log.records if record.levelno == logging.ERROR]
    for dead in await operations.find_all_dead(store, Filter(stream=STREAM)):
        reason = dead.last_error or ""
        assert "cannot be read" in reason
        assert any(str(dead.event.id) in line and reason in line for line in said)
        operations.event_record(await operations.find_event(store, dead.event.id))
    for found in await store.find(Filter(), 1000):
        operations.list_record(found)
    assert (await counts(store))[Status.DEAD]
    await store.gauges()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
async def test_rows_written_by_sql(sql: SqlOutbox, store: Any, checked: bool, caplog: pytest.LogCaptureFixture) -> None:
    probe = probe_of(store)
    database = type(store).__name__.removesuffix("Store").lower()
    if not checked and database == "sqlite":
        await probe.run("PRAGMA ignore_check_constraints = 1")
    elif not checked:
        for (name,) in await probe.query(DROP_CHECKS[database]):
            with suppress(StoreError):  # MariaDB lists a check of a column, but does not drop it
                await probe.run(f"ALTER TABLE {probe.tables['event']} DROP CONSTRAINT {name}")
    good = mixed([key_of(shard) for shard in range(4)], 5)
    values = [(column, value) for column, listed in SQL_VALUES.items() for value in listed]
    bad = [event for number in range(len(values)) for event in numbered(key_of(number % 4), 1)]
    # Bad rows stand between healthy ones.
    await store.add([event for pair in zip(good, bad, strict=False) for event in pair] + bad[len(good) :])
    refused = set()
    for event, (column, value) in zip(bad, values, strict=True):
        if not checked and _needs_its_check(database, column):
            continue
        quoted = "`key`" if database == "mysql" and column == "key" else column
        try:
            await probe.execute(f"UPDATE {{event}} SET {quoted} = {_escaped(value)} WHERE id = :id", id=event.id)
        except StoreError:
            refused.add((column, value))
    if checked:
        wrong = {("headers", "'{'"), ("headers", "'[]'"), ("status", "'strange'"), ("attempts", "-1")}
        assert wrong <= refused
    await check(store, good, caplog)


def _escaped(value: str) -> str:
    return value.replace("{", "{{").replace("}", "}}")


def _needs_its_check(database: str, column: str) -> bool:
    """Columns whose wrong values only a check keeps out: no relay finds a row of another status, asyncpg reads no rows
    at all around such an instant, no index takes such a key, and an id that is none cannot be named."""
    unread = {"postgres": {"created_at", "occurred_at", "key"}, "sqlite": {"id", "key", "type", "tenant", "payload"}}
    return column in {"status"} | unread.get(database, set()) | ({"attempts", "max_attempts"} & {column})


@pytest.mark.parametrize("mode", list(Mode))
async def test_documents_written_by_a_client(
    mg: MongoOutbox, store: MongoStore, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    events = MongoProbe(store).collection("event")
    good = mixed([key_of(shard) for shard in range(4)], 5)
    values = [(field, value) for field in FIELDS for value in ODD]
    bad = [event for number in range(len(values)) for event in numbered(key_of(number % 4), 1)]
    await store.add([event for pair in zip(good, bad, strict=False) for event in pair] + bad[len(good) :])
    refused = 0
    for event, (field, value) in zip(bad, values, strict=True):
        found, change = {"_id": identity(event.id, STREAM)}, {"$set": {field: value}}
        try:
            await events.update_one(found, change)
        except WriteError:
            refused += 1
            if field not in ("stream", "shard", "status"):  # no relay would find it
                await events.update_one(found, change, bypass_document_validation=True)
    assert refused > len(values) // 2
    for event in bad[:5]:
        await events.update_one(
            {"_id": identity(event.id, STREAM)}, {"$unset": {"tenant": 1}}, bypass_document_validation=True
        )
    await check(store, good, caplog, mode)


async def test_the_commands_show_what_can_be_read(on_sqlite: Command, tmp_path: Path) -> None:
    event_id = on_sqlite("events", "add", "order.created", "{}", "--key", "7").out.strip()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
        connection.execute("""UPDATE outbox_event SET headers = '{"number": 7}'""")
    for words in (["events", "list"], ["events", "show", event_id]):
        shown = on_sqlite(*words)
        assert (shown.code, shown.err) == (0, "")
        assert "order.created" in shown.out
        assert "its headers cannot be read" in shown.out
