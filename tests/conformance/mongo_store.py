"""The contract's tests on MongoDB, with tests of its documents."""

import itertools
import os
from typing import Any

import pytest
from pymongo import MongoClient

from pillarbox.conformance import Connect, StoreContract
from pillarbox.conformance.mongo_probe import MongoProbe
from pillarbox.conformance.store_setup import PAST, STREAM, settle
from pillarbox.conformance.store_writing import SchemaTests
from pillarbox.errors import InvalidEvent
from pillarbox.event import Event, Status
from pillarbox.mongo.documents import MAX_EVENT_BYTES
from pillarbox.mongo.schema import COLLECTIONS
from pillarbox.store import Failure, Features, Hold, HoldMode, Settlement, Store
from pillarbox.stores.mongo import MongoStore
from tests.mongo_outbox import database_url

_numbers = itertools.count(1)
_made: dict[str, str] = {}  # for each server the outbox that tests share, emptied before each of them


class MongoStoreContract(StoreContract):
    features = Features(wake_up=True)
    fenced_marks = False

    async def set_schema_version(self, store: Store, version: int) -> None:
        assert isinstance(store, MongoStore)
        await MongoProbe(store).set_schema_version(version)

    async def damage(self, store: Store, event: Event, how: str) -> None:
        assert isinstance(store, MongoStore)
        await MongoProbe(store).damage(event, how)

    async def remember(self, store: Store, table: str, count: int) -> None:
        assert isinstance(store, MongoStore)
        await MongoProbe(store).remember(table, count)

    @pytest.mark.asyncio
    async def test_an_event_that_fits_no_document_is_refused(self, store: Store) -> None:
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
            await settle(store, Settlement(grant, failed=failed))
            assert await store.reenter_due(STREAM, 10) == 1
        await settle(store, Settlement(grant, dead=[Failure(event, "at last", 4)]))
        assert await self.count(store) == {Status.DEAD: 1}

    @pytest.mark.asyncio
    async def test_a_poll_finds_a_due_key_behind_many_of_another_shard(self, store: Store) -> None:
        grants = await self.own_all(store)
        for grant, count in zip(grants, (70, 0, 1), strict=False):
            due = {self.key(grant.shard): Hold(HoldMode.RETRYING, PAST) for _ in range(count)}
            await settle(store, Settlement(grant, hold_keys=due))
        assert (await store.poll(STREAM, "ann", grants)).due == {0, 2}

    @pytest.mark.asyncio
    async def test_a_page_of_prune_can_end_between_two_streams_of_an_id(self, store: Store) -> None:
        streams = (STREAM, "invoices", "letters")
        grants = {stream: await self.own(store, stream=stream) for stream in streams}
        event = self.event()
        await store.add([event._replace(stream=stream) for stream in streams])
        for stream in (STREAM, "letters"):
            await self.publish(store, grants[stream], *await self.read(store, grants[stream]))
        deleted, after = 0, None
        for _ in range(10):
            page = await store.prune_published(PAST, 1, after)
            deleted, after = deleted + page.deleted, page.after
            if after is None:
                break
        assert (deleted, after) == (2, None)
        (left,) = await store.find_by_id(event.id)
        assert left.event.stream == "invoices"


def connect_to(url: str, test: str) -> Connect:
    """Stores on an outbox in the database ``contract`` of that server.

    To make collections and indexes takes longer than most tests. Only tests of the schema make them anew; the others
    share one outbox, which is emptied for each of them.
    """
    own = database_url(url, "contract")
    new = f"contract_{os.getpid()}_{next(_numbers)}"
    prefix = new if hasattr(SchemaTests, test) else _made.setdefault(own, new)
    if prefix != new:
        with MongoClient[dict[str, Any]](own) as client:
            for name in COLLECTIONS:
                client.get_default_database()[f"{prefix}_{name}"].delete_many({})
    return lambda *, shards=4: MongoStore(own, prefix=prefix, shards=shards)
