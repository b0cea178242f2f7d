"""Ordered streams on MongoDB: shards that are owned, and turns on them."""

from collections.abc import Collection as Several
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pymongo import ReturnDocument, UpdateOne
from pymongo.errors import BulkWriteError, PyMongoError

from pillarbox.errors import LeaseLost
from pillarbox.event import Event, Status
from pillarbox.store import PARKED, Aside, Failure, Grant, KeyRun, Settlement, Work
from pillarbox.stores._errors import error_entry, keepable
from pillarbox.stores.mongo.collections import (
    WAITING,
    CollectionsPart,
    history,
    later,
    later_or_never,
    literal,
    past,
    status_of,
)
from pillarbox.stores.mongo.database import Session
from pillarbox.stores.mongo.documents import Document, from_ids, to_dead_letter, to_event
from pillarbox.stores.mongo.settling import SettlingSessions

_LONG_AGO_SECONDS: Final = 86_400.0
# So many of the oldest events tell which shards have work; only behind more than these a shard can be hidden.
_POLLED: Final = 64
_USUAL_BYTES: Final = 1000.0
_FREE: Final[Document] = {"$or": [{"owner": None}, {"$expr": {"$lt": ["$lease_until", "$$NOW"]}}]}


def fence(grant: Grant) -> Document:
    """The condition that proves ownership."""
    return {"stream": grant.stream, "shard": grant.shard, "token": grant.token, "owner": grant.worker}


def lost(grant: Grant) -> LeaseLost:
    return LeaseLost(f"worker {grant.worker} no longer owns shard {grant.shard} of stream '{grant.stream}'")


