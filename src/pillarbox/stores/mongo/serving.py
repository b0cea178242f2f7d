"""Membership, polling and sleep of workers on MongoDB."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from pillarbox.event import Mode
from pillarbox.mongo.documents import Document
from pillarbox.store import Grant, Work
from pillarbox.stores._errors import keepable
from pillarbox.stores.mongo.database import MongoDatabase
from pillarbox.stores.mongo.errors import DUPLICATE
from pillarbox.stores.mongo.expressions import ALIVE, later, literal, past
from pillarbox.stores.mongo.leases import FREE
from pillarbox.stores.mongo.reentry import Reentry
from pillarbox.stores.mongo.wake import Watcher
from pillarbox.version import __version__

_LONG_AGO_SECONDS: Final = 86_400.0
# A poll first reads the shards of this many events and held keys: a branch per shard costs several times as much. A
# shard that is hidden behind so many is asked for by itself.
_POLLED: Final = 64
_NEW_LEASE: Final[Document] = {"$setOnInsert": {"owner": None, "token": 0, "crashes": 0}}


def _work_of(names: Mapping[str, str], stream: str, shards: Sequence[int], *, owned: bool) -> list[Document]:
    """On the streams' collection: the stream's workers and the work of these shards. Each branch gives documents of one
    field, whose name says which answer it is. No branch groups: that costs more than the branch itself.

    owned: by a worker of an ordered stream, which has no suspects."""
    mine = {"stream": stream, "shard": {"$in": list(shards)}}
    due = {"stream": stream, **past("next_attempt_at")}

    def branch(name: str, match: Document, answer: str, value: Any, *more: Document) -> Document:
        stages = [{"$match": match}, *more, {"$project": {"_id": 0, answer: value}}]
        return {"$unionWith": {"coll": names[name], "pipeline": stages}}

    one, some = {"$limit": 1}, {"$limit": _POLLED}
    return [
        {"$match": {"_id": stream, "paused": True}},
        {"$project": {"_id": 0, "paused": 1}},
        branch("worker", {"stream": stream, **ALIVE}, "worker", "$name"),
        branch("lease", {"stream": stream, **FREE}, "free", "$shard"),
        branch("event", {**due, "suspect": None}, "scheduled", literal(1), one),
        branch("held_key", {**mine, **past("next_attempt_at")}, "due", "$shard", some),
        branch("event", {**mine, "status": "pending"}, "ready", "$shard", {"$sort": {"seq": 1}}, some),
        *([] if owned else [branch("event", {**due, "suspect": {"$gt": 0}}, "suspects", literal(1), one)]),
    ]


def _due_of(stream: str, shards: Sequence[int]) -> list[Document]:
    """On the held keys' collection: those of these shards that have one whose time has come."""
    mine = {"stream": stream, "shard": {"$in": list(shards)}, **past("next_attempt_at")}
    return [{"$match": mine}, {"$group": {"_id": "$shard"}}]


def _ready_of(events: str, stream: str, shards: Sequence[int]) -> list[Document]:
    """On the events' collection: those of these shards that have pending events, by one step into the index for
    each."""

    def first(shard: int) -> list[Document]:
        pending = {"stream": stream, "shard": shard, "status": "pending"}
        return [{"$match": pending}, {"$limit": 1}, {"$project": {"_id": 0, "ready": "$shard"}}]

    others = [{"$unionWith": {"coll": events, "pipeline": first(shard)}} for shard in shards[1:]]
    return [*first(shards[0]), *others]


class MongoServing:
    """Serves workers of all streams."""

    def __init__(self, database: MongoDatabase, reentry: Reentry, watcher: Watcher | None) -> None:
        self._db = database
        self._watcher = watcher  # None: workers only poll
        self.reenter_due = reentry.reenter_due

    async def announce(self, stream: str, mode: Mode, destination: str) -> None:
        served = {"$set": {"mode": mode.value, "destination": destination}, "$setOnInsert": {"paused": False}}
        leases = [
            UpdateOne({"stream": stream, "shard": shard}, _NEW_LEASE, upsert=True)
            for shard in range(self._db.outbox.shards)
        ]
        with self._db.commands():
            await self._db.collection("stream").update_one({"_id": stream}, served, upsert=True)
            try:
                await self._db.collection("lease").bulk_write(leases, ordered=False)
            except BulkWriteError as error:
                # A duplicate: another worker announces the stream at this moment.
                if any(each["code"] != DUPLICATE for each in error.details["writeErrors"]):
                    raise

    async def join(self, stream: str, worker: str, seconds: float, circuit_error: str | None = None) -> None:
        circuit: Document = {"circuit_error": "$$REMOVE", "circuit_at": "$$REMOVE"}
        if circuit_error is not None:
            # The first error of an open circuit says since when it is open.
            since = {"$ifNull": ["$circuit_at", "$$NOW"]}
            circuit = {"circuit_error": literal(keepable(circuit_error)), "circuit_at": since}
        version = literal(__version__)
        seen = [{"$set": {"seen_at": "$$NOW", "seen_until": later(seconds), "version": version, **circuit}}]
        with self._db.commands():
            await self._db.collection("worker").update_one({"stream": stream, "name": worker}, seen, upsert=True)

    async def leave(self, stream: str, worker: str) -> None:
        # Names are never used twice: also remove workers that are long gone.
        gone = [{"name": worker}, past("seen_until", _LONG_AGO_SECONDS)]
        with self._db.commands():
            await self._db.collection("worker").delete_many({"stream": stream, "$or": gone})

    async def poll(self, stream: str, worker: str, grants: Sequence[Grant] | None) -> Work:
        shards = list(range(self._db.outbox.shards)) if grants is None else [grant.shard for grant in grants]
        pipeline = _work_of(self._db.names, stream, shards, owned=grants is not None)
        answers: defaultdict[str, list[Any]] = defaultdict(list)
        with self._db.commands():
            async for answer in await self._db.collection("stream").aggregate(pipeline):
                for name, value in answer.items():
                    answers[name].append(value)
            ready, due = set(answers["ready"]), set(answers["due"])
            if len(answers["ready"]) == _POLLED and (hidden := [shard for shard in shards if shard not in ready]):
                pipeline = _ready_of(self._db.names["event"], stream, hidden)
                ready |= {found["ready"] async for found in await self._db.collection("event").aggregate(pipeline)}
            if len(answers["due"]) == _POLLED and (hidden := [shard for shard in shards if shard not in due]):
                pipeline = _due_of(stream, hidden)
                due |= {found["_id"] async for found in await self._db.collection("held_key").aggregate(pipeline)}
        return Work(
            paused="paused" in answers,
            live=len(answers["worker"]),
            rank=sum(name < worker for name in answers["worker"]),
            free=len(answers["free"]),
            ready=frozenset(ready),
            due=frozenset(due),
            scheduled="scheduled" in answers,
            suspects="suspects" in answers,
        )

    async def doze(self, stream: str, worker: str, asleep: bool) -> None:
        if self._watcher is not None and self._db.replicated:
            await self._watcher.doze(stream, worker, asleep)
