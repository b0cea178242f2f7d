"""Shards of ordered streams on MongoDB: who owns them, and what one poll says."""

from collections.abc import Collection as Several
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pymongo
from pymongo import ReturnDocument, UpdateOne
from pymongo.errors import BulkWriteError, PyMongoError

from pillarbox.event import Event
from pillarbox.store import Grant, Work
from pillarbox.stores._outbox import lost
from pillarbox.stores.mongo.collections import CollectionsPart, later, literal, past
from pillarbox.stores.mongo.database import DUPLICATE, Session
from pillarbox.stores.mongo.documents import Document
from pillarbox.stores.mongo.settling import SettlingSessions

_LONG_AGO_SECONDS: Final = 86_400.0
_SETTLE_SECONDS: Final = 1.0  # far more than a settle takes
# So many of the oldest events tell which shards have work; only behind more than these a shard can be hidden.
_POLLED: Final = 64
_FREE: Final[Document] = {"$or": [{"owner": None}, {"$expr": {"$lt": ["$lease_until", "$$NOW"]}}]}


def fence(grant: Grant) -> Document:
    """The condition that proves ownership."""
    return {"stream": grant.stream, "shard": grant.shard, "token": grant.token, "owner": grant.worker}


class OwnershipPart(CollectionsPart):
    """The part of a store on MongoDB that knows who owns which shard, and what there is to do."""

    _announced: set[str]
    _settling: SettlingSessions

    async def join(self, stream: str, worker: str, seconds: float) -> None:
        with self._db.errors():
            if stream not in self._announced:
                await self._announce(stream)
                self._announced.add(stream)
            seen = [{"$set": {"seen_until": later(seconds)}}]
            await self._db.collection("worker").update_one({"stream": stream, "name": worker}, seen, upsert=True)

    async def _announce(self, stream: str) -> None:
        await self._db.collection("stream").update_one(
            {"_id": stream}, {"$setOnInsert": {"paused": False}}, upsert=True
        )
        fresh = {"$setOnInsert": {"owner": None, "token": 0, "unclean_count": 0}}
        shards = [UpdateOne({"stream": stream, "shard": shard}, fresh, upsert=True) for shard in range(self._shards)]
        try:
            await self._db.collection("lease").bulk_write(shards, ordered=False)
        except BulkWriteError as error:
            # Announced by another worker at this moment.
            if any(each["code"] != DUPLICATE for each in error.details["writeErrors"]):
                raise

    async def leave(self, stream: str, worker: str) -> None:
        # Names are never used twice, so those of workers long gone are removed by whoever leaves.
        gone = [{"name": worker}, past("seen_until", _LONG_AGO_SECONDS)]
        with self._db.errors():
            await self._db.collection("worker").delete_many({"stream": stream, "$or": gone})

    async def take(self, stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        if limit <= 0:
            return []
        grants: list[Grant] = []
        change = {
            "unclean_count": {"$add": ["$unclean_count", {"$cond": [{"$eq": ["$owner", None]}, 0, 1]}]},
            "owner": literal(worker),
            "token": {"$add": ["$token", 1]},
            "lease_until": later(seconds),
        }
        async with self._db.session() as session:
            leases = self._db.collection("lease")
            free = await leases.find({"stream": stream, **_FREE}, session=session).sort("shard").to_list()
            for lease in free:
                if len(grants) == limit:
                    break
                settling = self._settling.new()
                try:
                    taken = await self._take_one(lease, {**change, "session": settling.name}, session)
                except PyMongoError:
                    # What was taken before it must be worked: else it waits for its lease to end, with an owner.
                    if not grants:
                        raise
                    break
                if taken is not None:
                    count, suspect = taken["unclean_count"], taken.get("suspect")
                    grants.append(Grant(stream, lease["shard"], worker, taken["token"], count, suspect))
                    self._settling.keep(grants[-1], settling)
        return grants

    async def _take_one(self, lease: Document, change: Document, session: Session) -> Document | None:
        """The lease as it is then; none: another worker was quicker."""
        seen = {"stream": lease["stream"], "shard": lease["shard"], "token": lease["token"], **_FREE}

        async def take() -> Document | None:
            return await self._db.collection("lease").find_one_and_update(
                seen, [{"$set": change}], return_document=ReturnDocument.AFTER, session=session
            )

        try:
            with pymongo.timeout(_SETTLE_SECONDS):
                return await take()
        except PyMongoError as error:
            if lease["owner"] is None or not error.timeout:
                raise
        # A settle that is under way is let through; one that takes so long was left open.
        await self._settling.end_left_open(lease)
        return await take()

    async def renew(self, grants: Sequence[Grant], seconds: float) -> Several[Grant]:
        change = [{"$set": {"lease_until": later(seconds)}}]
        held = [grant for grant in grants if await self._change_lease(grant, change)]
        self._settling.drop(set(grants) - set(held))
        return held

    async def give(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            await self._change_lease(
                grant, [{"$set": {"owner": None}}, {"$unset": ["lease_until", "suspect", "session"]}]
            )
        self._settling.drop(grants)

    async def suspect(self, grant: Grant, event: Event | None) -> None:
        change: list[Document] = [{"$unset": "suspect"}] if event is None else [{"$set": {"suspect": event.id}}]
        if not await self._change_lease(grant, change):
            raise lost(grant)

    async def trust(self, grant: Grant, unclean_count: int = 0) -> None:
        if not await self._change_lease(grant, [{"$set": {"unclean_count": unclean_count}}, {"$unset": "suspect"}]):
            raise lost(grant)

    async def _change_lease(self, grant: Grant, change: Sequence[Mapping[str, Any]]) -> bool:
        async with self._db.session() as session:
            done = await self._db.collection("lease").update_one(fence(grant), change, session=session)
        return bool(done.matched_count)

    async def poll(self, stream: str, worker: str, grants: Sequence[Grant] | None) -> Work:
        shards = list(range(self._shards)) if grants is None else [grant.shard for grant in grants]
        found: dict[str, list[Any]] = {}
        with self._db.errors():
            cursor = await self._db.collection("stream").aggregate(self._poll_pipeline(stream, worker, shards))
            async for answer in cursor:
                for kind, value in answer.items():
                    found.setdefault(kind, []).append(value)
            ready = set(found.get("ready", ()))
            if len(found.get("ready", ())) == _POLLED and (hidden := [each for each in shards if each not in ready]):
                ready |= await self._ready(stream, hidden)
        return Work(
            paused=bool(found.get("paused")),
            live=found.get("live", [0])[0],
            rank=found.get("rank", [0])[0],
            free=found.get("free", [0])[0],
            ready=frozenset(ready),
            due=frozenset(found.get("due", ())),
            scheduled="scheduled" in found,
            suspects="suspects" in found,
        )

    def _poll_pipeline(self, stream: str, worker: str, shards: list[int]) -> list[Document]:
        """Each branch answers in documents of one field, which says what it is."""
        names = self._db.names
        alive = {"stream": stream, "$expr": {"$gt": ["$seen_until", "$$NOW"]}}
        before = {"$cond": [{"$lt": ["$name", literal(worker)]}, 1, 0]}
        mine = {"stream": stream, "shard": {"$in": shards}}
        due = {"stream": stream, **past("next_attempt_at")}

        def branch(name: str, *stages: Document) -> Document:
            return {"$unionWith": {"coll": names[name], "pipeline": list(stages)}}

        def first(name: str, kind: str, match: Document) -> Document:
            return branch(name, {"$match": match}, {"$limit": 1}, {"$project": {"_id": 0, kind: literal(1)}})

        return [
            {"$match": {"_id": stream, "paused": True}},
            {"$project": {"_id": 0, "paused": 1}},
            branch(
                "worker",
                {"$match": alive},
                {"$group": {"_id": None, "live": {"$sum": 1}, "rank": {"$sum": before}}},
                {"$unset": "_id"},
            ),
            branch("lease", {"$match": {"stream": stream, **_FREE}}, {"$count": "free"}),
            first("event", "scheduled", {**due, "suspect": {"$ne": True}}),
            first("event", "suspects", {**due, "suspect": True}),
            branch(
                "blocked_key",
                {"$match": {**mine, **past("next_attempt_at")}},
                {"$group": {"_id": "$shard"}},
                {"$project": {"_id": 0, "due": "$_id"}},
            ),
            branch(
                "event",
                {"$match": {**mine, "status": "pending"}},
                {"$sort": {"seq": 1}},
                {"$limit": _POLLED},
                {"$project": {"_id": 0, "ready": "$shard"}},
            ),
        ]

    async def _ready(self, stream: str, shards: Sequence[int]) -> set[int]:
        """Which of these have pending events, by one step into the index for each."""
        events = self._db.names["event"]
        looks: list[list[Document]] = [
            [
                {"$match": {"stream": stream, "shard": shard, "status": "pending"}},
                {"$limit": 1},
                {"$project": {"_id": 0, "shard": 1}},
            ]
            for shard in shards
        ]
        others: list[Document] = [{"$unionWith": {"coll": events, "pipeline": look}} for look in looks[1:]]
        cursor = await self._db.collection("event").aggregate([*looks[0], *others])
        return {found["shard"] async for found in cursor}