class OrderedPart(CollectionsPart):
    """The part of a store on MongoDB that serves ordered streams."""

    _announced: set[str]
    _settling: SettlingSessions
    _event_bytes: float = _USUAL_BYTES  # of late, with all that is in a document

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
            if any(each["code"] != 11000 for each in error.details["writeErrors"]):
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
            "session": "$$REMOVE",
        }
        async with self._db.session() as session:
            leases = self._db.collection("lease")
            free = await leases.find({"stream": stream, **_FREE}, session=session).sort("shard").to_list()
            for lease in free:
                if len(grants) == limit:
                    break
                if lease["owner"] is not None:
                    await self._settling.end_left_open(lease)
                seen = {"stream": stream, "shard": lease["shard"], "token": lease["token"], **_FREE}
                try:
                    taken = await leases.find_one_and_update(
                        seen, [{"$set": change}], return_document=ReturnDocument.AFTER, session=session
                    )
                except PyMongoError:
                    # What was taken before it must be worked: else it waits for its lease to end, with an owner.
                    if not grants:
                        raise
                    break
                if taken is not None:
                    count, suspect = taken["unclean_count"], taken.get("suspect")
                    grants.append(Grant(stream, lease["shard"], worker, taken["token"], count, suspect))
        return grants

    async def renew(self, grants: Sequence[Grant], seconds: float) -> Several[Grant]:
        change = [{"$set": {"lease_until": later(seconds)}}]
        return [grant for grant in grants if await self._change_lease(grant, change)]

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

    async def trust(self, grant: Grant) -> None:
        if not await self._change_lease(grant, [{"$set": {"unclean_count": 0}}, {"$unset": "suspect"}]):
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

    async def keys_aside(self, grant: Grant) -> Several[str]:
        async with self._db.session() as session:
            where = {"stream": grant.stream, "shard": grant.shard}
            found = self._db.collection("blocked_key").find(where, {"_id": 0, "key": 1}, session=session)
            return {row["key"] async for row in found}

    async def read(self, grant: Grant, limit: int, max_bytes: int) -> Sequence[Event]:
        if limit <= 0:
            return []
        where = {"stream": grant.stream, "shard": grant.shard, "status": "pending"}
        async with self._db.session() as session:
            documents = await self._documents(where, "ready", limit, max_bytes, session)
            # Asked afterwards: who holds the lease now has held it while these were read.
            if documents and not await self._owns(grant, session):
                return []
        return [to_event(document, Status.PENDING) for document in documents]

    async def _owns(self, grant: Grant, session: Session) -> bool:
        return await self._db.collection("lease").find_one(fence(grant), {"_id": 1}, session=session) is not None

    async def _documents(
        self, where: Document, index: str, limit: int, max_bytes: int, session: Session
    ) -> list[Document]:
        """In order of seq, at most so many bytes of payload; at least one if there is any, whatever its size."""
        # A reply has up to 16 MB: no more of it is asked for than is likely to be used.
        likely = max(1, min(limit, int(1.25 * max_bytes / self._event_bytes)))
        cursor = self._db.steady("event").find(
            where, sort=[("seq", 1)], limit=limit, batch_size=likely, hint=index, session=session
        )
        found: list[Document] = []
        total = 0
        async with cursor:
            while page := await cursor.to_list(likely):
                for document in page:
                    total += len(document["payload"])
                    if found and total > max_bytes:
                        return found
                    found.append(document)
                self._event_bytes = max(_USUAL_BYTES, total / len(found))
                if len(page) < likely:
                    break
        return found

    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        if limit <= 0:
            return None
        mine = {"stream": grant.stream, "shard": grant.shard}
        async with self._db.session() as session:
            due = await self._db.collection("blocked_key").find_one(
                {**mine, **past("next_attempt_at")}, sort=[("next_attempt_at", 1)], session=session
            )
            if due is None:
                return None
            where = {**mine, "key": due["key"], "status": {"$in": ["failed", "held"]}}
            documents = await self._documents(where, "aside", limit, max_bytes, session)
            if not await self._owns(grant, session):
                return None
        events = [to_event(document, status_of(document)) for document in documents]
        return KeyRun(due["key"], Aside(due["mode"]), events, due.get("dead_head"))

    async def settle(self, grant: Grant, settlement: Settlement) -> Several[str]:
        async def work(session: Session | None) -> Several[str]:
            # First, and a change: a take-over meets it and one of the two gives way; only reading would let both pass.
            held = await self._db.collection("lease").update_one(fence(grant), {"$inc": {"turns": 1}}, session=session)
            if not held.matched_count:
                raise lost(grant)
            return await self._settle(grant, settlement, session)

        try:
            return await self._settling.transact(grant, fence(grant), work)
        except LeaseLost:
            self._settling.drop([grant])
            raise

    async def _settle(self, grant: Grant, settlement: Settlement, session: Session | None) -> Several[str]:
        place = {"stream": grant.stream, "shard": grant.shard}
        # The keys first: an operator who replays at this moment is met there.
        keys = {event.key for event in settlement.held if event.key is not None}
        keys |= settlement.aside.keys() | set(settlement.release)
        modes = await self._lock_keys(place, sorted(keys), session) if keys else {}
        parked = [event for event in settlement.held if modes.get(event.key or "") == Aside.PARKED]
        held = [event.id for event in settlement.held if event.key in modes and modes[event.key] != Aside.PARKED]
        # On a server without transactions a key must be known as set aside before its head is seen as failed.
        for key, aside in settlement.aside.items():
            await self._set_aside(place, key, aside.mode, aside.delay, aside.dead_head, session)
            modes[key] = aside.mode
        await self._publish(settlement, session)
        await self._fail(settlement.failed, session)
        await self._bury([*settlement.dead, *(Failure(event, PARKED, event.attempts) for event in parked)], session)
        if held:
            await self._db.collection("event").update_many(
                {"_id": {"$in": held}, "status": "pending"}, {"$set": {"status": "held"}}, session=session
            )
        for key in settlement.release:
            if await self._release_key(place, key, session):
                modes.pop(key, None)
        return modes.keys()

    async def _lock_keys(self, place: Document, keys: Sequence[str], session: Session | None) -> dict[str, Aside]:
        """The keys that are set aside; whoever changes one changes its document first, so that two give way."""
        where = {**place, "key": {"$in": list(keys)}}
        blocked = self._db.collection("blocked_key")
        await blocked.update_many(where, {"$inc": {"changes": 1}}, session=session)
        found = await blocked.find(where, {"key": 1, "mode": 1}, session=session).to_list()
        return {row["key"]: Aside(row["mode"]) for row in found}

    async def _set_aside(
        self, place: Document, key: str, mode: Aside, delay: float | None, dead_head: Any, session: Session | None
    ) -> None:
        head = "$$REMOVE" if dead_head is None else dead_head
        change = {"mode": mode.value, "next_attempt_at": later_or_never(delay), "dead_head": head}
        await self._db.collection("blocked_key").update_one(
            {**place, "key": key}, [{"$set": change}], upsert=True, session=session
        )

    async def _release_key(self, place: Document, key: str, session: Session | None) -> bool:
        where = {**place, "key": key}
        waits = {**where, "status": {"$in": ["failed", "held"]}}
        if await self._db.collection("event").find_one(waits, {"_id": 1}, hint="aside", session=session):
            return False
        done = await self._db.collection("blocked_key").delete_one({**where, "mode": "retry"}, session=session)
        return bool(done.deleted_count)

    async def _publish(self, settlement: Settlement, session: Session | None) -> None:
        if not settlement.published:
            return
        # An event's state is checked, so that doing it twice changes nothing.
        where = {"_id": {"$in": from_ids(settlement.published)}, "status": {"$in": WAITING}}
        events = self._db.collection("event")
        if settlement.keep_published:
            change: Document = {
                "$set": {"status": "published"},
                "$currentDate": {"published_at": True},
                "$inc": {"attempts": 1},
            }
            await events.update_many(where, change, session=session)
        else:
            await events.delete_many(where, session=session)

    async def _fail(self, failures: Sequence[Failure], session: Session | None) -> None:
        if not failures:
            return
        changes = []
        for failure in failures:
            error = keepable(failure.error)
            repeated = {"$and": [{"$eq": ["$status", "failed"]}, {"$eq": ["$attempts", failure.attempts]}]}
            errors = {"$cond": [repeated, "$errors", history(error_entry(error, failure.attempts))]}
            change = {
                "status": "failed",
                "attempts": failure.attempts,
                "next_attempt_at": later_or_never(failure.delay),
                "last_error": literal(error),
                "last_error_at": "$$NOW",
                "errors": errors,
            }
            where = {"_id": failure.event.id, "status": {"$in": WAITING}}
            changes.append(UpdateOne(where, [{"$set": change}]))
        await self._db.collection("event").bulk_write(changes, session=session)

    async def _bury(self, failures: Sequence[Failure], session: Session | None) -> None:
        if failures:
            rows = {failure.event.id: (failure.attempts, keepable(failure.error)) for failure in failures}
            await self._bury_rows(rows, session)

    async def _bury_rows(self, rows: Mapping[Any, tuple[int, str]], session: Session | None) -> None:
        """Move events to the dead letters. An id that died before and was written again has one, the new one."""
        events = self._db.collection("event")
        where = {"_id": {"$in": list(rows)}, "status": {"$ne": "published"}}
        letters = []
        # One at a time: each may have 16 MB.
        async for document in events.find(where, session=session, batch_size=8):
            attempts, error = rows[document["_id"]]
            letter = to_dead_letter(document, attempts, error, [error_entry(error, attempts)])
            change = {"$replaceWith": {"$mergeObjects": [literal(letter), {"died_at": "$$NOW"}]}}
            letters.append(UpdateOne({"_id": document["_id"]}, [change], upsert=True))
        if letters:
            await self._db.collection("dead_letter").bulk_write(letters, session=session)
            await events.delete_many(where, session=session)

    async def promote(self, stream: str, limit: int) -> int:
        if limit <= 0:
            return 0
        events = self._db.collection("event")
        due = {**past("next_attempt_at"), "status": {"$in": ["scheduled", "failed"]}, "suspect": {"$ne": True}}
        oldest = [("next_attempt_at", 1)]
        async with self._db.session() as session:
            cursor = events.find({"stream": stream, **due}, {"_id": 1}, sort=oldest, limit=limit, session=session)
            found = [document["_id"] async for document in cursor]
            if not found:
                return 0
            change = {"$set": {"status": "pending"}, "$unset": {"next_attempt_at": ""}}
            done = await events.update_many({"_id": {"$in": found}, **due}, change, session=session)
        return done.modified_count
