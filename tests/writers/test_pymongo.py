"""What is MongoDB's own in writing events: conflicts, sizes, shards, sessions and doing without transactions."""

import asyncio
import gc
import json
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from traceback import format_exception
from typing import Any

import pytest
from bson.binary import UuidRepresentation
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError, OperationFailure
from pymongo.monitoring import CommandListener, CommandStartedEvent
from pymongo.read_preferences import ReadPreference

from pillarbox import Outbox
from pillarbox.errors import ConfigError, DuplicateEvent, InvalidEvent, NotInTransaction, SchemaError
from pillarbox.ids import uuid7
from pillarbox.writers import pymongo as writer
from tests.mongo_outbox import MongoOutbox
from tests.servers import Mongo
from tests.servers.fixtures import OwnServer

CARD = "4111" * 4
MEGABYTE = 1024 * 1024


class Calls(CommandListener):
    """The commands that a client sends."""

    def __init__(self) -> None:
        self.sent: list[CommandStartedEvent] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.sent.append(event)

    def succeeded(self, event: object) -> None:
        """Not of interest."""

    failed = succeeded

    def named(self, name: str) -> list[Any]:
        return [event.command for event in self.sent if event.command_name == name]


@pytest.fixture
def made(mongo: Mongo) -> Iterator[MongoOutbox]:
    made = MongoOutbox(mongo.url)
    made.database.create_collection(f"{made.prefix}_order")
    yield made
    made.close()


@pytest.fixture
def outbox(made: MongoOutbox) -> Outbox:
    return Outbox(prefix=made.prefix)


@pytest.fixture
def loose(made: MongoOutbox) -> Outbox:
    return Outbox(prefix=made.prefix, transactions=False)


def types(made: MongoOutbox) -> list[str]:
    return [document["type"] for document in made.events()]


def numbers(made: MongoOutbox) -> list[int]:
    return [json.loads(document["payload"])["n"] for document in made.events()]


def test_order_holds_where_the_driver_splits_what_it_sends(made: MongoOutbox) -> None:
    outbox = Outbox(prefix=made.prefix, payload_limit=10 * MEGABYTE)
    calls = Calls()
    filler = "x" * (7 * MEGABYTE)
    events = [outbox.event("large", {"n": n, "filler": filler}, key=1) for n in range(9)]
    with (
        MongoClient[Any](made.url, event_listeners=[calls]) as client,
        client.start_session() as session,
        session.start_transaction(),
    ):
        outbox.add_all(session, events)
        assert made.events() == []
    assert len(calls.named("insert")) > 1
    assert numbers(made) == list(range(9))


def test_with_transaction_runs_a_conflict_again_and_writes_one_event(made: MongoOutbox, outbox: Outbox) -> None:
    orders = made.database[f"{made.prefix}_order"]
    orders.insert_one({"_id": 7, "version": 0})
    tries: list[int] = []

    def pay(session: ClientSession) -> None:
        orders.find_one({"_id": 7}, session=session)
        if not tries:  # somebody else changes it meanwhile
            orders.update_one({"_id": 7}, {"$inc": {"version": 1}})
        tries.append(1)
        outbox.add(session, "order.paid", {"n": len(tries)}, key=7)
        orders.update_one({"_id": 7}, {"$inc": {"version": 1}}, session=session)

    with made.client.start_session() as session:
        session.with_transaction(pay)
    assert len(tries) == 2
    assert numbers(made) == [2]


def test_of_two_writers_of_one_key_the_later_one_is_run_again(made: MongoOutbox) -> None:
    strict = Outbox(prefix=made.prefix, lock_keys=True)
    with made.client.start_session() as first, made.client.start_session() as second:
        for _ in ("the document is new", "it is there"):
            first.start_transaction()
            second.start_transaction()
            strict.add(first, "first", {}, key="k")
            with pytest.raises(OperationFailure) as caught:
                strict.add(second, "second", {}, key="k")
            assert caught.value.has_error_label("TransientTransactionError")
            second.abort_transaction()
            second.start_transaction()
            strict.add(second, "another key", {}, key="another")
            strict.add(second, "no key", {})
            second.commit_transaction()
            first.commit_transaction()
    assert types(made) == ["first", "another key", "no key"] * 2
    assert made["key_lock"].count_documents({"at": {"$type": "date"}}) == 2


