"""Failing commands, elections and lost servers of MongoDB; relays that die with a transaction open."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio
from pymongo import AsyncMongoClient
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import AutoReconnect, ConnectionFailure, OperationFailure, PyMongoError

from pillarbox import Outbox as Writer
from pillarbox.conformance.mongo_probe import MongoProbe
from pillarbox.conformance.store_setup import read, settle
from pillarbox.errors import LeaseLost, StoreDown
from pillarbox.event import Mode, Status
from pillarbox.ids import uuid7
from pillarbox.publisher import retry
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import supervisor
from pillarbox.store import Failure, Settlement
from pillarbox.stores.mongo import MongoStore, clients
from servers import Mongo, MongoSet
from servers.fixtures import OwnServer
from tests.integration.mongos import ALWAYS, Pause, failing
from tests.integration.relays import (
    LEASE,
    STREAM,
    WAIT,
    MongoOutbox,
    RelayProcess,
    attempts,
    by_key,
    copies,
    first_deliveries,
    in_order,
    key_of,
    ledger,
    ledger_by_key,
    ledger_copies,
    mixed,
    mongo_outbox,
    numbered,
    relay,
    settled,
    stream,
    until,
)

# When a server closes a connection, the driver leaves the socket to the garbage collector.
pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

KEYS = [key_of(shard) for shard in range(4) for _ in range(2)]
FEW_SECONDS = 15.0  # where the server's own limit would be 60


@pytest.fixture(scope="module")
def faulty(mongo: Mongo) -> Iterator[Mongo]:
    """A server whose commands can be made to fail. ``mongo`` skips the test where MongoDB is missing."""
    assert mongo.running
    with Mongo(settings={"enableTestCommands": "1"}) as server:
        yield server


@pytest.fixture
def mg(faulty: Mongo) -> MongoOutbox:
    return mongo_outbox(faulty.url)


class Writers:
    """Transactions that number the events of a key. They change one document for each key; some are rolled back."""

    def __init__(self, store: MongoStore, url: str) -> None:
        self.rolled_back: set[UUID] = set()
        self._url = url
        self._database = store.database.name
        self._prefix = MongoProbe(store).prefix
        self._writer = Writer(prefix=self._prefix, schema=self._database)

    async def write(self, key: str, count: int) -> None:
        client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(self._url, uuidRepresentation="standard")
        async with client, client.start_session() as session:
            for place in range(count):
                await session.with_transaction(partial(self._one, key=key, roll_back=place % 5 == 4))

    async def _one(self, session: Any, key: str, roll_back: bool) -> None:
        place = session.client[self._database]
        after = await place[f"{self._prefix}_number"].find_one_and_update(
            {"_id": key}, {"$inc": {"n": 1}}, upsert=True, return_document=True, session=session
        )
        event_id = uuid7()
        await self._writer.add(session, "counted", {"n": after["n"]}, key=key, id=event_id, stream=STREAM)
        if roll_back:
            self.rolled_back.add(event_id)
            await session.abort_transaction()
            return
        witness = {"_id": event_id, "key": key, "n": after["n"]}
        await place[f"{self._prefix}_witness"].insert_one(witness, session=session)

    async def committed(self, store: MongoStore) -> dict[UUID, tuple[str, int]]:
        found = store.database.opened[f"{self._prefix}_witness"].find()
        return {each["_id"]: (each["key"], each["n"]) async for each in found}

    async def check(self, store: MongoStore, deliveries: list[Any]) -> None:
        """Check that exactly the committed events were delivered, in the order of commits."""
        committed = await self.committed(store)
        assert {event.id for event in deliveries} == set(committed)
        assert not self.rolled_back & set(committed)
        numbers: dict[str, int] = {}
        for key, n in committed.values():
            numbers[key] = max(n, numbers.get(key, 0))
        assert sum(numbers.values()) == len(committed), "each number once"
        assert first_deliveries(deliveries) == {key: list(range(1, n + 1)) for key, n in numbers.items()}


@pytest_asyncio.fixture
async def three(own_server: OwnServer) -> AsyncIterator[tuple[MongoSet, MongoOutbox, MongoStore]]:
    server = own_server(MongoSet, settings={"enableTestCommands": "1"})
    outbox = mongo_outbox(server.url)
    store = outbox()
    await store.migrate()
    await store.open()
    yield server, outbox, store
    await store.close()


async def test_elections_under_load_lose_nothing_and_keep_the_order(
    three: tuple[MongoSet, MongoOutbox, MongoStore],
) -> None:
    """The primary is killed and comes back. Then primaries are told to step down while relays settle."""
    server, outbox, store = three
    writers = Writers(store, server.url)
    to = MemoryPublisher()
    async with relay(outbox(), stream(to, batch=5, lease=3.0)):
        writing = asyncio.gather(*(writers.write(key, 60) for key in KEYS[:4]))
        await to.wait_for(20)
        old = await asyncio.to_thread(server.primary)
        await asyncio.to_thread(old.kill)
        seen = len(to.deliveries)
        await until(lambda: len(to.deliveries) > seen + 20)
        await asyncio.to_thread(old.start)
        for _ in range(3):
            # A settle spends most of its time between the change of the lease and the commit.
            node = await asyncio.to_thread(server.primary)
            with failing(node, "commitTransaction", times=1, blockConnection=True, blockTimeMS=150):
                await asyncio.sleep(0.05)
                await asyncio.to_thread(step_down, node)
            seen = len(to.deliveries)
            await until(lambda seen=seen: len(to.deliveries) > seen or writing.done())  # type: ignore[misc]
        await writing
        await settled(store, {Status.PUBLISHED: len(await writers.committed(store))})
    await writers.check(store, list(to.deliveries))
    assert set(await attempts(store)) == {1}
    assert copies(to.deliveries) <= 4 * 5 * 4, "at most what was in flight, at each of four elections"


def step_down(node: Mongo) -> None:
    # It may close the connection before it answers, or may have lost an election at this moment.
    with suppress(ConnectionFailure, OperationFailure):
        node.admin({"replSetStepDown": 2, "secondaryCatchUpPeriodSecs": 1, "force": True})


LOST = {"code": 64, "errmsg": "waiting for replication timed out"}


@pytest.mark.parametrize(
    ("commands", "how"),
    [
        (["commitTransaction"], {"closeConnection": True}),
        (["commitTransaction"], {"writeConcernError": LOST}),
        (["commitTransaction"], {"errorCode": 251, "errorLabels": ["TransientTransactionError"]}),
        (["update", "delete", "findAndModify"], {"closeConnection": True}),
        (["update", "find"], {"errorCode": 112, "errorLabels": ["TransientTransactionError"]}),
        (["find", "aggregate"], {"closeConnection": True}),
        (["find", "getMore"], {"errorCode": 43}),
        (["getMore", "find"], {"errorCode": 262}),
        (["aggregate", "find", "update"], {"errorCode": 365}),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_commands_that_fail_make_no_copy_and_charge_nothing(
    faulty: Mongo, mg: MongoOutbox, store: MongoStore, mode: str, commands: list[str], how: dict[str, Any]
) -> None:
    to = MemoryPublisher()
    to.fail_next(retry("busy"), key=KEYS[0])
    await store.add(mixed(KEYS, 4))
    to.hold()
    async with relay(mg(), stream(to, mode=mode, batch=2, max_attempts=2)):
        await to.wait_until_held(1)
        with failing(faulty, *commands, times=3, **how):
            to.release()
            await to.wait_for(32)
            await settled(store, {Status.PUBLISHED: 32})
    assert copies(to.deliveries) == 0
    if mode == "ordered":
        assert by_key(to.deliveries) == in_order(KEYS, 4)
    assert sorted(await attempts(store)) == [1] * 31 + [2]


class LostReplies:
    """The server runs a command, and its answer does not arrive."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, times: int) -> None:
        self.left = times
        self._real = getattr(AsyncCollection, name)
        lost = self

        async def call(collection: Any, *arguments: Any, **named: Any) -> Any:
            answer = await lost._real(collection, *arguments, **named)
            if lost.left and collection.name.endswith("_event"):
                lost.left -= 1
                raise AutoReconnect("the reply was lost")
            return answer

        patch.setattr(AsyncCollection, name, call)


