"""Backlogs on MongoDB."""

from typing import Any

from pymongo import AsyncMongoClient

from benchmarks.load_events import KEYS, SHARDS, payload
from pillarbox.conformance.events import make_event
from pillarbox.mongo.documents import to_document
from pillarbox.stores.mongo import MongoStore

_CHUNK = 10_000


async def add_mongo(url: str, prefix: str, events: int) -> None:
    """Add events as the writer does."""
    # Only the last insert waits for the journal, and with it for all of them.
    async with AsyncMongoClient[dict[str, Any]](url, uuidRepresentation="standard", w=1, journal=False) as client:
        collection = client.get_default_database()[f"{prefix}_event"]
        for first in range(0, events, _CHUNK):
            numbers = range(first, min(events, first + _CHUNK))
            await collection.insert_many([_document(number) for number in numbers], ordered=True)
        await client.admin.command("fsync")


def _document(number: int) -> dict[str, Any]:
    key = f"order-{number % KEYS}"
    event = make_event(
        type="order.created",
        key=key,
        aggregate_type="order",
        aggregate_id=key,
        stream="default",
        payload=payload(number),
    )
    return to_document(event, SHARDS)


async def fill_mongo(url: str, prefix: str, events: int) -> None:
    """Make a new outbox with so many pending events."""
    async with AsyncMongoClient[dict[str, Any]](url) as client:
        database = client.get_default_database()
        for name in await database.list_collection_names():
            if name.startswith(f"{prefix}_"):
                await database.drop_collection(name)
    store = MongoStore(url, prefix=prefix, shards=SHARDS)
    await store.migrate()
    await store.close()
    await add_mongo(url, prefix, events)
