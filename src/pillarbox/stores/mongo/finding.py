"""What operators ask of a store on MongoDB."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from pillarbox.event import Status
from pillarbox.store import Audit, Filter, Found, StreamStatus
from pillarbox.stores.mongo.collections import later
from pillarbox.stores.mongo.documents import Document, from_seq, to_event
from pillarbox.stores.mongo.queue import QueuePart

_HOUR: Final = 3600.0
_WAITING: Final = ["pending", "processing", "failed", "held"]
_LISTED: Final = ("payload", "errors")  # can be large, and a list shows neither


class FindingPart(QueuePart):
    """The part of a store on MongoDB that only looks."""

    async def streams(self) -> Sequence[StreamStatus]:
        counts: dict[str, dict[Status, int]] = {}
        oldest: dict[str, datetime] = {}
        recent: dict[str, int] = {}
        with self._db.errors():
            states = await self._db.collection("event").aggregate(_states())
            async for state in states:
                stream, status = state["_id"]["stream"], Status(state["_id"]["status"])
                counts.setdefault(stream, {})[status] = state["count"]
                recent[stream] = recent.get(stream, 0) + state["recent"]
                if status in _WAITING:
                    oldest[stream] = min(state["since"], oldest.get(stream, state["since"]))
            for stream, count in (await self._by_stream("dead_letter", {})).items():
                counts.setdefault(stream, {})[Status.DEAD] = count
            known = await self._db.collection("stream").find().to_list()
            paused = {row["_id"]: row["paused"] for row in known}
            alive = {"$expr": {"$gt": ["$seen_until", "$$NOW"]}}
            workers = await self._by_stream("worker", alive)
        # Asked last: nothing that was read before can be younger.
        now = await self._db.clock()
        return [
            StreamStatus(
                stream,
                paused.get(stream, False),
                workers.get(stream, 0),
                counts.get(stream, {}),
                max(0.0, (now - oldest[stream]) / timedelta(seconds=1)) if stream in oldest else None,
                recent.get(stream, 0),
            )
            for stream in sorted({*counts, *paused, *workers})
        ]

    async def _by_stream(self, name: str, where: Document) -> dict[str, int]:
        groups = [{"$match": where}, {"$group": {"_id": "$stream", "count": {"$sum": 1}}}]
        found = await self._db.collection(name).aggregate(groups)
        return {group["_id"]: group["count"] async for group in found}

    async def find(self, where: Filter, limit: int, newest_first: bool = True) -> Sequence[Found]:
        sort: Document = {"_id": -1 if newest_first else 1}
        found: list[Found] = []
        if where.status is not Status.DEAD:
            found += await self._find("event", _query(where, "created_at"), sort, limit)
        if where.status in (None, Status.DEAD):
            found += await self._find("dead_letter", _query(where, "created_at"), sort, limit)
        return sorted(found, key=lambda each: each.event.id, reverse=newest_first)[:limit]

    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        if where.status not in (None, Status.DEAD):
            return []
        query = {**_query(where, "died_at"), "seq": {"$gt": from_seq(after)}}
        return await self._find("dead_letter", query, {"seq": 1}, limit)

    async def look(self, id: UUID) -> Found | None:
        # An id that died and was written again is in both: the one that moves is the one to see.
        for name in ("event", "dead_letter"):
            if found := await self._find(name, {"_id": id}, {"_id": 1}, 1, in_a_list=False):
                return found[0]
        return None

    async def _find(
        self, name: str, query: Document, sort: Document, limit: int, *, in_a_list: bool = True
    ) -> list[Found]:
        if limit <= 0:
            return []
        stages: list[Document] = [
            {"$match": query},
            {"$sort": sort},
            {"$limit": limit},
            {"$set": {"bytes": {"$binarySize": "$payload"}}},
        ]
        if in_a_list:
            stages.append({"$unset": list(_LISTED)})
        with self._db.errors():
            cursor = await self._db.collection(name).aggregate(stages)
            documents = await cursor.to_list()
            holding: set[UUID] = set()
            if name == "dead_letter" and documents:
                ids = [document["_id"] for document in documents]
                heads = self._db.collection("blocked_key").find({"dead_head": {"$in": ids}}, {"dead_head": 1})
                holding = {row["dead_head"] async for row in heads}
        return [_found(document, document["_id"] in holding) for document in documents]

    async def audit(self, limit: int) -> Sequence[Audit]:
        if limit <= 0:
            return []
        with self._db.errors():
            rows = await self._db.collection("audit").find(sort=[("seq", -1)], limit=limit).to_list()
        return [
            Audit(
                datetime.fromtimestamp(row["seq"].time, UTC),
                row["operator"],
                row["action"],
                row["stream"],
                row.get("event_id"),
            )
            for row in rows
        ]


def _states() -> list[Document]:
    """One walk over the outbox for all streams; what is scheduled for later does not wait yet."""
    recently = {"$cond": [{"$gt": ["$published_at", later(-_HOUR)]}, 1, 0]}
    # By the server's clock, in whole seconds, rather than by the writer's.
    since = {"$ifNull": ["$available_at", {"$toDate": "$seq"}]}
    group = {"stream": "$stream", "status": "$status"}
    sums = {"count": {"$sum": 1}, "since": {"$min": since}, "recent": {"$sum": recently}}
    return [{"$group": {"_id": group, **sums}}]


def _query(where: Filter, instant: str) -> Document:
    names = ("stream", "key", "type", "tenant")
    query: Document = {name: getattr(where, name) for name in names if getattr(where, name) is not None}
    if where.status not in (None, Status.DEAD):
        query["status"] = str(where.status)
    bounds = {"$gte": where.since, "$lt": where.until}
    if given := {bound: value for bound, value in bounds.items() if value is not None}:
        query[instant] = given
    if where.ids is not None:
        query["_id"] = {"$in": list(where.ids)}
    return query


def _found(document: Mapping[str, Any], holds_key: bool) -> Found:
    get = document.get
    is_dead = "died_at" in document
    return Found(
        event=to_event(document, Status.DEAD if is_dead else Status(document["status"])),
        payload_bytes=document["bytes"],
        next_attempt_at=get("next_attempt_at"),
        published_at=get("published_at"),
        processing_started_at=get("processing_started_at"),
        lease_owner=get("lease_owner"),
        lease_until=get("lease_until"),
        lease_token=get("lease_token", 0),
        last_error=get("error") if is_dead else get("last_error"),
        last_error_at=get("died_at") if is_dead else get("last_error_at"),
        errors=get("errors", ()),
        holds_key=holds_key,
    )
