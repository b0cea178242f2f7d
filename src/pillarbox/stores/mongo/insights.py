"""Questions of operators on MongoDB."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from bson import MaxKey

from pillarbox.event import Event, Status
from pillarbox.mongo.documents import Document, error_history, from_seq, identity, partly, to_event, with_id
from pillarbox.store import Audit, DeadLetter, Filter, Found
from pillarbox.stores.mongo.database import MongoDatabase
from pillarbox.stores.mongo.expressions import ALIVE
from pillarbox.unreadable import CANNOT_READ

_STATES: Final = frozenset(Status)
_NOT_IN_A_LIST: Final = ["payload", "errors"]  # both can be large
_OF_RELAYS: Final[Document] = {"consumer": ""}  # dead letters
_FIELDS: Final = ("stream", "key", "type", "tenant", "topic", "aggregate_type", "aggregate_id")
# Where events can wait, each with the index that has the stream first.
_PLACES: Final[Sequence[tuple[str, str, Document]]] = (
    ("event", "ready", {"status": "pending"}),
    ("event", "due", {"next_attempt_at": {"$exists": True}}),
    ("held_key", "key", {}),
)


def _by(field: str, where: Document) -> list[Document]:
    return [{"$match": where}, {"$group": {"_id": f"${field}", "count": {"$sum": 1}}}]


def _query(where: Filter, instant: str) -> Document:
    """The condition that an event or a dead letter matches."""
    query: Document = {name: value for name in _FIELDS if (value := getattr(where, name)) is not None}
    if where.status not in (None, Status.DEAD):
        query["status"] = str(where.status)
    bounds = {"$gte": where.since, "$lt": where.until}
    if given := {bound: value for bound, value in bounds.items() if value is not None}:
        query[instant] = given
    if where.ids is not None:
        query |= _with_ids(where.ids, where.stream, where.consumer)
    return query


def _with_ids(ids: Sequence[UUID], stream: str | None, consumer: str) -> Document:
    if stream is not None or not ids:
        return {"_id": {"$in": [identity(id, stream or "", consumer) for id in ids]}}
    return {"$or": [{"_id": with_id(id)} for id in ids]}


class MongoInsights:
    """Reads for operators."""

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database

    async def unserved(self) -> Sequence[str]:
        waiting = await self.waiting_streams()
        with self._db.commands():
            live = self._db.collection("worker").find(ALIVE, {"stream": 1})
            served = {worker["stream"] async for worker in live}
        return sorted(waiting - served)

    async def waiting_streams(self) -> set[str]:
        """The streams that have events to publish."""
        waiting: set[str] = set()
        with self._db.commands():
            for name, index, where in _PLACES:
                waiting |= await self._streams_of(name, index, where)
        return waiting

    async def _streams_of(self, name: str, index: str, where: Document) -> set[str]:
        """One step along the index for each stream, independent of the number of events."""
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
        with self._db.commands():
            counts = await self._counted("event", _by("status", {"stream": stream}))
            dead = await self._db.collection("dead_letter").count_documents({"stream": stream, **_OF_RELAYS})
        living = {Status(status): count for status, count in counts.items() if status in _STATES}
        return living | ({Status.DEAD: dead} if dead else {})

    async def _counted(self, name: str, pipeline: list[Document]) -> dict[str, int]:
        groups = await self._db.collection(name).aggregate(pipeline)
        return {group["_id"]: group["count"] async for group in groups}

    async def find(
        self, where: Filter, limit: int, newest_first: bool = True, after: UUID | None = None
    ) -> Sequence[Found]:
        query, order = _query(where, "created_at"), {"_id": -1 if newest_first else 1}
        if after is not None:
            # Below all identities of this id, or above them.
            bound = {"$lt": {"id": after}} if newest_first else {"$gt": {"id": after, "stream": MaxKey()}}
            query = {"$and": [query, {"_id": bound}]}
        found: list[Found] = []
        if where.status is not Status.DEAD and not where.consumer:
            found += await self._find("event", query, order, limit)
        if where.status in (None, Status.DEAD):
            found += await self._find("dead_letter", query | {"consumer": where.consumer}, order, limit)
        found.sort(key=lambda each: (each.event.id, each.event.stream), reverse=newest_first)
        return found[:limit]

    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        if where.status not in (None, Status.DEAD):
            return []
        query = {**_query(where, "died_at"), "consumer": where.consumer, "seq": {"$gt": from_seq(after)}}
        return await self._find("dead_letter", query, {"seq": 1}, limit)

    async def find_by_id(self, id: UUID, consumer: str = "") -> Sequence[Found]:
        query = {"_id": with_id(id)}
        found = [] if consumer else await self._find("event", query, {"_id": 1}, None)
        dead = await self._find("dead_letter", query | {"consumer": consumer}, {"_id": 1}, None)
        # An event that died and was written again is in both: the new one counts.
        living = {each.event.stream for each in found}
        return [*found, *(each for each in dead if each.event.stream not in living)]

    async def _find(self, name: str, query: Document, order: Document, limit: int | None) -> list[Found]:
        """A list of up to ``limit`` events; without a limit all of them, with payloads and errors."""
        # A payload of another type has no size here.
        is_binary = {"$eq": [{"$type": "$payload"}, "binData"]}
        size = {"$set": {"bytes": {"$cond": [is_binary, {"$binarySize": "$payload"}, 0]}}}
        stages: list[Document] = [{"$match": query}, {"$sort": order}, size]
        if limit is not None:
            if limit <= 0:
                return []
            stages = [*stages[:2], {"$limit": limit}, size, {"$unset": _NOT_IN_A_LIST}]
        with self._db.commands():
            documents = await (await self._db.collection(name).aggregate(stages)).to_list()
            holding = await self._holding(documents) if name == "dead_letter" else set()
        return [_found(document, (document["stream"], _id_of(document)) in holding) for document in documents]

    async def _holding(self, letters: Sequence[Document]) -> set[tuple[str, UUID]]:
        """The streams and ids of dead letters that a held key waits for."""
        heads = {"dead_head": {"$in": [_id_of(letter) for letter in letters if not letter.get("consumer")]}}
        rows = self._db.collection("held_key").find(heads, {"stream": 1, "dead_head": 1})
        return {(row["stream"], row["dead_head"]) async for row in rows}

    async def dead_letters(
        self, stream: str | None = None, limit: int = 100, consumer: str = ""
    ) -> Sequence[DeadLetter]:
        if limit <= 0:
            return []
        where = {"consumer": consumer} | ({} if stream is None else {"stream": stream})
        with self._db.commands():
            letters = self._db.collection("dead_letter").find(where, sort=[("died_at", 1), ("seq", 1)], limit=limit)
            return [
                DeadLetter(_event(letter, Status.DEAD)[0], letter["died_at"], letter["error"], error_history(letter))
                async for letter in letters
            ]

    async def audit(self, limit: int, stream: str | None = None, action: str | None = None) -> Sequence[Audit]:
        if limit <= 0:
            return []
        where = {name: value for name, value in (("stream", stream), ("action", action)) if value is not None}
        with self._db.commands():
            rows = await self._db.collection("audit").find(where, sort=[("seq", -1)], limit=limit).to_list()
        return [
            Audit(
                datetime.fromtimestamp(row["seq"].time, UTC),
                row["operator"],
                row["action"],
                row["stream"],
                row.get("event_id"),
                row.get("consumer", ""),
            )
            for row in rows
        ]


def _found(document: Mapping[str, Any], holds_key: bool) -> Found:
    get = document.get
    is_dead = "died_at" in document
    event, unreadable = _event(document, Status.DEAD if is_dead else get("status"))
    return Found(
        event=event,
        payload_bytes=document["bytes"],
        next_attempt_at=_instant(get("next_attempt_at")),
        published_at=_instant(get("published_at")),
        processing_started_at=_instant(get("processing_started_at")),
        lease_owner=get("lease_owner"),
        lease_until=_instant(get("lease_until")),
        lease_token=get("lease_token", 0),
        last_error=get("error") if is_dead else get("last_error"),
        last_error_at=_instant(get("died_at") if is_dead else get("last_error_at")),
        errors=error_history(document),
        holds_key=holds_key,
        unreadable=unreadable,
        consumer=get("consumer", ""),
        replay_at=_instant(get("replay_at")),
    )


def _event(document: Mapping[str, Any], status: Any) -> tuple[Event, str]:
    """The event, as far as it can be read, and which fields cannot."""
    try:
        return to_event(document, Status(status)), ""
    except CANNOT_READ:
        return partly(document, status)


def _id_of(document: Mapping[str, Any]) -> Any:
    return partly(document, Status.DEAD)[0].id


def _instant(value: Any) -> datetime | None:
    return value if isinstance(value, datetime) else None
