"""Queue streams on MongoDB: events that are leased one by one."""

from collections.abc import Collection as Several
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from bson import ObjectId
from pymongo import DeleteOne, UpdateOne

from pillarbox.event import Status
from pillarbox.store import Claim, Failure, Rescued, Settlement
from pillarbox.stores._errors import CRASHED, error_entry
from pillarbox.stores.mongo.collections import history, kept, later, later_or_never, literal, past
from pillarbox.stores.mongo.database import Session
from pillarbox.stores.mongo.documents import Document, to_event
from pillarbox.stores.mongo.ordered import OrderedPart

_LEASE = ("lease_owner", "lease_until", "claim")
_PUBLISHED: Final[Document] = {
    "$set": {"status": "published"},
    "$currentDate": {"published_at": True},
    "$unset": dict.fromkeys((*_LEASE, "suspect"), ""),
}
# A suspect stays one: it has not yet been worked alone to the end.
_REFUNDED: Final[list[Document]] = [
    {
        "$set": {
            "status": {"$cond": [{"$eq": ["$suspect", True]}, "failed", "pending"]},
            "next_attempt_at": {"$cond": [{"$eq": ["$suspect", True]}, "$$NOW", "$$REMOVE"]},
            "attempts": {"$subtract": ["$attempts", 1]},
        }
    },
    {"$unset": list(_LEASE)},
]


