"""Queue streams on MongoDB: events that are leased one by one."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from bson import ObjectId
from pymongo import DeleteOne, UpdateOne

from pillarbox.event import Status
from pillarbox.mongo.documents import Document, identity, readable
from pillarbox.store import CRASHES_ALONE, Claim, ClaimResults, Failure, Rescued
from pillarbox.stores._errors import CRASHED, DEAD_OF_CRASHES, error_entry
from pillarbox.stores._tokens import new_token
from pillarbox.stores.mongo.database import MongoDatabase, Session
from pillarbox.stores.mongo.dead_letters import DeadLetters, Death, deaths
from pillarbox.stores.mongo.expressions import failed, history, later, literal, past

_LEASE: Final = ("lease_owner", "lease_until", "claim")
_PENDING: Final[Document] = {"status": "pending"}
_SUSPECT: Final[Document] = {"status": "failed", "suspect": {"$gt": 0}, **past("next_attempt_at")}
_PUBLISHED: Final[Document] = {
    "$set": {"status": "published"},
    "$currentDate": {"published_at": True},
    "$unset": dict.fromkeys((*_LEASE, "suspect"), ""),
}
# A suspect stays one: it has not run alone to the end.
_REFUNDED: Final[list[Document]] = [
    {
        "$set": {
            "status": {"$cond": [{"$gt": ["$suspect", 0]}, "failed", "pending"]},
            "next_attempt_at": {"$cond": [{"$gt": ["$suspect", 0]}, "$$NOW", "$$REMOVE"]},
            "attempts": {"$subtract": ["$attempts", 1]},
        }
    },
    {"$unset": list(_LEASE)},
]


def _claimed(worker: str, seconds: float, mark: ObjectId) -> Document:
    return {
        "status": "processing",
        "attempts": {"$add": [{"$cond": [{"$isNumber": "$attempts"}, "$attempts", 0]}, 1]},
        "next_attempt_at": "$$REMOVE",
        "lease_owner": literal(worker),
        "lease_token": new_token(),
        "lease_until": later(seconds),
        "processing_started_at": "$$NOW",
        "claim": mark,
    }


def _rescued(attempts: int, crashes: int) -> list[Document]:
    change = {
        "status": "failed",
        "attempts": attempts,
        "suspect": crashes,
        "lease_token": 0,
        "next_attempt_at": "$$NOW",
        "last_error": CRASHED,
        "last_error_at": "$$NOW",
        "errors": history(error_entry(CRASHED, attempts)),
    }
    return [{"$set": change}, {"$unset": list(_LEASE)}]


def _held(event_id: Document, token: int) -> Document:
    """The condition that this lease of an event still counts."""
    return {"_id": event_id, "status": "processing", "lease_token": token}


def _held_by(claim: Claim) -> Document:
    return _held(identity(claim.event.id, claim.event.stream), claim.token)


class MongoClaims:
    """Serves workers of queue streams."""

    def __init__(self, database: MongoDatabase, dead_letters: DeadLetters) -> None:
        self._db = database
        self._dead_letters = dead_letters
        # Stream and mark of claims whose answer was lost.
        self._unanswered: dict[str, dict[ObjectId, list[Any]]] = {}

    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        if limit <= 0:
            return []
        if shard is None:
            ready, order, limit = _SUSPECT, "next_attempt_at", 1
            where = {"stream": stream, **ready}
        else:
            ready, order = _PENDING, "seq"
            where = {"stream": stream, "shard": shard, **ready}
        await self._give_back_unanswered(stream)
        events = self._db.collection("event")
        # Two workers can ask for the same events. The mark shows which events this claim got.
        mark = ObjectId()
        async with self._db.session() as session:
            cursor = events.find(where, {"_id": 1}, sort=[(order, 1)], limit=limit, session=session)
            ids = [document["_id"] async for document in cursor]
            if not ids:
                return []
            change = [{"$set": _claimed(worker, seconds, mark)}]
            try:
                await events.update_many({"_id": {"$in": ids}, **ready}, change, session=session)
                claimed = await events.find({"_id": {"$in": ids}, "claim": mark}, session=session).to_list()
            except BaseException:
                self._unanswered.setdefault(stream, {})[mark] = ids
                raise
        claims = []
        for document in claimed:
            (event,), reason = readable([document], Status.PROCESSING)
            claims.append(Claim(event, document["lease_token"], reason))
        return sorted(claims, key=lambda claim: claim.event.seq)

    async def _give_back_unanswered(self, stream: str) -> None:
        """Refund claims whose answer was lost. Nobody works on them, and their leases may be long."""
        for mark, ids in list(self._unanswered.get(stream, {}).items()):
            mine = {"_id": {"$in": ids}, "status": "processing", "claim": mark}
            async with self._db.session() as session:
                await self._db.collection("event").update_many(mine, _REFUNDED, session=session)
            self._unanswered[stream].pop(mark, None)

    async def renew_claims(self, claims: Sequence[Claim], seconds: float) -> Collection[UUID]:
        events = self._db.collection("event")
        change = [{"$set": {"lease_until": later(seconds)}}]
        held = []
        with self._db.commands():
            for claim in claims:
                done = await events.update_one(_held_by(claim), change)
                if done.matched_count:
                    held.append(claim.event.id)
        return held

    async def settle_claims(self, claims: Sequence[Claim], results: ClaimResults) -> int:
        """Settle each event by itself, by its token. Only a death changes two documents, in a transaction."""
        held = {claim.event.id: _held_by(claim) for claim in claims}
        changes: list[UpdateOne | DeleteOne] = []
        for event in results.published:
            mine = held[event.id]
            changes.append(UpdateOne(mine, _PUBLISHED) if results.keep_published else DeleteOne(mine))
        without_lease: Document = {"$unset": [*_LEASE, "suspect"]}
        changes += [UpdateOne(held[each.event.id], [*failed(each), without_lease]) for each in results.failed]
        changes += [UpdateOne(held[event.id], _REFUNDED) for event in results.refund]
        settled = 0
        if changes:
            async with self._db.session() as session:
                done = await self._db.collection("event").bulk_write(changes, ordered=False, session=session)
            settled = done.matched_count + done.deleted_count
        if results.dead:

            async def work(session: Session | None) -> int:
                return await self._move_to_dead(results.dead, held, session)

            settled += await self._db.transact(work)
        return len(changes) + len(results.dead) - settled

    async def _move_to_dead(
        self, failures: Sequence[Failure], held: Mapping[UUID, Document], session: Session | None
    ) -> int:
        mine = {"$or": [held[failure.event.id] for failure in failures]}
        found = self._db.collection("event").find(mine, {"_id": 1}, session=session)
        ids = {document["_id"]["id"] async for document in found}
        dying = deaths(failure for failure in failures if failure.event.id in ids)
        await self._dead_letters.move_to_dead(failures[0].event.stream, dying, session)
        return len(dying)

    async def rescue(self, stream: str, stuck_seconds: float, limit: int) -> Rescued:
        if limit <= 0:
            return Rescued(0, 0)

        async def work(session: Session | None) -> Rescued:
            return await self._rescue(stream, stuck_seconds, limit, session)

        return await self._db.transact(work)

    async def _rescue(self, stream: str, stuck_seconds: float, limit: int, session: Session | None) -> Rescued:
        events = self._db.collection("event")
        over = [past("lease_until"), past("processing_started_at", stuck_seconds)]
        where = {"stream": stream, "status": "processing", "$or": over}
        fields = {"attempts": 1, "suspect": 1, "lease_token": 1}
        changes: list[UpdateOne] = []
        dying: dict[UUID, Death] = {}
        async for stuck in events.find(
            where, fields, sort=[("lease_until", 1)], limit=limit, hint="leased", session=session
        ):
            # The attempt is refunded. A suspect was alone in all crashes but the first.
            attempts, crashes = stuck["attempts"] - 1, stuck.get("suspect", 0)
            if crashes < CRASHES_ALONE:
                change = _rescued(attempts, crashes + 1)
                changes.append(UpdateOne(_held(stuck["_id"], stuck["lease_token"]), change))
            else:
                dying[stuck["_id"]["id"]] = (attempts, DEAD_OF_CRASHES)
        if changes:
            await events.bulk_write(changes, session=session)
        await self._dead_letters.move_to_dead(stream, dying, session)
        return Rescued(len(changes), len(dying))
