"""Events on MongoDB without transactions."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient

from pillarbox import Outbox
from pillarbox.errors import ConfigError, DuplicateEvent
from pillarbox.outbox import mongo as steps
from servers import Mongo
from servers.fixtures import OwnServer
from tests.mongo_outbox import Calls, MongoOutbox

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
    assert made.types() == ["order.created"]


def test_other_things_of_the_driver_are_no_handles(made: MongoOutbox, loose: Outbox) -> None:
    with pytest.raises(ConfigError, match="Cursor"):
        loose.add(made["event"].find(), "order.created", {})


def test_a_session_is_used_with_its_transaction_or_without(made: MongoOutbox, loose: Outbox) -> None:
    with made.client.start_session() as session:
        loose.add(session, "alone", {})
        with session.start_transaction():
            loose.add(session, "gone", {})
            session.abort_transaction()
    assert made.types() == ["alone"]


def test_duplicates_without_a_transaction_keep_the_order_of_the_rest(
    made: MongoOutbox, loose: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [loose.event("counted", {"n": n}) for n in range(6)]
    loose.add_all(made.client, [events[1], events[4]])
    with pytest.raises(DuplicateEvent, match=str(events[1].id)):
        loose.add_all(made.client, events)
    assert made.numbers() == [1, 4, 0]

    def look_too_early(write: object) -> Iterator[Any]:
        yield from ()
        return set()  # type: ignore[return-value]

    monkeypatch.setattr(steps, "_known", look_too_early)
    loose.add_all(made.client, [*events, events[2]], on_duplicate="ignore")
    assert made.numbers() == [1, 4, 0, 2, 3, 5]


def test_a_standalone_server_takes_events_without_transactions(own_server: OwnServer) -> None:
    made = MongoOutbox(own_server(Mongo, replica_set=False).url)
    loose = Outbox(prefix=made.prefix, transactions=False)
    loose.add_all(made.client, [loose.event("counted", {"n": n}, key=1) for n in range(50)])
    loose.add_all(made.client, [loose.event("counted", {"n": n}, key=1) for n in range(50, 60)])
    assert made.numbers() == list(range(60))
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
    assert made.types() == ["order.created"] * 3


def test_databases_that_always_have_transactions_refuse_to_do_without(loose: Outbox) -> None:
    with sqlite3.connect(":memory:") as connection, pytest.raises(ConfigError, match="transactions=False"):
        loose.add(connection, "order.created", {})
    connection.close()
