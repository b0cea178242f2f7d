"""Retention on MongoDB."""

from typing import Final

from pillarbox.mongo.documents import Document
from pillarbox.store import Page
from pillarbox.stores._id_walk import IdWalk
from pillarbox.stores.mongo.database import MongoDatabase
from pillarbox.stores.mongo.expressions import past

_KEY: Final[Document] = {"stream": "$stream", "shard": "$shard", "key": "$key"}
_SAME_KEY: Final = [{"$eq": [f"${name}", f"$$own.{name}"]} for name in _KEY]


def _prunable(held_keys: str, keep_seconds: float, limit: int) -> list[Document]:
    """The oldest dead letters, without those whose key is blocked or parked: an operator needs them to free it. And
    without those that a consumer shall apply again."""
    waiting = {"$match": {"mode": {"$in": ["blocked", "parked"]}, "$expr": {"$and": _SAME_KEY}}}
    return [
        {"$match": {**past("died_at", keep_seconds), "replay_at": None}},
        {"$sort": {"died_at": 1}},
        {"$project": {**_KEY, "consumer": 1}},
        {"$lookup": {"from": held_keys, "let": {"own": _KEY}, "pipeline": [waiting], "as": "held_by"}},
        {"$match": {"$or": [{"held_by": []}, {"consumer": {"$ne": ""}}]}},
        {"$limit": limit},
    ]


class MongoRetention:
    """Deletes what is old enough."""

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database

    async def prune_published(self, keep_seconds: float, limit: int, after: Document | None = None) -> Page:
        """``after`` is the ``_id`` of the last event of the page before."""
        if limit <= 0:
            return Page(0, None)
        walk = IdWalk((await self._db.clock()).timestamp(), keep_seconds, after["id"] if after else None)
        events = self._db.collection("event")
        with self._db.commands():
            bounds = {"$gt": after or {"id": walk.start}, "$lt": {"id": walk.bound}}
            rows = await events.find({"_id": bounds}, {"status": 1}, sort=[("_id", 1)], limit=limit).to_list()
            settled = [row["_id"] for row in rows if row["status"] == "published"]
            deleted = 0
            if settled:
                # The state is checked again: an operator may have replayed one meanwhile.
                old = {"_id": {"$in": settled}, "status": "published", **past("published_at", keep_seconds)}
                deleted = (await events.delete_many(old)).deleted_count
        if len(rows) == limit:
            return Page(deleted, rows[-1]["_id"])
        beyond = walk.next([], limit)
        return Page(deleted, None if beyond is None else {"id": beyond})

    async def prune_dead(self, keep_seconds: float, limit: int) -> int:
        if limit <= 0:
            return 0
        letters = self._db.collection("dead_letter")
        with self._db.commands():
            found = await letters.aggregate(_prunable(self._db.names["held_key"], keep_seconds, limit))
            ids = [letter["_id"] async for letter in found]
            if not ids:
                return 0
            old = {"_id": {"$in": ids}, **past("died_at", keep_seconds), "replay_at": None}
            done = await letters.delete_many(old)
        return done.deleted_count

    async def prune_inbox(self, keep_seconds: float, limit: int) -> int:
        return await self._prune_old("inbox", "processed_at", keep_seconds, limit)

    async def prune_idempotency(self, keep_seconds: float, limit: int) -> int:
        return await self._prune_old("idempotency", "created_at", keep_seconds, limit)

    async def _prune_old(self, name: str, instant: str, keep_seconds: float, limit: int) -> int:
        """Delete the oldest documents of a collection."""
        if limit <= 0:
            return 0
        documents, old = self._db.collection(name), past(instant, keep_seconds)
        with self._db.commands():
            found = await documents.find(old, {"_id": 1}, sort=[(instant, 1)], limit=limit).to_list()
            if not found:
                return 0
            # Its age is checked again: another relay may have deleted it, and a consumer may have written it anew.
            done = await documents.delete_many({"_id": {"$in": [each["_id"] for each in found]}, **old})
        return done.deleted_count
