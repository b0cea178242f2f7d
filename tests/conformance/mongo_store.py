"""What the contract's tests must be able to do to an outbox on MongoDB."""

import itertools
import os
from typing import Any

import pytest
from pymongo import MongoClient

from pillarbox.conformance import Connect, StoreContract
from pillarbox.conformance.store_setup import PAST, STREAM
from pillarbox.conformance.store_writing import SchemaTests
from pillarbox.errors import InvalidEvent
from pillarbox.event import Status
from pillarbox.store import Failure, Features, Settlement, Store
from pillarbox.stores.mongo import MongoStore
from pillarbox.stores.mongo.documents import MAX_EVENT_BYTES
from pillarbox.stores.mongo.schema import COLLECTIONS
from tests.mongo_outbox import database_url

_numbers = itertools.count(1)
_made: dict[str, str] = {}  # the outbox of a server that tests find empty


class MongoStoreContract(StoreContract):
    features = Features(wake_up=True)

    async def set_schema_version(self, store: Store, version: int) -> None:
        assert isinstance(store, MongoStore)
        await store._db.collection("meta").update_one({"_id": "schema"}, {"$set": {"version": version}})

    @pytest.mark.asyncio
    async def test_what_no_document_can_hold_is_refused(self, store: Store) -> None:
        for wrong in (
            self.event(payload=b"x" * MAX_EVENT_BYTES),
            self.event(aggregate_version=2**70),
            self.event(headers={"nul\0": ""}),
        ):
            with pytest.raises(InvalidEvent, match=str(wrong.id)):
                await store.add([wrong])
        assert await self.count(store) == {}

    @pytest.mark.asyncio
    async def test_the_largest_event_can_die_of_many_long_errors(self, store: Store) -> None:
        grant = await self.own(store)
        size = MAX_EVENT_BYTES - 2000
        (event,) = await self.write(store, grant, self.event(key=None, payload=b"x" * size))
        for attempts in range(1, 4):
            failed = [Failure(event, "\N{OPEN MAILBOX WITH RAISED FLAG}" * 20_000, attempts, PAST)]
            await store.settle(grant, Settlement(failed=failed))
            assert await store.promote(STREAM, 10) == 1
        await store.settle(grant, Settlement(dead=[Failure(event, "at last", 4)]))
        assert await self.count(store) == {Status.DEAD: 1}


def connect_to(url: str, test: str) -> Connect:
    """Stores on an outbox of this test in the database ``contract`` of that server.

    Collections and indexes take longer to make than most tests take: only those about the schema make them anew, the
    others find them empty.
    """
    own = database_url(url, "contract")
    new = f"contract_{os.getpid()}_{next(_numbers)}"
    prefix = new if hasattr(SchemaTests, test) else _made.setdefault(own, new)
    if prefix != new:
        with MongoClient[dict[str, Any]](own) as client:
            for name in COLLECTIONS:
                client.get_default_database()[f"{prefix}_{name}"].delete_many({})
    return lambda *, shards=4: MongoStore(own, prefix=prefix, shards=shards)