async def test_a_claim_whose_reply_is_lost_leaves_nothing_leased(
    mg: MongoOutbox, store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.add(mixed(KEYS, 5))
    replies = LostReplies(monkeypatch, "update_many", 3)
    for _ in range(3):
        with pytest.raises(StoreDown):
            await store.claim(STREAM, 0, "ann", 10, 3600.0)
    claims = await store.claim(STREAM, 0, "ann", 100, 3600.0)
    assert replies.left == 0
    assert len(claims) == 10, "what the lost ones had leased was given back"
    assert {claim.event.attempts for claim in claims} == {1}, "charged once"


async def test_a_suspect_whose_claim_is_lost_is_claimed_again(
    mg: MongoOutbox, store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.add(numbered(KEYS[0], 1))
    await store.claim(STREAM, 0, "ann", 1, -1.0)
    assert (await store.rescue(STREAM, 600, 10)).retried == 1
    LostReplies(monkeypatch, "update_many", 1)
    with pytest.raises(StoreDown):
        await store.claim(STREAM, None, "bob", 1, 3600.0)
    (claim,) = await store.claim(STREAM, None, "bob", 1, 3600.0)
    assert claim.event.attempts == 1


async def test_claimers_at_once_share_the_events_and_charge_each_once(mg: MongoOutbox, store: MongoStore) -> None:
    stores = [mg() for _ in range(4)]
    for each in stores:
        await each.open()
    await store.add(numbered(KEYS[0], 200))
    found = await asyncio.gather(*(each.claim(STREAM, 0, f"w{place}", 80, 60) for place, each in enumerate(stores)))
    while len(claims := [claim for each in found for claim in each]) < 200:
        found += [await store.claim(STREAM, 0, "last", 80, 60)]
    for each in stores:
        await each.close()
    assert len({claim.event.id for claim in claims}) == 200
    assert set(await attempts(store)) == {1}


@pytest.mark.parametrize("killed", ["session", "insert", "commit"])
async def test_a_writer_whose_transaction_is_aborted_leaves_nothing_or_writes_once(
    faulty: Mongo, mg: MongoOutbox, store: MongoStore, killed: str
) -> None:
    writer = Writer(prefix=MongoProbe(store).prefix, schema=store.database.name)
    client = store.database.opened.client
    tries: list[int] = []

    async def work(session: Any) -> None:
        tries.append(1)
        await writer.add(session, "counted", {"n": len(tries)}, key="k", stream=STREAM)
        if killed == "session" and len(tries) == 1:
            await client.admin.command("killSessions", [session.session_id])

    how: dict[str, Any] = {"errorCode": 251, "errorLabels": ["TransientTransactionError"]}
    command = {"session": "none", "insert": "insert", "commit": "commitTransaction"}[killed]
    async with client.start_session() as session:
        with failing(faulty, command, **how):
            await session.with_transaction(work)
        assert len(tries) == 2
        await session.start_transaction()
        await writer.add(session, "counted", {"n": 99}, key="k", stream=STREAM)
        await client.admin.command("killSessions", [session.session_id])
        with pytest.raises(PyMongoError):
            await session.commit_transaction()
    to = MemoryPublisher()
    async with relay(mg(), stream(to)):
        await to.wait_for(1)
        await settled(store, {Status.PUBLISHED: 1})
    assert by_key(to.deliveries) == {"k": [2]}


async def test_a_relay_that_is_killed_in_a_settle_is_taken_over_soon(
    mg: MongoOutbox, store: MongoStore, tmp_path: Path, processes: list[RelayProcess]
) -> None:
    book, mark = tmp_path / "ledger", tmp_path / "inside"
    await store.add(mixed(KEYS, 3))
    victim = RelayProcess(store, book, hang_in_settle=str(mark), batch=10).start()
    processes.append(victim)
    await until(mark.exists)
    victim.send(signal.SIGKILL)
    await victim.ended()
    begun = time.monotonic()
    processes.append(RelayProcess(store, book).start())
    await settled(store, {Status.PUBLISHED: 24})
    assert time.monotonic() - begun < FEW_SECONDS
    assert ledger_by_key(ledger(book)) == in_order(KEYS, 3)
    assert ledger_copies(ledger(book)) == 0
    assert set(await attempts(store)) == {1}


async def test_no_settle_begins_before_the_lease_names_its_session(
    faulty: Mongo, mg: MongoOutbox, store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease must name the session of its settles. If that write fails, no settle may begin."""
    victim = mg()
    await victim.open()
    await victim.announce(STREAM, Mode.ORDERED, "memory")
    (grant, *_) = await victim.take(STREAM, "ann", 4, 60)
    await store.add(numbered(key_of(grant.shard), 1))
    settlement = Settlement(grant, failed=[Failure(event, "busy", 1) for event in await read(victim, grant, 10, 10**6)])
    with failing(faulty, "update", times=ALWAYS, errorCode=13297), pytest.raises(Exception, match="13297"):
        await settle(victim, settlement)
    inside = Pause(victim, monkeypatch, "event", "bulk_write")
    settling = asyncio.create_task(settle(victim, settlement))
    await inside.reached()
    assert (await MongoProbe(store).collection("lease").find_one({"shard": grant.shard}) or {}).get("session")
    inside.go.set()
    await settling
    await victim.close()


@pytest.mark.parametrize("published", [True, False])
async def test_a_relay_that_stops_in_a_settle_changes_nothing_when_it_goes_on(
    mg: MongoOutbox, store: MongoStore, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    sleeper = mg()
    await sleeper.open()
    await sleeper.announce(STREAM, Mode.ORDERED, "memory")
    (grant, *_) = await sleeper.take(STREAM, "ann", 1, LEASE)
    await store.add(numbered(key_of(grant.shard), 5))
    events = await read(sleeper, grant, 10, 10**6)
    if published:
        inside = Pause(sleeper, monkeypatch, "event", "update_many")
        late = asyncio.create_task(settle(sleeper, Settlement(grant, published=events)))
    else:
        inside = Pause(sleeper, monkeypatch, "event", "bulk_write")
        late = asyncio.create_task(settle(sleeper, Settlement(grant, failed=[Failure(events[0], "busy", 1)])))
    await inside.reached()
    to = MemoryPublisher()
    async with relay(mg(), stream(to, lease=LEASE)):
        await to.wait_for(5)
        await settled(store, {Status.PUBLISHED: 5})
        inside.go.set()
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(late, WAIT)
    await sleeper.close()
    assert set(await attempts(store)) == {1}


async def test_a_relay_waits_for_mongodb_and_outlives_a_restart(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(clients, "CONNECT_SECONDS", 0.5)
    server = own_server(Mongo)
    outbox = mongo_outbox(server.url)
    store = outbox()
    await store.migrate()
    await store.open()
    await store.add(mixed(KEYS, 5))
    await asyncio.to_thread(server.stop)
    to = MemoryPublisher()
    running = relay(outbox(), stream(to, batch=5))
    await running.start()
    await until(lambda: "store_down" in {getattr(record, "action", None) for record in caplog.records})
    await asyncio.to_thread(server.start)
    await to.wait_for(10)
    await asyncio.to_thread(server.restart)
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    await store.add(mixed(KEYS, 5, first=6))
    await settled(store, {Status.PUBLISHED: 80})
    await running.stop()
    await store.close()
    assert by_key(to.deliveries) == in_order(KEYS, 10), "in order and without a copy"
