"""No error of a writer on MongoDB quotes the documents that it wrote."""

from traceback import format_exception
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import BulkWriteError

from pillarbox import Outbox
from pillarbox.drivers.pymongo import _without_documents
from pillarbox.errors import DuplicateEvent, SchemaError
from servers import Mongo
from servers.fixtures import OwnServer
from tests.mongo_outbox import MongoOutbox

CARD = "4111" * 4


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
    bare = _without_documents(error)
    assert bare.has_error_label("TransientTransactionError")
    assert "conflict" in str(bare)
    assert CARD not in everything(bare)
