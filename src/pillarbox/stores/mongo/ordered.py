"""Ordered streams on MongoDB: turns on the shards that are owned."""

from collections.abc import Collection as Several
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pymongo import UpdateOne

from pillarbox.errors import LeaseLost
from pillarbox.event import Event, Status
from pillarbox.store import PARKED, Aside, Failure, Grant, KeyRun, Settlement
from pillarbox.stores._errors import error_entry
from pillarbox.stores._outbox import lost
from pillarbox.stores.mongo.collections import WAITING, history, kept, later_or_never, literal, past, status_of
from pillarbox.stores.mongo.database import Session
from pillarbox.stores.mongo.documents import Document, from_ids, to_dead_letter, to_event
from pillarbox.stores.mongo.ownership import OwnershipPart, fence

_USUAL_BYTES: Final = 1000.0


class OrderedPart(OwnershipPart):
    """The part of a store on MongoDB that serves ordered streams."""

    _event_bytes: float = _USUAL_BYTES  # of late, with all that is in a document

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
            error = kept(failure.error)
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
            rows = {failure.event.id: (failure.attempts, kept(failure.error)) for failure in failures}
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