def test_a_snapshot_from_before_the_other_one_committed_is_too_old_for_the_lock(made: MongoOutbox) -> None:
    strict = Outbox(prefix=made.prefix, lock_keys=True)
    with made.client.start_session() as first, made.client.start_session() as second:
        second.start_transaction()
        made["stream"].find_one({}, session=second)
        with first.start_transaction():
            strict.add(first, "first", {}, key="k")
        with pytest.raises(OperationFailure) as caught:
            strict.add(second, "second", {}, key="k")
    assert caught.value.has_error_label("TransientTransactionError")
    assert types(made) == ["first"]


def test_contending_writers_of_locked_keys_all_get_through(made: MongoOutbox) -> None:
    strict = Outbox(prefix=made.prefix, lock_keys=True)

    def work(name: int) -> None:
        with made.client.start_session() as session:
            for n in range(10):
                events = [strict.event("locked", {"writer": name, "n": n}, key=key) for key in ("b", "a")]
                session.with_transaction(lambda own, events=events: strict.add_all(own, events))  # type: ignore[misc]

    threads = [threading.Thread(target=work, args=[name]) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = made.events()
    assert len({document["seq"] for document in found}) == len(found) == 80
    # Whoever has the keys writes both events before the next one writes any.
    assert [document["key"] for document in found] == ["b", "a"] * 40


def test_lock_keys_needs_transactions() -> None:
    with pytest.raises(ConfigError, match="lock_keys"):
        Outbox(lock_keys=True, transactions=False)


def test_duplicates_inside_of_a_batch(made: MongoOutbox, outbox: Outbox) -> None:
    there, twice = uuid7(), uuid7()
    with made.client.start_session() as session:
        with session.start_transaction():
            outbox.add(session, "there", {"n": 0}, id=there)
        batch = [
            outbox.event("counted", {"n": n}, id=own)
            for n, own in enumerate([None, there, twice, None, twice, None], start=1)
        ]
        with pytest.raises(DuplicateEvent, match=str(there)), session.start_transaction():
            outbox.add_all(session, batch)
        assert numbers(made) == [0]
        with session.start_transaction():
            outbox.add_all(session, batch, on_duplicate="ignore")
    assert numbers(made) == [0, 1, 3, 4, 6]


def test_the_same_id_in_two_open_transactions_is_run_again_and_ignored(made: MongoOutbox, outbox: Outbox) -> None:
    same = uuid7()
    tries: list[int] = []

    def late(session: ClientSession) -> None:
        made["stream"].find_one({}, session=session)
        if not tries:
            with made.client.start_session() as other, other.start_transaction():
                outbox.add(other, "first", {}, id=same)
        tries.append(1)
        outbox.add(session, "second", {}, id=same, on_duplicate="ignore")

    with made.client.start_session() as session:
        session.with_transaction(late)
    assert types(made) == ["first"]
    assert len(tries) == 2


@pytest.mark.parametrize("form", [UuidRepresentation.UNSPECIFIED, UuidRepresentation.PYTHON_LEGACY])
def test_the_form_of_ids_and_payloads_is_not_that_of_the_caller(made: MongoOutbox, outbox: Outbox, form: int) -> None:
    name = {UuidRepresentation.UNSPECIFIED: "unspecified"}.get(form, "pythonLegacy")
    with (
        MongoClient[Any](made.url, uuidRepresentation=name) as client,
        client.start_session() as session,
        session.start_transaction(),
    ):
        event = outbox.add(session, "order.created", b"\x00\x01", headers={"a.b": "$c"})
        assert outbox.exists(session, event.id)
    (document,) = made["event"].find({"_id": {"$type": "binData"}})
    assert (document["_id"], document["payload"], document["headers"]) == (event.id, b"\x00\x01", {"a.b": "$c"})
    assert type(document["payload"]) is bytes
    assert made["event"].count_documents({"_id": event.id}) == 1


def test_a_client_without_acknowledgements_writes_all_the_same(made: MongoOutbox, loose: Outbox) -> None:
    with MongoClient[Any](made.url, w=0) as client:
        loose.add(client, "order.created", {})
        with pytest.raises(DuplicateEvent):
            loose.add(client, "order.created", {}, id=made.events()[0]["_id"])


def test_what_is_too_large_is_refused_before_anything_is_sent(made: MongoOutbox) -> None:
    outbox = Outbox(prefix=made.prefix, payload_limit=20 * MEGABYTE)
    calls = Calls()
    largest = 16 * MEGABYTE - 256 * 1024 - 1000
    with (
        MongoClient[Any](made.url, event_listeners=[calls]) as client,
        client.start_session() as session,
        session.start_transaction(),
    ):
        for size in (largest + 1000, 17 * MEGABYTE):
            events = [outbox.event("small", {}), outbox.event("large", CARD + "x" * (size - len(CARD)))]
            with pytest.raises(InvalidEvent, match=r"16,\d+|17,\d+") as caught:
                outbox.add_all(session, events)
            assert CARD not in "".join(format_exception(caught.value))
        assert not calls.named("insert")
        outbox.add(session, "largest", "x" * largest)
    assert types(made) == ["largest"]


def everything(error: BaseException | None) -> str:
    """What a log or a debugger can show of it, and of those that it hides."""
    told = []
    while error is not None:
        told += [str(error), repr(vars(error)), repr(error.args), "".join(format_exception(error))]
        error = error.__cause__ or error.__context__
    return "".join(told)


def test_no_error_quotes_a_document(made: MongoOutbox, outbox: Outbox) -> None:
    made["event"].create_index("type", unique=True)
    with made.client.start_session() as session:
        with session.start_transaction():
            first = outbox.add(session, "order.created", {"card": CARD})
        with pytest.raises(DuplicateEvent) as duplicate, session.start_transaction():
            outbox.add(session, "another", {"card": CARD}, id=first.id)
        with pytest.raises(BulkWriteError) as other, session.start_transaction():
            outbox.add(session, "order.created", {"card": CARD}, on_duplicate="ignore")
        made.database.command("collMod", f"{made.prefix}_event", validator={"type": "never"})
        with pytest.raises(SchemaError) as refused, session.start_transaction():
            outbox.add(session, "another", {"card": CARD})
    for caught in (duplicate, other, refused):
        assert CARD not in everything(caught.value)


@pytest.mark.asyncio
async def test_no_error_quotes_a_document_where_it_is_awaited(made: MongoOutbox, outbox: Outbox) -> None:
    async with AsyncMongoClient[Any](made.url) as client, client.start_session() as session:
        async with await session.start_transaction():
            first = await outbox.add(session, "order.created", {"card": CARD})
        await session.start_transaction()
        with pytest.raises(DuplicateEvent) as caught:
            await outbox.add(session, "another", {"card": CARD}, id=first.id)
    assert CARD not in everything(caught.value)


def test_a_write_that_is_not_safe_yet_is_an_error_without_documents(own_server: OwnServer) -> None:
    made = MongoOutbox(own_server(Mongo, settings={"enableTestCommands": "1"}).url)
    loose = Outbox(prefix=made.prefix, transactions=False)
    first = loose.add(made.client, "order.created", {"card": CARD})
    again = loose.event("order.created", {"card": CARD}, id=first.id)
    unsafe = {"failCommands": ["insert"], "writeConcernError": {"code": 64, "errmsg": "waited in vain"}}
    for events in ([again], [loose.event("order.created", {"card": CARD})]):
        made.client.admin.command("configureFailPoint", "failCommand", mode={"times": 1}, data=unsafe)
        with pytest.raises(BulkWriteError, match="waited in vain") as caught:
            loose.add_all(made.client, events, on_duplicate="ignore" if events != [again] else "raise")
        assert CARD not in everything(caught.value)
    made.close()


def test_an_error_without_its_documents_keeps_its_labels() -> None:
    failures = [{"index": 3, "code": 112, "errmsg": "conflict", "op": {"card": CARD}}]
    error = BulkWriteError({"writeErrors": failures, "errorLabels": ["TransientTransactionError"]})
    assert CARD in str(error)
    bare = writer._without_documents(error)
    assert bare.has_error_label("TransientTransactionError")
    assert "conflict" in str(bare)
    assert CARD not in everything(bare)


@pytest.mark.asyncio
async def test_a_commit_whose_result_is_unknown_is_tried_again(own_server: OwnServer) -> None:
    made = MongoOutbox(own_server(Mongo, settings={"enableTestCommands": "1"}).url)
    outbox = Outbox(prefix=made.prefix)
    calls = Calls()
    # PyMongo itself tries once more.
    lost = {"failCommands": ["commitTransaction"], "closeConnection": True}
    async with AsyncMongoClient[Any](made.url, event_listeners=[calls]) as client:
        await client.admin.command("configureFailPoint", "failCommand", mode={"times": 3}, data=lost)
        async with outbox.transaction(client) as tx:
            tx.add("order.created", {})
    assert len(calls.named("commitTransaction")) == 4
    assert types(made) == ["order.created"]
    made.close()


def test_another_number_of_shards_is_refused_once(made: MongoOutbox, outbox: Outbox) -> None:
    with made.client.start_session() as session:
        with session.start_transaction():
            outbox.add(session, "before", {}, key=1)
        made.drop()
        made.make(7)
        with pytest.raises(SchemaError, match="run the transaction again"), session.start_transaction():
            outbox.add_all(session, [outbox.event("after", {}, key=key) for key in range(100)])
        with session.start_transaction():
            outbox.add_all(session, [outbox.event("after", {}, key=key) for key in range(100)])
    found = made.events()
    assert len(found) == 100
    assert {document["shard"] for document in found} == set(range(7))


def test_the_number_of_shards_is_read_once_and_outside_of_the_transaction(made: MongoOutbox, outbox: Outbox) -> None:
    calls = Calls()
    with MongoClient[Any](made.url, event_listeners=[calls], read_preference=ReadPreference.SECONDARY) as client:
        for _ in range(2):
            with client.start_session() as session, session.start_transaction(read_preference=ReadPreference.PRIMARY):
                outbox.add(session, "order.created", {})
                outbox.add(session, "order.created", {})
    (asked,) = calls.named("find")
    assert asked["readConcern"] == {"level": "majority"}
    assert "txnNumber" not in asked
    assert len(calls.named("insert")) == 4


def test_a_client_that_is_gone_is_not_kept(made: MongoOutbox, outbox: Outbox) -> None:
    with MongoClient[Any](made.url, appname="gone") as client, client.start_session() as session:
        with session.start_transaction():
            outbox.add(session, "order.created", {})
        assert client in writer._shards_of
    gone = weakref.ref(client)
    del client, session
    gc.collect()
    assert gone() is None


def test_an_outbox_of_version_0_is_none(made: MongoOutbox, outbox: Outbox) -> None:
    made["meta"].update_one({}, {"$set": {"version": 0}})
    with made.client.start_session() as session, session.start_transaction():
        with pytest.raises(SchemaError, match="pillarbox init"):
            outbox.add(session, "order.created", {})
        made["meta"].update_one({}, {"$set": {"version": 1}})
        outbox.add(session, "order.created", {})
    assert types(made) == ["order.created"]


def test_the_database_is_the_schema_or_that_of_the_url(mongo: Mongo, made: MongoOutbox, outbox: Outbox) -> None:
    with MongoClient[Any](mongo.url) as client, client.start_session() as session, session.start_transaction():
        with pytest.raises(ConfigError, match=r"schema=.*mongodb://"):
            outbox.add(session, "order.created", {})
        Outbox(prefix=made.prefix, schema="shop").add(session, "order.created", {})
    assert types(made) == ["order.created"]


HANDLES: Sequence[Callable[[Any], Any]] = (
    lambda client: client,
    lambda client: client["shop"],
    lambda client: client["shop"]["orders"],
)


@pytest.mark.parametrize("handle", HANDLES)
def test_without_a_transaction_only_where_it_is_declared(
    made: MongoOutbox, outbox: Outbox, loose: Outbox, handle: Callable[[Any], Any]
) -> None:
    calls = Calls()
    with MongoClient[Any](made.url, event_listeners=[calls]) as client:
        with pytest.raises(ConfigError, match="transactions=False"):
            outbox.add(handle(client), "order.created", {})
        event = loose.add(handle(client), "order.created", {})
        assert loose.exists(handle(client), event.id)
    (sent,) = calls.named("insert")
    assert sent["writeConcern"] == {"w": "majority"}
    assert sent["txnNumber"]  # the driver may send it twice, the server writes it once
    assert types(made) == ["order.created"]


def test_other_things_of_the_driver_are_no_handles(made: MongoOutbox, loose: Outbox) -> None:
    with pytest.raises(ConfigError, match="Cursor"):
        loose.add(made["event"].find(), "order.created", {})


def test_a_session_is_used_with_its_transaction_or_without(made: MongoOutbox, loose: Outbox) -> None:
    with made.client.start_session() as session:
        loose.add(session, "alone", {})
        with session.start_transaction():
            loose.add(session, "gone", {})
            session.abort_transaction()
    assert types(made) == ["alone"]


def test_duplicates_without_a_transaction_keep_the_order_of_the_rest(
    made: MongoOutbox, loose: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [loose.event("counted", {"n": n}) for n in range(6)]
    loose.add_all(made.client, [events[1], events[4]])
    with pytest.raises(DuplicateEvent, match=str(events[1].id)):
        loose.add_all(made.client, events)
    assert numbers(made) == [1, 4, 0]

    def look_too_early(place: object, ids: object) -> Iterator[Any]:
        yield from ()
        return set()  # type: ignore[return-value]

    monkeypatch.setattr(writer, "_known", look_too_early)
    loose.add_all(made.client, [*events, events[2]], on_duplicate="ignore")
    assert numbers(made) == [1, 4, 0, 2, 3, 5]


def test_a_standalone_server_takes_events_without_transactions(own_server: OwnServer) -> None:
    made = MongoOutbox(own_server(Mongo, replica_set=False).url)
    loose = Outbox(prefix=made.prefix, transactions=False)
    loose.add_all(made.client, [loose.event("counted", {"n": n}, key=1) for n in range(50)])
    loose.add_all(made.client, [loose.event("counted", {"n": n}, key=1) for n in range(50, 60)])
    assert numbers(made) == list(range(60))
    made.close()


@pytest.mark.asyncio
async def test_without_transactions_where_it_is_awaited(
    made: MongoOutbox, loose: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncMongoClient[Any](made.url) as client:
        for handle in HANDLES:
            event = await loose.add(handle(client), "order.created", {})
            assert await loose.exists(handle(client), event.id)
        assert not caplog.records
        loose.add(client, "forgotten", {})
        assert "THE EVENT IS LOST" in caplog.text
    assert types(made) == ["order.created"] * 3


def test_databases_that_always_have_transactions_refuse_to_do_without(loose: Outbox) -> None:
    with sqlite3.connect(":memory:") as connection, pytest.raises(ConfigError, match="transactions=False"):
        loose.add(connection, "order.created", {})
    connection.close()


@pytest.mark.asyncio
async def test_what_is_awaited_after_its_transaction_is_refused(made: MongoOutbox, outbox: Outbox) -> None:
    async with AsyncMongoClient[Any](made.url) as client, client.start_session() as session:
        await session.start_transaction()
        added = outbox.add(session, "late", {})
        await session.commit_transaction()
        with pytest.raises(NotInTransaction):
            await added
    assert types(made) == []


@pytest.mark.asyncio
async def test_with_transaction_does_not_run_a_forgotten_await_again(made: MongoOutbox, outbox: Outbox) -> None:
    tries: list[int] = []

    async def order(session: AsyncClientSession) -> None:
        tries.append(1)
        await client["shop"][f"{made.prefix}_order"].insert_one({"_id": 1}, session=session)
        outbox.add(session, "order.created", {})

    async with AsyncMongoClient[Any](made.url) as client:
        async with client.start_session() as session:
            with pytest.raises(NotInTransaction, match="not awaited"):
                await session.with_transaction(order)
        # Nothing is left that others would have to wait for.
        await client["shop"][f"{made.prefix}_order"].insert_one({"_id": 1})
    assert len(tries) == 1
    assert types(made) == []


@pytest.mark.asyncio
async def test_a_forgotten_await_in_a_block_of_the_driver_raises(made: MongoOutbox, outbox: Outbox) -> None:
    async with AsyncMongoClient[Any](made.url) as client, client.start_session() as session:
        with pytest.raises(NotInTransaction, match="not awaited"):
            async with await session.start_transaction():
                outbox.add(session, "order.created", {})


@pytest.mark.asyncio
async def test_a_block_has_the_session_for_the_data(made: MongoOutbox, outbox: Outbox) -> None:
    async with AsyncMongoClient[Any](made.url) as client:
        orders = client["shop"][f"{made.prefix}_order"]
        async with outbox.transaction(client) as tx:
            await orders.insert_one({"_id": 1}, session=tx.connection)
            tx.add("order.created", {})
        async with client.start_session() as session, await session.start_transaction():
            with pytest.raises(ConfigError, match="no savepoints"):
                async with outbox.transaction(session):
                    pytest.fail("it must not be entered")
        with pytest.raises(ConfigError, match="AsyncMongoClient"):
            async with outbox.transaction(made.client):
                pytest.fail("it must not be entered")

        async def order_slowly() -> None:
            async with outbox.transaction(client) as tx:
                await orders.insert_one({"_id": 2}, session=tx.connection)
                await asyncio.sleep(30)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(order_slowly(), 0.2)
        assert await orders.count_documents({}) == 1
    assert types(made) == ["order.created"]
