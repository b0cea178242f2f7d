"""What every part of the store shares: its collections, its schema, and words for the server's own clock."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pymongo.errors import DuplicateKeyError, OperationFailure

from pillarbox.event import Status
from pillarbox.names import Names
from pillarbox.stores._errors import keepable
from pillarbox.stores._outbox import OutboxPart
from pillarbox.stores.mongo import schema
from pillarbox.stores.mongo.database import MongoDatabase
from pillarbox.stores.mongo.documents import EPOCH, MAX_ERROR_LENGTH, MAX_ERRORS, Document

WAITING: Final = ["pending", "failed", "held"]
_NAMESPACE_EXISTS: Final = 48


def later(seconds: float) -> Document:
    """The server's now plus so many seconds, in a pipeline."""
    return {"$add": ["$$NOW", int(seconds * 1000)]}


def later_or_never(seconds: float | None) -> Any:
    return "$$REMOVE" if seconds is None else later(seconds)


def past(field: str, seconds: float = 0.0) -> Document:
    """A condition: the instant is there, and was reached so many seconds ago."""
    return {field: {"$gt": EPOCH}, "$expr": {"$lte": [f"${field}", later(-seconds)]}}


def literal(value: Any) -> Document:
    """A value in a pipeline, where a text that begins with $ would be a field."""
    return {"$literal": value}


def kept(error: str) -> str:
    return keepable(error)[:MAX_ERROR_LENGTH]


def history(entry: Mapping[str, Any]) -> Document:
    """The errors with one more: the oldest are worth most, so that a long history stops growing at its end."""
    errors = {"$ifNull": ["$errors", []]}
    longer = {"$concatArrays": [errors, [literal(entry)]]}
    return {"$cond": [{"$gte": [{"$size": errors}, MAX_ERRORS]}, errors, longer]}


class CollectionsPart(OutboxPart):
    """The part of a store on MongoDB that knows its collections and their version."""

    made_of = "collections"
    _db: MongoDatabase

    def __init__(self, database: MongoDatabase, names: Names, *, shards: int, description: str) -> None:
        super().__init__(names, shards=shards, description=description)
        self._db = database

    def steps(self) -> Sequence[schema.Step]:
        return schema.STEPS

    def script(self, after: int = 0) -> str:
        """The steps above this version as a script for ``mongosh``."""
        return schema.script(self._db.database, self._names, self._shards) if after < schema.VERSION else ""

    async def migrate(self) -> Sequence[str]:
        """Bring the collections to this release's version; the names of the steps that were run.

        Everything in it can be done twice, also by two at once; the one that changes the version has run it.
        """
        await self._db.open()
        meta = self._db.collection("meta")
        with self._db.errors():
            try:
                await meta.insert_one({"_id": schema.META_ID, "version": 0, "shards": self._shards})
            except DuplicateKeyError:
                self._refuse_a_newer(await self._version())
            version = await self._version()
            if version == schema.VERSION:
                return []
            await asyncio.gather(*map(self._create, schema.COLLECTIONS))
            change = {"$set": {"version": schema.VERSION}}
            changed = await meta.update_one({"_id": schema.META_ID, "version": version}, change)
        run = [step.name for step in schema.STEPS if step.number > version]
        return run if changed.modified_count else []

    async def remove(self) -> bool:
        """Drop the collections of this outbox, its events too; False: there was none.

        Let what uses it stop before: a writer that goes on makes a collection anew. Refused are the collections of a
        newer release, for it may have made more than this one knows. Safe to call again; a new outbox of that name
        needs a new store.
        """
        await self._db.open()
        with self._db.errors():
            found = await self._db.collection("meta").find_one({"_id": schema.META_ID})
            if found is None:
                return False
            self._refuse_a_newer(int(found["version"]))
            await asyncio.gather(*(self._db.collection(name).drop() for name in schema.COLLECTIONS))
            # What tells that there is an outbox goes last: a removal that was cut short is run again.
            await self._db.collection("meta").drop()
        return True

    async def prefixes(self) -> Sequence[str]:
        """What can be the prefix of an outbox in the same database: what stands before ``_meta`` in names."""
        await self._db.open()
        with self._db.errors():
            names = await self._db.opened.list_collection_names(filter={"name": {"$regex": "_meta$"}})
        return sorted(name.removesuffix("_meta") for name in names)

    async def server_version(self) -> str:
        """As the server says it."""
        with self._db.errors():
            return str((await self._db.opened.command("buildInfo"))["version"])

    async def _create(self, name: str) -> None:
        options = {"validator": schema.validator(self._shards)} if name == "event" else {}
        own = schema.collection(self._names, name)
        try:
            await self._db.opened.command({"create": own, **options})
        except OperationFailure as error:
            if error.code != _NAMESPACE_EXISTS:
                raise
        if indexes := schema.indexes(name):
            await self._db.opened.command("createIndexes", own, indexes=list(indexes))

    async def _version(self) -> int:
        with self._db.errors():
            found = await self._db.collection("meta").find_one({"_id": schema.META_ID})
        if found is None:
            return 0
        self._shards = found["shards"]
        return int(found["version"])


def status_of(document: Mapping[str, Any]) -> Status:
    return Status(document["status"])
