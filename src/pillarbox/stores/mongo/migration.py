"""Make, migrate and remove an outbox on MongoDB."""

import asyncio
from collections.abc import Sequence
from typing import Final

from pymongo.errors import DuplicateKeyError, OperationFailure

from pillarbox.mongo import schema
from pillarbox.mongo.documents import Document
from pillarbox.stores.identity import IDENTITY, check_identity, has_owners, new_identity
from pillarbox.stores.mongo.database import MongoDatabase, Session
from pillarbox.stores.outbox_info import check_version, refuse_newer

_NAMESPACE_EXISTS: Final = 48
_INDEX_SECONDS: Final = 3600.0  # of a large outbox that is there already


class MongoSchema:
    """The collections of one outbox and their version."""

    newest_version = schema.VERSION

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database

    async def check(self) -> None:
        """Refuse an outbox of another release, and learn its number of shards."""
        check_version(await self._db.version(), schema.VERSION, str(self._db.outbox), "collections")

    async def migrate(self, *, aggregate_index: bool = False) -> Sequence[str]:
        """Every step is safe to run twice, even by two callers at once. The one that changes the version reports it."""
        await self._db.open()
        meta = self._db.collection("meta")
        with self._db.commands(_INDEX_SECONDS):
            try:
                await meta.insert_one({"_id": schema.META_ID, "version": 0, "shards": self._db.outbox.shards})
            except DuplicateKeyError:
                refuse_newer(await self._db.version(), schema.VERSION, str(self._db.outbox))
            version = await self._db.version()
            run: list[str] = []
            if version < schema.VERSION:
                await asyncio.gather(*map(self._create, schema.COLLECTIONS))
                mine = {"_id": schema.META_ID, "version": version}
                changed = await meta.update_one(mine, {"$set": {"version": schema.VERSION}})
                if changed.modified_count:
                    run = [step.name for step in schema.STEPS if step.number > version]
            if aggregate_index and await self._create_indexes("event", [schema.AGGREGATE_INDEX]):
                run.append("aggregate_index")
        return run

    def script(self, after: int = 0, *, aggregate_index: bool = False) -> str:
        """For ``mongosh``."""
        db = self._db
        return schema.script(db.name, db.names, db.outbox.shards, after, aggregate_index=aggregate_index)

    async def remove(self) -> bool:
        """Safe to call again. A writer that is still running creates a collection again. A new outbox needs a new
        store.

        An outbox of a newer release is refused: it may have collections that this release does not know."""
        await self._db.open()
        with self._db.commands():
            found = await self._db.collection("meta").find_one({"_id": schema.META_ID})
            if found is None:
                return False
            refuse_newer(int(found["version"]), schema.VERSION, str(self._db.outbox))
            await asyncio.gather(*(self._db.collection(name).drop() for name in schema.COLLECTIONS))
            # Last, because it marks that there is an outbox: an interrupted removal can be run again.
            await self._db.collection("meta").drop()
        return True

    async def prefixes(self) -> Sequence[str]:
        await self._db.open()
        with self._db.commands():
            names = await self._db.opened.list_collection_names(filter={"name": {"$regex": "_meta$"}})
        return sorted(name.removesuffix("_meta") for name in names)

    async def identity(self) -> str:
        with self._db.commands():
            mine = {"_id": schema.META_ID}
            absent = {**mine, IDENTITY: {"$exists": False}}
            await self._db.collection("meta").update_one(absent, {"$set": {IDENTITY: new_identity()}})
            return str((await self._db.collection("meta").find_one(mine) or {})[IDENTITY])

    async def set_identity(self, identity: str) -> None:
        check_identity(identity)
        leases = self._db.collection("lease")

        async def work(session: Session | None) -> None:
            running = {"owner": {"$ne": None}, "$expr": {"$gte": ["$lease_until", "$$NOW"]}}
            if busy := await leases.find(running, {"owner": 1}, session=session).to_list():
                raise has_owners(str(self._db.outbox), sorted({lease["owner"] for lease in busy}))
            await leases.update_many({}, {"$unset": {"settled_batch": 1}}, session=session)
            mine = {"_id": schema.META_ID}
            await self._db.collection("meta").update_one(mine, {"$set": {IDENTITY: identity}}, session=session)

        await self._db.transact(work)

    async def server_version(self) -> str:
        with self._db.commands():
            return str((await self._db.opened.command("buildInfo"))["version"])

    async def _create(self, name: str) -> None:
        try:
            made = schema.options(name, self._db.outbox.shards)
            await self._db.opened.command({"create": self._db.names[name], **made})
        except OperationFailure as error:
            if error.code != _NAMESPACE_EXISTS:
                raise
        await self._create_indexes(name, schema.indexes(name))

    async def _create_indexes(self, name: str, indexes: Sequence[Document]) -> bool:
        """Create missing indexes. True: one was missing."""
        if not indexes:
            return False
        made = await self._db.opened.command("createIndexes", self._db.names[name], indexes=list(indexes))
        return bool(made["numIndexesAfter"] > made["numIndexesBefore"])
