"""What is MongoDB's own in writing events: conflicts, sizes, shards and sessions."""

import asyncio
import gc
import threading
import weakref
from traceback import format_exception
from typing import Any

import pytest
from bson.binary import UuidRepresentation
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure
from pymongo.hello import Hello
from pymongo.read_preferences import ReadPreference

from pillarbox import Outbox
from pillarbox.errors import ConfigError, DuplicateEvent, InvalidEvent, NotInTransaction, SchemaError
from pillarbox.ids import uuid7
from pillarbox.outbox import mongo as steps
from servers import Mongo
from servers.fixtures import OwnServer
from tests.mongo_outbox import Calls, MongoOutbox

CARD = "4111" * 4
MEGABYTE = 1024 * 1024


def test_order_holds_where_the_driver_splits_what_it_sends(
    made: MongoOutbox, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hello, "max_write_batch_size", 100)  # servers say 100,000
    calls = Calls()
    events = [outbox.event("counted", {"n": n}, key=n % 3) for n in range(1000)]
    with MongoClient[Any](made.url, event_listeners=[calls]) as client, client.start_session() as session:
        with session.start_transaction():
            outbox.add_all(session, events)
            assert made.events() == []
        assert len(calls.named("insert")) == 10
        with pytest.raises(DuplicateEvent, match=str(events[250].id)), session.start_transaction():
            outbox.add_all(session, [*(outbox.event("new", {"n": 0}) for _ in range(250)), *events[250:]])
    assert made.numbers() == list(range(1000))


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
    assert made.numbers() == [2]


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
    assert made.types() == ["first", "another key", "no key"] * 2
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
    assert made.types() == ["first"]


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
        assert made.numbers() == [0]
        with session.start_transaction():
            outbox.add_all(session, batch, on_duplicate="ignore")
    assert made.numbers() == [0, 1, 3, 4, 6]


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
    assert made.types() == ["first"]
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
    (document,) = made["event"].find({"_id.id": {"$type": "binData"}})
    assert (document["_id"]["id"], document["payload"], document["headers"]) == (event.id, b"\x00\x01", {"a.b": "$c"})
    assert type(document["payload"]) is bytes
    assert made["event"].count_documents({"_id": {"id": event.id, "stream": "default"}}) == 1


def test_a_client_without_acknowledgements_writes_all_the_same(made: MongoOutbox, loose: Outbox) -> None:
    with MongoClient[Any](made.url, w=0) as client:
        loose.add(client, "order.created", {})
        with pytest.raises(DuplicateEvent):
            loose.add(client, "order.created", {}, id=made.events()[0]["_id"]["id"])


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
    assert made.types() == ["largest"]


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
    assert made.types() == ["order.created"]
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
        assert client in steps._shards_of
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
    assert made.types() == ["order.created"]


def test_the_database_is_the_schema_or_that_of_the_url(mongo: Mongo, made: MongoOutbox, outbox: Outbox) -> None:
    with MongoClient[Any](mongo.url) as client, client.start_session() as session, session.start_transaction():
        with pytest.raises(ConfigError, match=r"schema=.*mongodb://"):
            outbox.add(session, "order.created", {})
        Outbox(prefix=made.prefix, schema="shop").add(session, "order.created", {})
    assert made.types() == ["order.created"]


@pytest.mark.asyncio
async def test_what_is_awaited_after_its_transaction_is_refused(made: MongoOutbox, outbox: Outbox) -> None:
    async with AsyncMongoClient[Any](made.url) as client, client.start_session() as session:
        await session.start_transaction()
        added = outbox.add(session, "late", {})
        await session.commit_transaction()
        with pytest.raises(NotInTransaction):
            await added
    assert made.types() == []


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
    assert made.types() == []


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
        with pytest.raises(ConfigError, match="is not awaited and would block"):
            async with outbox.transaction(made.client):
                pytest.fail("it must not be entered")

        async def order_slowly() -> None:
            async with outbox.transaction(client) as tx:
                await orders.insert_one({"_id": 2}, session=tx.connection)
                await asyncio.sleep(30)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(order_slowly(), 0.2)
        assert await orders.count_documents({}) == 1
    assert made.types() == ["order.created"]
