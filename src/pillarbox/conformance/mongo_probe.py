"""A test's own access to the collections of a store on MongoDB."""

from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import pytest

from pillarbox.errors import StoreDown
from pillarbox.event import Event
from pillarbox.ids import uuid7
from pillarbox.mongo.documents import identity
from pillarbox.stores.mongo import MongoStore
from pillarbox.stores.mongo.clients import OwnClient
from pillarbox.stores.mongo.database import Collection
from pillarbox.stores.mongo.expressions import later


class MongoProbe:
    """Reads and changes an outbox directly, without the store's contracts."""

    def __init__(self, store: MongoStore) -> None:
        self._db = store.database

    @property
    def prefix(self) -> str:
        return self._db.outbox.names.prefix

    @property
    def url(self) -> str:
        """The URL with its secrets."""
        assert isinstance(self._db.source, OwnClient), "the application's client has no URL"
        return self._db.source.url

    def collection(self, name: str) -> Collection:
        return self._db.collection(name)

    async def made(self) -> set[str]:
        """The names in the database that start with this outbox's prefix."""
        await self._db.open()
        names = await self._db.opened.list_collection_names()
        return {name for name in names if name.startswith(f"{self.prefix}_")}

    async def set_schema_version(self, version: int) -> None:
        """Make the outbox look as if another release had migrated it."""
        await self.collection("meta").update_one({"_id": "schema"}, {"$set": {"version": version}})

    async def move(self, name: str, instant: str, seconds: float, **where: Any) -> None:
        """Set an instant to ``seconds`` from now, in the documents with these values."""
        chosen = {"_id.id" if field == "id" else field: value for field, value in where.items()}
        await self.collection(name).update_many(chosen, [{"$set": {instant: later(seconds)}}])

    async def owners(self, stream: str) -> Mapping[str | None, int]:
        """The number of shards of each worker."""
        return Counter([lease["owner"] async for lease in self.collection("lease").find({"stream": stream})])

    async def damage(self, event: Event, how: str) -> None:
        """Write a value into this event past the outbox and its validator."""
        value = {"headers": {"number": 7}, "attempts": 2**31 - 1}[how]
        events = self.collection("event")
        change = {"$set": {how: value}}
        found = {"_id": identity(event.id, event.stream)}
        assert (await events.update_one(found, change, bypass_document_validation=True)).matched_count == 1

    async def remember(self, table: str, count: int) -> None:
        """Write documents of the inbox or idempotency keys, as old as this moment."""
        for number in range(count):
            if table == "inbox":
                chosen: Any = {"_id": {"consumer": f"consumer {number % 2}", "event_id": uuid7()}}
                change: Any = {"processed_at": "$$NOW"}
            else:
                chosen = {"_id": sha256(uuid7().bytes).digest()}
                change = {"created_at": "$$NOW", **({"status": 200} if number % 2 else {})}
            await self.collection(table).update_one(chosen, [{"$set": change}], upsert=True)

    def cut(self, patch: pytest.MonkeyPatch) -> None:
        """Until ``patch.undo()`` this store reaches nothing, as if its machine were off the network."""

        def unreachable(*_: object) -> Any:
            raise StoreDown("cut off")

        patch.setattr(self._db, "collection", unreachable)
        patch.setattr(self._db, "new_session", unreachable)
