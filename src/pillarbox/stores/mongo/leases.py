"""Ownership of shards on MongoDB."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import pymongo
from pymongo import ReturnDocument, UpdateOne
from pymongo.errors import PyMongoError

from pillarbox.mongo.documents import Document
from pillarbox.store import Grant
from pillarbox.stores._tokens import new_token
from pillarbox.stores.mongo.database import MongoDatabase, Session
from pillarbox.stores.mongo.expressions import later, literal
from pillarbox.stores.mongo.settling import SettlingSessions
from pillarbox.stores.outbox_info import lost

_SETTLE_SECONDS: Final = 1.0  # far more than a settle takes
FREE: Final[Document] = {"$or": [{"owner": None}, {"$expr": {"$lt": ["$lease_until", "$$NOW"]}}]}
_GIVEN: Final[list[Document]] = [{"$set": {"owner": None}}, {"$unset": ["lease_until", "suspect", "alone", "session"]}]


def fence(grant: Grant) -> Document:
    """The condition that this grant still owns its shard."""
    return {"stream": grant.stream, "shard": grant.shard, "token": grant.token, "owner": grant.worker}


_OWNED: Final[Document] = {"_id": 0, "shard": 1, "token": 1, "owner": 1}


def _taken(worker: str, seconds: float, session: Any) -> Document:
    """The change of a lease for its new owner. An owner that did not give it back has crashed."""
    return {
        "crashes": {"$add": ["$crashes", {"$cond": [{"$eq": ["$owner", None]}, 0, 1]}]},
        "owner": literal(worker),
        "token": new_token(),
        "lease_until": later(seconds),
        "session": session,
    }


class Leases:
    """The leases of shards. Every change names the token."""

    def __init__(self, database: MongoDatabase, sessions: SettlingSessions) -> None:
        self._db = database
        self._sessions = sessions

    async def take(self, stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        grants: list[Grant] = []
        if limit <= 0:
            return grants
        async with self._db.session() as session:
            leases = self._db.collection("lease")
            free = await leases.find({"stream": stream, **FREE}, session=session).sort("shard").to_list()
            for lease in free:
                if len(grants) == limit:
                    break
                settling = self._sessions.new()
                try:
                    taken = await self._take_one(lease, _taken(worker, seconds, settling.name), session)
                except PyMongoError:
                    # Return the shards that are taken already: else they would wait for their lease to end.
                    if not grants:
                        raise
                    break
                if taken is not None:
                    crashes, suspect, alone = taken["crashes"], taken.get("suspect"), taken.get("alone", 0)
                    previous = lease["owner"] if crashes > lease["crashes"] else None
                    grant = Grant(stream, lease["shard"], worker, taken["token"], crashes, suspect, alone, previous)
                    grants.append(grant)
                    self._sessions.keep(grants[-1], settling)
        return grants

    async def _take_one(self, lease: Document, change: Document, session: Session) -> Document | None:
        """The lease after the change; None: another worker was faster."""
        seen = {"stream": lease["stream"], "shard": lease["shard"], "token": lease["token"], **FREE}

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
        # A live settle would be done by now: its worker has left it open.
        await self._sessions.end_left_open(lease)
        return await take()

    async def owned(self, grants: Sequence[Grant], session: Session) -> Sequence[Grant]:
        """The grants that still own their shard, asked by one command. All are of one stream."""
        found = self._db.collection("lease").find(_leases_of(grants), _OWNED, session=session)
        return _valid(grants, await found.to_list())

    async def served(self, grants: Sequence[Grant], session: Session) -> Sequence[Grant]:
        """As ``owned``; none while the stream is paused."""
        leases, stopped = self.asked(grants)
        ask = [*leases["$unionWith"]["pipeline"], stopped]
        found = await (await self._db.collection("lease").aggregate(ask, session=session)).to_list()
        return self.answered(grants, found)

    def asked(self, grants: Sequence[Grant]) -> Sequence[Document]:
        """The stages that add the answer to another question."""
        leases = [{"$match": _leases_of(grants)}, {"$project": _OWNED}]
        stopped = [{"$match": {"_id": grants[0].stream, "paused": True}}, {"$project": {"_id": 0, "paused": 1}}]
        return [
            {"$unionWith": {"coll": self._db.names["lease"], "pipeline": leases}},
            {"$unionWith": {"coll": self._db.names["stream"], "pipeline": stopped}},
        ]

    def answered(self, grants: Sequence[Grant], found: Sequence[Document]) -> Sequence[Grant]:
        """The grants that ``served`` returns, from the documents of ``asked``."""
        return [] if any("paused" in row for row in found) else _valid(grants, found)

    async def renew(self, grants: Sequence[Grant], seconds: float) -> Collection[Grant]:
        change = [{"$set": {"lease_until": later(seconds)}}]
        if not grants:
            return []
        # One command, and not one updateMany: only updates of single documents are repeated after a lost connection.
        async with self._db.session() as session:
            each = [UpdateOne(fence(grant), change) for grant in grants]
            done = await self._db.collection("lease").bulk_write(each, session=session)
        if done.matched_count == len(grants):
            return grants
        held = [grant for grant in grants if await self._change(grant, change)]
        self._sessions.drop(set(grants) - set(held))
        return held

    async def give(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            await self._change(grant, _GIVEN)
        self._sessions.drop(grants)

    async def note_suspect(self, grant: Grant, event_id: UUID | None, alone: int = 0) -> None:
        noted: Document = {"$set": {"suspect": event_id, "alone": alone}}
        change: list[Document] = [{"$unset": ["suspect", "alone"]}] if event_id is None else [noted]
        if not await self._change(grant, change):
            raise lost(grant)

    async def set_crashes(self, grant: Grant, crashes: int) -> None:
        if not await self._change(grant, [{"$set": {"crashes": crashes}}, {"$unset": ["suspect", "alone"]}]):
            raise lost(grant)

    async def _change(self, grant: Grant, change: Sequence[Mapping[str, Any]]) -> bool:
        async with self._db.session() as session:
            done = await self._db.collection("lease").update_one(fence(grant), change, session=session)
        return bool(done.matched_count)


def _leases_of(grants: Sequence[Grant]) -> Document:
    return {"stream": grants[0].stream, "shard": {"$in": [grant.shard for grant in grants]}}


def _valid(grants: Sequence[Grant], leases: Sequence[Document]) -> Sequence[Grant]:
    """The grants whose token is in the leases that were read."""
    valid = {(lease["shard"], lease["token"], lease["owner"]) for lease in leases}
    return [grant for grant in grants if (grant.shard, grant.token, grant.worker) in valid]
