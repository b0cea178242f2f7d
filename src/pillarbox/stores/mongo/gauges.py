"""Cheap questions on MongoDB: each count ends at its limit, and comes from an index."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from pymongo import ASCENDING, DESCENDING

from pillarbox.event import Mode, Status, key_hash
from pillarbox.mongo.documents import Document, from_seq
from pillarbox.store import Ahead, Filter, Found, HoldMode, StreamGauges, StuckKey, WorkerStatus
from pillarbox.stores._members import members
from pillarbox.stores._waiting import WAITING_LIMIT, heads_of, summary
from pillarbox.stores.mongo.database import MongoDatabase
from pillarbox.stores.mongo.insights import MongoInsights

Row = tuple[str, str, int, datetime | None]

_OWNERS: Final[Sequence[Document]] = [
    {"$match": {"owner": {"$ne": None}}},
    {
        "$group": {
            "_id": {"stream": "$stream", "owner": "$owner"},
            "shards": {"$sum": 1},
            "until": {"$max": "$lease_until"},
        }
    },
]
# By the server's clock, in whole seconds, not by the writer's.
_SINCE: Final[Document] = {
    "$ifNull": ["$available_at", {"$convert": {"input": "$seq", "to": "date", "onError": "$$NOW"}}]
}
# Where events are: the name of the place, the collection, its condition, its index, and the field with the state.
_PLACES: Final[Sequence[tuple[str, str, Document, str, str]]] = (
    ("both", "event", {"status": {"$in": ["failed", "held"]}}, "held", "$status"),
    ("leased", "event", {"status": "processing"}, "leased", "$status"),
    ("dead", "dead_letter", {"consumer": ""}, "stream", "dead"),
    ("keys", "held_key", {}, "key", "$mode"),
)


class MongoGauges:
    """The part that a monitor asks."""

    def __init__(self, database: MongoDatabase, insights: MongoInsights) -> None:
        self._db = database
        self._insights = insights

    async def gauges(self, limit: int = 10_000) -> Sequence[StreamGauges]:
        if limit <= 0:
            return []
        with self._db.commands():
            known = {row["_id"]: row async for row in self._db.collection("stream").find()}
        workers = await self.workers()
        waiting = await self._insights.waiting_streams()
        found = []
        for stream in sorted({*known, *workers, *waiting}):
            row = known.get(stream, {})
            rows = await self._rows(stream, limit)
            # Read last, so that no event is younger.
            now = await self._db.clock()
            mode = Mode(row["mode"]) if "mode" in row else None
            live = workers.get(stream, ())
            paused = row.get("paused", False)
            found.append(summary(stream, mode, row.get("destination"), paused, rows, live, now, limit))
        return found

    async def _rows(self, stream: str, limit: int) -> list[Row]:
        with self._db.commands():
            places = await asyncio.gather(
                self._ready(stream, limit),
                self._scheduled(stream, limit),
                *(self._counted(stream, limit, *place) for place in _PLACES),
            )
        return [row for rows in places for row in rows]

    async def _ready(self, stream: str, limit: int) -> list[Row]:
        events, pending = self._db.collection("event"), {"stream": stream, "status": "pending"}
        count = await events.count_documents(pending, limit=limit, hint="ready")
        # The first of all shards, by one step into the index for each.
        first = {**pending, "shard": {"$in": list(range(self._db.outbox.shards))}}
        found = await events.find_one(first, {"seq": 1, "available_at": 1}, sort=[("seq", ASCENDING)], hint="ready")
        if found is None:
            return [("ready", "pending", count, None)]
        since = found.get("available_at") or datetime.fromtimestamp(found["seq"].time, UTC)
        return [("ready", "pending", count, since)]

    async def _scheduled(self, stream: str, limit: int) -> list[Row]:
        due = {"stream": stream, "next_attempt_at": {"$exists": True}}
        last: Document = {"next_attempt_at": DESCENDING}
        stages: list[Document] = [{"$match": due}, {"$sort": last}, {"$limit": limit}, _grouped("$status")]
        groups = await self._db.collection("event").aggregate(stages, hint="due")
        return [("due", group["_id"], group["count"], None) async for group in groups]

    async def _counted(
        self, stream: str, limit: int, place: str, collection: str, where: Document, index: str, state: str
    ) -> list[Row]:
        waits = collection == "event"
        stages: list[Document] = [
            {"$match": {"stream": stream, **where}},
            {"$limit": limit},
            _grouped(state, since=waits),
        ]
        groups = await self._db.collection(collection).aggregate(stages, hint=index)
        return [(place, group["_id"], group["count"], group.get("since")) async for group in groups]

    async def stuck_keys(self, stream: str, limit: int = 100, key: str | None = None) -> Sequence[StuckKey]:
        if limit <= 0:
            return []
        where: Document = {"stream": stream}
        if key is not None:
            where |= {"shard": self._shard(key), "key": key}
        order = [("shard", ASCENDING), ("key", ASCENDING)]
        held = []
        with self._db.commands():
            events = self._db.collection("event")
            async for row in self._db.collection("held_key").find(where, sort=order, limit=limit):
                mine = {"stream": stream, "shard": row["shard"], "key": row["key"]}
                mine["status"] = {"$in": ["failed", "held"]}
                waiting = await events.count_documents(mine, limit=WAITING_LIMIT, hint="held")
                head = row.get("dead_head")
                if head is None and waiting:
                    first = await events.find_one(mine, {"_id": 1}, sort=[("seq", ASCENDING)], hint="held")
                    head = first and first["_id"]["id"]
                held.append((row["key"], HoldMode(row["mode"]), row.get("next_attempt_at"), head, waiting))
        where_heads = Filter(stream=stream, ids=[head for *_, head, _ in held if head is not None])
        return heads_of(held, await self._insights.find(where_heads, 2 * len(held)) if where_heads.ids else ())

    def _shard(self, key: str) -> int:
        return key_hash(UUID(int=0), key) % self._db.outbox.shards

    async def workers(self) -> Mapping[str, Sequence[WorkerStatus]]:
        with self._db.commands():
            seen = await self._db.collection("worker").find().to_list()
            owners = await (await self._db.collection("lease").aggregate(_OWNERS)).to_list()
        fields = ("stream", "name", "seen_at", "seen_until", "circuit_error", "circuit_at", "version")
        rows: list[Any] = [tuple(each.get(field) for field in fields) for each in seen]
        shards = [(each["_id"]["stream"], each["_id"]["owner"], each["shards"], each["until"]) for each in owners]
        return members(await self._db.clock(), rows, shards)

    async def ahead(self, found: Found, limit: int = 10_000) -> Ahead:
        event = found.event
        place = {"stream": event.stream, "shard": key_hash(event.id, event.key) % self._db.outbox.shards}
        before = {**place, "status": Status.PENDING.value, "seq": {"$lt": from_seq(event.seq)}}
        with self._db.commands():
            events = await self._db.collection("event").count_documents(before, limit=limit, hint="ready")
            lease = await self._db.collection("lease").find_one(place)
        if lease is None or lease["owner"] is None:
            return Ahead(None, 0.0, events)
        left = (lease["lease_until"] - await self._db.clock()).total_seconds()
        return Ahead(lease["owner"], left, events) if left > 0 else Ahead(None, 0.0, events)

    async def clock(self) -> datetime:
        return await self._db.clock()


def _grouped(state: str, *, since: bool = False) -> Document:
    group: Document = {"_id": state, "count": {"$sum": 1}}
    return {"$group": {**group, "since": {"$min": _SINCE}} if since else group}