class QueuePart(OrderedPart):
    """The part of a store on MongoDB that serves queue streams."""

    _unanswered: dict[str, dict[ObjectId, list[Any]]]  # by stream and mark: what was asked for

    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        if limit <= 0:
            return []
        events = self._db.collection("event")
        if shard is None:
            ready: Document = {"status": "failed", "suspect": True, **past("next_attempt_at")}
            sort, limit = "next_attempt_at", 1
            where = {"stream": stream, **ready}
        else:
            ready, sort = {"status": "pending"}, "seq"
            where = {"stream": stream, "shard": shard, **ready}
        await self._give_back_unanswered(stream)
        # Whoever comes first has an event; which of them those were, only this mark tells.
        mark = ObjectId()
        change = {
            "status": "processing",
            "attempts": {"$add": ["$attempts", 1]},
            "next_attempt_at": "$$REMOVE",
            "lease_owner": literal(worker),
            "lease_token": {"$add": [{"$ifNull": ["$lease_token", 0]}, 1]},
            "lease_until": later(seconds),
            "processing_started_at": "$$NOW",
            "claim": mark,
        }
        async with self._db.session() as session:
            cursor = events.find(where, {"_id": 1}, sort=[(sort, 1)], limit=limit, session=session)
            ids = [document["_id"] async for document in cursor]
            if not ids:
                return []
            try:
                await events.update_many({"_id": {"$in": ids}, **ready}, [{"$set": change}], session=session)
                claimed = await events.find({"_id": {"$in": ids}, "claim": mark}, session=session).to_list()
            except BaseException:
                self._unanswered.setdefault(stream, {})[mark] = ids
                raise
        claims = [Claim(to_event(each, Status.PROCESSING), each["lease_token"]) for each in claimed]
        return sorted(claims, key=lambda claim: claim.event.seq)

    async def _give_back_unanswered(self, stream: str) -> None:
        """A claim that was made, but whose answer was lost, would wait for the end of its lease with nobody at work."""
        for mark, ids in list(self._unanswered.get(stream, {}).items()):
            mine = {"_id": {"$in": ids}, "status": "processing", "claim": mark}
            async with self._db.session() as session:
                await self._db.collection("event").update_many(mine, _REFUNDED, session=session)
            self._unanswered[stream].pop(mark, None)

    async def renew_claims(self, claims: Sequence[Claim], seconds: float) -> Several[UUID]:
        events = self._db.collection("event")
        change = [{"$set": {"lease_until": later(seconds)}}]
        held = []
        with self._db.errors():
            for claim in claims:
                done = await events.update_one(_held(claim.event.id, claim.token), change)
                if done.matched_count:
                    held.append(claim.event.id)
        return held

    async def settle_claims(self, claims: Sequence[Claim], settlement: Settlement, refund: Sequence[UUID] = ()) -> int:
        """Each event by itself, by its token: only a death changes two documents at once."""
        held = {claim.event.id: _held(claim.event.id, claim.token) for claim in claims}
        changes: list[UpdateOne | DeleteOne] = []
        for event in settlement.published:
            where = held[event.id]
            changes.append(UpdateOne(where, _PUBLISHED) if settlement.keep_published else DeleteOne(where))
        changes += [UpdateOne(held[failure.event.id], _failed(failure)) for failure in settlement.failed]
        changes += [UpdateOne(held[event_id], _REFUNDED) for event_id in refund]
        settled = 0
        if changes:
            async with self._db.session() as session:
                done = await self._db.collection("event").bulk_write(changes, ordered=False, session=session)
            settled = done.matched_count + done.deleted_count
        if settlement.dead:

            async def work(session: Session | None) -> int:
                return await self._bury_claims(settlement.dead, held, session)

            settled += await self._db.transact(work)
        return len(changes) + len(settlement.dead) - settled

    async def _bury_claims(
        self, failures: Sequence[Failure], held: Mapping[UUID, Document], session: Session | None
    ) -> int:
        mine = {"$or": [held[failure.event.id] for failure in failures]}
        found = self._db.collection("event").find(mine, {"_id": 1}, session=session)
        ids = {document["_id"] async for document in found}
        await self._bury([failure for failure in failures if failure.event.id in ids], session)
        return len(ids)

    async def rescue(self, stream: str, stuck_seconds: float, max_attempts: int, limit: int) -> Rescued:
        if limit <= 0:
            return Rescued(0, 0)

        async def work(session: Session | None) -> Rescued:
            return await self._rescue(stream, stuck_seconds, max_attempts, limit, session)

        return await self._db.transact(work)

    async def _rescue(
        self, stream: str, stuck_seconds: float, max_attempts: int, limit: int, session: Session | None
    ) -> Rescued:
        events = self._db.collection("event")
        over = [past("lease_until"), past("processing_started_at", stuck_seconds)]
        where = {"stream": stream, "status": "processing", "$or": over}
        fields = {"attempts": 1, "max_attempts": 1, "suspect": 1, "lease_token": 1}
        changes: list[UpdateOne] = []
        dead: dict[Any, tuple[int, str]] = {}
        async for stuck in events.find(
            where, fields, sort=[("lease_until", 1)], limit=limit, hint="leased", session=session
        ):
            # Only a crash while it was worked alone is this event's own: else the attempt is given back.
            suspect = stuck.get("suspect", False)
            charged = stuck["attempts"] if suspect else stuck["attempts"] - 1
            if suspect and charged >= (stuck.get("max_attempts") or max_attempts):
                dead[stuck["_id"]] = (charged, CRASHED)
                continue
            change = {
                "status": "failed",
                "attempts": charged,
                "suspect": True,
                "next_attempt_at": "$$NOW",
                "lease_token": {"$add": ["$lease_token", 1]},
                "last_error": CRASHED,
                "last_error_at": "$$NOW",
                "errors": history(error_entry(CRASHED, charged)),
            }
            held = _held(stuck["_id"], stuck["lease_token"])
            changes.append(UpdateOne(held, [{"$set": change}, {"$unset": list(_LEASE)}]))
        if changes:
            await events.bulk_write(changes, session=session)
        if dead:
            await self._bury_rows(dead, session)
        return Rescued(len(changes), len(dead))


def _held(event_id: UUID, token: int) -> Document:
    return {"_id": event_id, "status": "processing", "lease_token": token}


def _failed(failure: Failure) -> list[Document]:
    error = kept(failure.error)
    change = {
        "status": "failed",
        "attempts": failure.attempts,
        "next_attempt_at": later_or_never(failure.delay),
        "last_error": literal(error),
        "last_error_at": "$$NOW",
        "errors": history(error_entry(error, failure.attempts)),
    }
    return [{"$set": change}, {"$unset": [*_LEASE, "suspect"]}]
