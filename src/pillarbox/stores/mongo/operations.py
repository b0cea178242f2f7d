"""Retention, steering and operators on MongoDB."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from bson import Timestamp

from pillarbox.event import Status
from pillarbox.store import DeadLetter, Page
from pillarbox.stores._id_walk import IdWalk
from pillarbox.stores.mongo.collections import past
from pillarbox.stores.mongo.database import Session
from pillarbox.stores.mongo.documents import Document, from_dead_letter, to_event
from pillarbox.stores.mongo.finding import FindingPart


class OperationsPart(FindingPart):
    """The part of a store on MongoDB for everything around the relay's own work."""

    async def prune_published(self, keep_seconds: float, limit: int, after: UUID | None = None) -> Page:
        if limit <= 0:
            return Page(0, None)
        walk = IdWalk((await self._db.clock()).timestamp(), keep_seconds, after)
        events = self._db.collection("event")
        with self._db.errors():
            page = events.find(
                {"_id": {"$gt": walk.start, "$lt": walk.bound}}, {"status": 1}, sort=[("_id", 1)], limit=limit
            )
            rows = await page.to_list()
            settled = [row["_id"] for row in rows if row["status"] == "published"]
            deleted = 0
            if settled:
                # The state is checked again: an operator may have replayed one meanwhile.
                old = {"_id": {"$in": settled}, "status": "published", **past("published_at", keep_seconds)}
                deleted = (await events.delete_many(old)).deleted_count
        return Page(deleted, walk.next([row["_id"] for row in rows], limit))

    async def prune_dead(self, keep_seconds: float, limit: int) -> int:
        if limit <= 0:
            return 0
        letters = self._db.collection("dead_letter")
        own = {"stream": "$stream", "shard": "$shard", "key": "$key"}
        same = [{"$eq": [f"${name}", f"$$own.{name}"]} for name in own]
        # Those whose key is blocked or parked are what an operator needs to free it.
        waiting = {
            "from": self._db.names["blocked_key"],
            "let": {"own": own},
            "pipeline": [{"$match": {"mode": {"$in": ["blocked", "parked"]}, "$expr": {"$and": same}}}],
            "as": "blocked",
        }
        stages: list[Document] = [
            {"$match": past("died_at", keep_seconds)},
            {"$sort": {"died_at": 1}},
            {"$project": own},
            {"$lookup": waiting},
            {"$match": {"blocked": []}},
            {"$limit": limit},
        ]
        with self._db.errors():
            cursor = await letters.aggregate(stages)
            ids = [letter["_id"] async for letter in cursor]
            if not ids:
                return 0
            done = await letters.delete_many({"_id": {"$in": ids}, **past("died_at", keep_seconds)})
        return done.deleted_count

    async def pause(self, stream: str, by: str) -> None:
        await self._steer(stream, "pause", True, by)

    async def resume(self, stream: str, by: str) -> None:
        await self._steer(stream, "resume", False, by)

    async def _steer(self, stream: str, action: str, paused: bool, by: str) -> None:
        async def work(session: Session | None) -> None:
            change = {"$set": {"paused": paused}}
            await self._db.collection("stream").update_one({"_id": stream}, change, upsert=True, session=session)
            await self._audit(by, action, stream, None, session)

        await self._db.transact(work)

    async def _audit(self, by: str, action: str, stream: str, event_id: Any, session: Session | None) -> None:
        row = {"seq": Timestamp(0, 0), "operator": by, "action": action, "stream": stream}
        await self._db.collection("audit").insert_one(
            row if event_id is None else {**row, "event_id": event_id}, session=session
        )

    async def unserved(self) -> Sequence[str]:
        waiting: set[str] = set()
        with self._db.errors():
            for name, index, where in (
                ("event", "ready", {"status": "pending"}),
                ("event", "due", {"next_attempt_at": {"$exists": True}}),
                ("blocked_key", "key", {}),
            ):
                waiting |= await self._streams_of(name, index, where)
            live = self._db.collection("worker").find({"$expr": {"$gt": ["$seen_until", "$$NOW"]}}, {"stream": 1})
            served = {worker["stream"] async for worker in live}
        return sorted(waiting - served)

    async def _streams_of(self, name: str, index: str, where: Document) -> set[str]:
        """One step for each stream along the index, whatever the number of events."""
        found: set[str] = set()
        after = ""
        while True:
            query = {**where, "stream": {"$gt": after}}
            following = await self._db.collection(name).find_one(query, {"stream": 1}, sort=[("stream", 1)], hint=index)
            if following is None:
                return found
            after = following["stream"]
            found.add(after)

    async def count(self, stream: str) -> Mapping[Status, int]:
        groups: list[Document] = [{"$match": {"stream": stream}}, {"$group": {"_id": "$status", "count": {"$sum": 1}}}]
        with self._db.errors():
            found = await self._db.collection("event").aggregate(groups)
            counts = {Status(group["_id"]): group["count"] async for group in found}
            dead = await self._db.collection("dead_letter").count_documents({"stream": stream})
        return counts | ({Status.DEAD: dead} if dead else {})

    async def dead_letters(self, stream: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        if limit <= 0:
            return []
        where = {} if stream is None else {"stream": stream}
        with self._db.errors():
            letters = self._db.collection("dead_letter").find(where, sort=[("died_at", 1), ("seq", 1)], limit=limit)
            return [
                DeadLetter(to_event(letter, Status.DEAD), letter["died_at"], letter["error"], letter["errors"])
                async for letter in letters
            ]

    async def replay(self, ids: Sequence[UUID], by: str) -> int:
        return await self._act_on_dead(ids, by, "replay")

    async def discard(self, ids: Sequence[UUID], by: str) -> int:
        return await self._act_on_dead(ids, by, "discard")

    async def _act_on_dead(self, ids: Sequence[UUID], by: str, action: str) -> int:
        async def work(session: Session | None) -> int:
            return await self._act(ids, by, action, session)

        return await self._db.transact(work)

    async def _act(self, ids: Sequence[UUID], by: str, action: str, session: Session | None) -> int:
        letters = self._db.collection("dead_letter")
        order = [("stream", 1), ("shard", 1), ("key", 1), ("seq", 1)]
        found = await letters.find({"_id": {"$in": list(ids)}}, sort=order, session=session).to_list()
        for letter in found:
            aside: Mapping[str, Any] = {}
            if "key" in letter:
                # From here on the owner's settle of this key meets what is done here.
                aside = await self._lock_keys(_place(letter), [letter["key"]], session)
            if action == "replay":
                event = from_dead_letter(letter, Status.FAILED if aside else Status.PENDING)
                await self._db.collection("event").insert_one(event, session=session)
            await self._audit(by, action, letter["stream"], letter["_id"], session)
        await letters.delete_many({"_id": {"$in": [letter["_id"] for letter in found]}}, session=session)
        for letter in found:
            if "key" in letter:
                await self._free_key(_place(letter), letter["key"], letter["_id"], session)
        return len(found)

    async def _free_key(self, place: Document, key: str, event_id: UUID, session: Session | None) -> None:
        """A blocked or parked key waits for what an operator does with the very event that it waits for."""
        where = {**place, "key": key, "$or": [{"mode": "retry"}, {"dead_head": event_id}]}
        change: list[Document] = [{"$set": {"mode": "retry", "next_attempt_at": "$$NOW"}}, {"$unset": "dead_head"}]
        await self._db.collection("blocked_key").update_one(where, change, session=session)


def _place(letter: Mapping[str, Any]) -> Document:
    return {"stream": letter["stream"], "shard": letter["shard"]}
