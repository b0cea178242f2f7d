"""What a turn costs that can be counted without a clock: round trips, bytes on the wire, objects for an event."""

import asyncio
import gc
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest

from pillarbox.conformance.store_setup import read, settle
from pillarbox.event import Event, Mode
from pillarbox.store import Grant, Settlement, Store
from pillarbox.stores.sqlite.database import SqliteDatabase
from servers import Server
from tests.integration.relays import (
    SHARDS,
    STREAM,
    Outbox,
    SqlOutbox,
    key_of,
    mongo_outbox,
    mysql_outbox,
    numbered,
    postgres_outbox,
)

pytestmark = pytest.mark.asyncio

PAYLOAD_BYTES = 250
TURNS = 4  # the cheapest counts: the others prepared their statements, or a heartbeat was between them


class Cost(NamedTuple):
    """Of one turn."""

    trips: int
    bytes: int


class Wire:
    """Stands between a store and its server, and counts."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.trips = self.bytes = 0
        self._connections: set[asyncio.Task[Any] | None] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 24)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            await asyncio.gather(*filter(None, self._connections))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.current_task())
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to, limit=1 << 24)
        asking = False

        async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter, asks: bool) -> None:
            nonlocal asking
            with suppress(ConnectionError):
                while data := await source.read(1 << 20):
                    # A question may come in several parts; it is one until something is answered.
                    self.trips += asks and not asking
                    asking = asks
                    self.bytes += len(data)
                    target.write(data)
                    await target.drain()
            target.close()
            with suppress(ConnectionError):
                await target.wait_closed()

        await asyncio.gather(forward(reader, to_writer, True), forward(to_reader, writer, False))

    async def cost_of(self, work: Callable[[], Awaitable[Any]]) -> Cost:
        before = self.trips, self.bytes
        await work()
        return Cost(self.trips - before[0], self.bytes - before[1])


def events_of(key: str, count: int) -> list[Event]:
    return [event._replace(payload=b"x" * PAYLOAD_BYTES) for event in numbered(key, count)]


async def turn(store: Store, grant: Grant, count: int) -> None:
    events = await read(store, grant, count, 100_000_000)
    assert len(events) == count
    await settle(store, Settlement(grant, published=events))


async def all_grants(store: Store) -> Sequence[Grant]:
    await store.announce(STREAM, Mode.ORDERED, "memory")
    await store.join(STREAM, "ann", 600)
    return await store.take(STREAM, "ann", SHARDS, 600)


async def one_grant(store: Store) -> Grant:
    return next(grant for grant in await all_grants(store) if grant.shard == 0)


async def cheapest(store: Store, wire: Wire, grant: Grant, count: int) -> Cost:
    found = []
    for _ in range(TURNS):
        await store.add(events_of(key_of(0), count))
        found.append(await wire.cost_of(lambda: turn(store, grant, count)))
    return min(found)


OUTBOXES: dict[str, Callable[[str], Any]] = {
    "postgres": postgres_outbox,
    "mysql": mysql_outbox,
    "mariadb": mysql_outbox,
    "mongo": lambda url: mongo_outbox(url.replace("replicaSet=rs0", "directConnection=true")),
}


@pytest.mark.parametrize(
    ("database", "trips", "most_bytes"),
    [("postgres", 3, 480), ("mysql", 2, 450), ("mariadb", 2, 450), ("mongo", 5, 620)],
)
async def test_a_turn_has_few_round_trips_however_long_it_is(
    request: pytest.FixtureRequest, database: str, trips: int, most_bytes: int
) -> None:
    server: Server = request.getfixturevalue(database)
    wire = Wire(server.port)
    async with wire.listening() as port:
        url = re.sub(r":\d+/", f":{port}/", server.url)
        store = OUTBOXES[database](url)()
        await store.migrate()
        await store.open()
        grant = await one_grant(store)
        few, many = [await cheapest(store, wire, grant, count) for count in (100, 1000)]
        await store.close()
    assert max(few.trips, many.trips) <= trips
    assert many.bytes / 1000 <= most_bytes, "for an event of 250 bytes, read and settled"


async def test_a_turn_on_sqlite_has_few_statements_however_long_it_is(sqlite: SqlOutbox) -> None:
    store = sqlite()
    await store.migrate()
    await store.open()
    grant = await one_grant(store)
    assert isinstance(store.database, SqliteDatabase)
    statements: list[str] = []
    await store.database.trace(statements.append)
    counts = []
    for count in (100, 1000):
        await store.add(events_of(key_of(0), count))
        statements.clear()
        await turn(store, grant, count)
        counts.append(len(statements))
    await store.close()
    assert max(counts) <= 6


@pytest.mark.parametrize("database", [name for name in OUTBOXES if name != "mariadb"])  # it cannot skip locked rows
async def test_all_leases_are_renewed_in_one_round_trip(request: pytest.FixtureRequest, database: str) -> None:
    server: Server = request.getfixturevalue(database)
    wire = Wire(server.port)
    async with wire.listening() as port:
        store = OUTBOXES[database](re.sub(r":\d+/", f":{port}/", server.url))()
        await store.migrate()
        await store.open()
        grants = await all_grants(store)
        found = [await wire.cost_of(lambda: store.renew(grants, 600)) for _ in range(TURNS)]
        await store.close()
    assert min(found).trips == 1


async def test_all_leases_on_sqlite_are_renewed_by_one_statement(sqlite: SqlOutbox) -> None:
    store = sqlite()
    await store.migrate()
    await store.open()
    grants = await all_grants(store)
    assert isinstance(store.database, SqliteDatabase)
    statements: list[str] = []
    await store.database.trace(statements.append)
    assert list(await store.renew(grants, 600)) == list(grants)
    await store.close()
    assert len(statements) == 1


MOST_OBJECTS = {"sqlite": 6.5, "postgresql": 10.0, "mysql": 6.5, "mongodb": 13.0}


async def test_an_event_is_few_objects(outbox: Outbox, store: Store) -> None:
    count = 1000
    grant = await one_grant(store)
    await store.add(events_of(key_of(0), count))
    await read(store, grant, count, 100_000_000)
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        events = await read(store, grant, count, 100_000_000)
        blocks = (sys.getallocatedblocks() - before) / len(events)
    finally:
        gc.enable()
    assert blocks <= MOST_OBJECTS[store.description.split()[0]]
