"""A store on a client of the application: its settings stay as they are, and the application closes it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from bson.codec_options import DatetimeConversion
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient, MongoClient, ReadPreference

from pillarbox.errors import ConfigError, StoreDown
from pillarbox.event import Status
from pillarbox.publisher import rejected
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.stores.mongo import MongoStore, clients
from pillarbox.urls import store_of
from servers import Mongo
from servers.fixtures import OwnServer
from tests.integration.relays import mixed, relay, settled, stream
from tests.mongo_outbox import database_url

pytestmark = pytest.mark.asyncio

# A store needs others.
SETTINGS: dict[str, Any] = {
    "document_class": RawBSONDocument,
    "tz_aware": False,
    "datetime_conversion": DatetimeConversion.DATETIME_MS,
    "uuidRepresentation": "pythonLegacy",
    "w": 0,
    "readPreference": "secondaryPreferred",
    "readConcernLevel": "local",
}


@pytest_asyncio.fixture
async def client(mongo: Mongo) -> AsyncIterator[AsyncMongoClient[Any]]:
    async with AsyncMongoClient[Any](mongo.url, **SETTINGS) as client:
        yield client


async def test_a_store_works_on_a_client_with_other_settings_and_leaves_it_as_it_is(
    client: AsyncMongoClient[Any],
) -> None:
    store = MongoStore.of(client, "applications", prefix="given", shards=4)
    await store.remove()
    await store.migrate()
    await store.open()
    to = MemoryPublisher()
    to.fail_next(rejected("refused"))
    async with relay(store, stream(to)):
        await store.add(mixed(["a", "b"], 5))
        await settled(store, {Status.PUBLISHED: 9, Status.DEAD: 1})
    (letter,) = await store.dead_letters()
    (found,) = await store.find_by_id(letter.event.id)
    assert found.event.created_at.tzinfo is not None
    await store.remove()
    await store.close()
    assert client.write_concern.document == {"w": 0}
    assert client.read_preference == ReadPreference.SECONDARY_PREFERRED
    assert client.codec_options.document_class is RawBSONDocument
    assert (await client.admin.command("ping"))["ok"], "it is open"


async def test_a_store_says_where_it_is_without_secrets(mongo: Mongo) -> None:
    async with AsyncMongoClient[Any](f"mongodb://ann:secret@127.0.0.1:{mongo.port}/shop") as client:
        assert MongoStore.of(client).description == f"mongodb 127.0.0.1:{mongo.port}/shop"
        for other in (
            store_of(client, database="other"),
            store_of(client, schema="other"),
            store_of(client["other"], prefix="own"),
        ):
            assert other.description == f"mongodb 127.0.0.1:{mongo.port}/other"


async def test_a_client_without_a_database_needs_one(client: AsyncMongoClient[Any]) -> None:
    with pytest.raises(ConfigError, match="database='shop'"):
        MongoStore.of(client)


async def test_other_clients_are_refused_with_the_one_to_pass(mongo: Mongo) -> None:
    motor = type("AsyncIOMotorClient", (), {"__module__": "motor.motor_asyncio"})
    with MongoClient[Any](mongo.url) as plain:
        for wrong, name in (
            (plain, "MongoClient of pymongo"),
            (plain["shop"], "Database of pymongo"),
            (motor(), "AsyncIOMotorClient of motor"),
        ):
            with pytest.raises(ConfigError, match=f"{name}; pass a pymongo.AsyncMongoClient"):
                store_of(wrong)


async def test_the_store_has_its_own_time_out_on_a_client_without_one(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_server(Mongo)
    async with AsyncMongoClient[Any](database_url(server.url)) as client:
        store = MongoStore.of(client)
        await store.migrate()
        await store.open()
        monkeypatch.setattr(clients, "COMMAND_SECONDS", 0.5)
        await asyncio.to_thread(server.pause)
        try:
            async with asyncio.timeout(10):
                with pytest.raises(StoreDown):
                    await store.count("default")
                with pytest.raises(StoreDown):
                    await store.take("default", "ann", 1, 60)
        finally:
            await asyncio.to_thread(server.resume)
        assert await store.count("default") == {}
        await store.close()
