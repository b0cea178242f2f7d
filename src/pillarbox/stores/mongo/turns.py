"""Turns on MongoDB: reads and settles of shards that are owned."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final
from uuid import UUID

from pymongo import UpdateOne
from pymongo.asynchronous.command_cursor import AsyncCommandCursor
from pymongo.asynchronous.cursor import AsyncCursor

from pillarbox.batch import Part
from pillarbox.errors import LeaseLost
from pillarbox.event import Status
from pillarbox.mongo.documents import Document, identities, identity, readable
from pillarbox.store import PARKED, Failure, Grant, HoldMode, KeyRun, Progress, Settlement
from pillarbox.store.ticket import Ticket, unsettled
from pillarbox.stores.mongo.database import MongoDatabase, Session
from pillarbox.stores.mongo.dead_letters import DeadLetters, deaths
from pillarbox.stores.mongo.expressions import failed, past
from pillarbox.stores.mongo.held_keys import WAITS_FOR_KEY, HeldKeys
from pillarbox.stores.mongo.leases import Leases, fence
from pillarbox.stores.mongo.marks import Marks, mark, only_marks
from pillarbox.stores.mongo.settling import SettlingSessions
from pillarbox.stores.outbox_info import lost

_USUAL_BYTES: Final = 1000.0
# The states from which a settle moves an event. A settle that is run again finds others and changes nothing.
_UNSETTLED: Final[Document] = {"status": {"$in": ["pending", "failed", "held"]}}
_IN_ORDER: Final = [("shard", 1), ("seq", 1)]
_ANSWERS: Final = 100  # leases that fit into a page beside the events; there are usually 16


class MongoTurns:
    """Serves workers of ordered streams."""

    def __init__(
        self,
        database: MongoDatabase,
        sessions: SettlingSessions,
        leases: Leases,
        marks: Marks,
        held_keys: HeldKeys,
        dead_letters: DeadLetters,
    ) -> None:
        self._db = database
        self._sessions = sessions
        self._leases = leases
        self._marks = marks
        self._held_keys = held_keys
        self._dead_letters = dead_letters
        self._event_bytes = _USUAL_BYTES  # the size of a payload, as the last read found it
        self.take, self.renew, self.give = leases.take, leases.renew, leases.give
        self.note_suspect, self.set_crashes = leases.note_suspect, leases.set_crashes

    async def held_keys(self, grant: Grant) -> Collection[str]:
        async with self._db.session() as session:
            found = self._db.collection("held_key").find(_shard(grant), {"_id": 0, "key": 1}, session=session)
            return {row["key"] async for row in found}

    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        if limit <= 0 or not grants:
            return []
        pending = {"stream": grants[0].stream, "shard": {"$in": [grant.shard for grant in grants]}, "status": "pending"}
        async with self._db.session() as session:
            # Shards that share a turn have few events, and a command costs more than these: one asks for all.
            also = self._leases.asked(grants) if len(grants) > 1 else ()
            documents, answers = await self._documents(pending, "ready", limit, max_bytes, session, also)
            if not documents:
                return []
            shards: dict[int, list[Document]] = {}
            for document in documents:
                shards.setdefault(document["shard"], []).append(document)
            found = [grant for grant in grants if grant.shard in shards]
            # With or after the events: a lease that is valid then was valid while they were read.
            owned = self._leases.answered(found, answers) if answers else await self._leases.served(found, session)
        parts = []
        for grant in owned:
            events, reason = readable(shards[grant.shard], Status.PENDING)
            parts.append(Part(grant.shard, grant.token, events, unreadable=reason))
        return parts

    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        if limit <= 0:
            return None
        async with self._db.session() as session:
            due = await self._db.collection("held_key").find_one(
                {**_shard(grant), **past("next_attempt_at")}, sort=[("next_attempt_at", 1)], session=session
            )
            if due is None:
                return None
            waiting = {**_shard(grant), "key": due["key"], **WAITS_FOR_KEY}
            documents, _ = await self._documents(waiting, "held", limit, max_bytes, session)
            if not await self._leases.owned([grant], session):
                return None
        events, reason = readable(documents, None)
        return KeyRun(due["key"], HoldMode(due["mode"]), events, due.get("dead_head"), unreadable=reason)

    async def _documents(
        self, where: Document, index: str, limit: int, max_bytes: int, session: Session, also: Sequence[Document] = ()
    ) -> tuple[list[Document], list[Document]]:
        """Events in order of shard and seq, with up to ``max_bytes`` of payload; at least one, of any size.

        also: the stages of a second question. Its answers have no ``_id``; there are none if the events were cut."""
        # A page can have 16 MB: ask only for as much as is likely to be used.
        likely = max(1, min(limit, int(1.25 * max_bytes / self._event_bytes)))
        events = self._db.snapshot("event")
        cursor: AsyncCursor[Document] | AsyncCommandCursor[Document]
        if also:
            likely += _ANSWERS
            ask: list[Document] = [{"$match": where}, {"$sort": dict(_IN_ORDER)}, {"$limit": limit}, *also]
            cursor = await events.aggregate(ask, batchSize=likely, hint=index, session=session)
        else:
            cursor = events.find(where, sort=_IN_ORDER, limit=limit, batch_size=likely, hint=index, session=session)
        found: list[Document] = []
        answers: list[Document] = []
        total = 0
        async with cursor:
            while page := await cursor.to_list(likely):
                for document in page:
                    if "_id" not in document:
                        answers.append(document)
                        continue
                    payload = document.get("payload")
                    total += len(payload) if isinstance(payload, bytes) else 0
                    if found and total > max_bytes:
                        return found, []
                    found.append(document)
                self._event_bytes = max(_USUAL_BYTES, total / max(1, len(found)))
                if len(page) < likely:
                    break
        return found, answers

    async def settle(self, settlements: Sequence[Settlement]) -> Mapping[int, Collection[str]]:
        marks = [settlement for settlement in settlements if only_marks(settlement)]
        held: dict[int, Collection[str]] = dict.fromkeys(await self._marks.write(marks), ())
        for settlement in settlements:
            if not only_marks(settlement):
                with suppress(LeaseLost):
                    held[settlement.grant.shard] = await self._settle_shard(settlement)
        return held

    async def _settle_shard(self, settlement: Settlement) -> Collection[str]:
        grant = settlement.grant

        async def work(session: Session | None) -> Collection[str]:
            # First, and as a change: a take-over changes the same document, so the two conflict. With a read both would
            # pass.
            owned = fence(grant)
            change: Document = {"$inc": {"turns": 1}}
            if settlement.ticket:
                batch, before, _ = Ticket.read(settlement.ticket)
                owned["settled_batch"], change["$set"] = {"$in": [before, batch]}, {"settled_batch": batch}
            held = await self._db.collection("lease").update_one(owned, change, session=session)
            if not held.matched_count:
                raise lost(grant)
            return await self._settle(settlement, session)

        try:
            return await self._sessions.transact(grant, fence(grant), work)
        except LeaseLost:
            self._sessions.drop([grant])
            raise

    async def settle_ticket(self, grant: Grant, ticket: bytes, *, keep_published: bool = True) -> Progress:
        async def work(session: Session | None) -> Progress:
            leases, events = self._db.collection("lease"), self._db.collection("event")
            lease = await leases.find_one_and_update(fence(grant), {"$inc": {"turns": 1}}, session=session)
            if lease is None:
                raise lost(grant)
            settled = lease.get("settled_batch")
            todo = unsettled(ticket, settled, grant)
            if todo is None:
                return Progress(settled)
            mine = {"_id": {"$in": [identity(each, grant.stream) for each in todo.ids]}}
            found = await events.find(mine, {"_id": 1}, session=session).to_list()
            present = {each["_id"]["id"] for each in found}
            changed = await mark(events, {**mine, **_UNSETTLED}, session, keep=keep_published)
            await leases.update_one(fence(grant), {"$set": {"settled_batch": todo.batch}}, session=session)
            return Progress(todo.batch, changed, tuple(each for each in todo.ids if each not in present))

        try:
            return await self._sessions.transact(grant, fence(grant), work)
        except LeaseLost:
            self._sessions.drop([grant])
            raise

    async def settled_batch(self, grant: Grant) -> UUID | None:
        async with self._db.session() as session:
            lease = await self._db.collection("lease").find_one(fence(grant), {"settled_batch": 1}, session=session)
        if lease is None:
            raise lost(grant)
        found: UUID | None = lease.get("settled_batch")
        return found

    async def _settle(self, settlement: Settlement, session: Session | None) -> Collection[str]:
        """The keys of the settlement that are held now."""
        stream, place = settlement.grant.stream, _shard(settlement.grant)
        # Held keys first: an operator who replays now changes the same documents.
        named = {event.key for event in settlement.held if event.key is not None}
        named |= settlement.hold_keys.keys() | set(settlement.release_keys)
        modes = await self._held_keys.lock(place, named, session)
        parked = [event for event in settlement.held if modes.get(event.key or "") == HoldMode.PARKED]
        held = [event for event in settlement.held if event.key in modes and modes[event.key] != HoldMode.PARKED]
        # Without transactions a key must be held before its head is marked as failed.
        passed = await self._passed(settlement, session)
        for key, hold in settlement.hold_keys.items():
            if key not in passed:
                await self._held_keys.hold(place, key, hold, session)
                modes[key] = hold.mode
        events = self._db.collection("event")
        if settlement.published:
            mine = {"_id": identities(settlement.published, stream), **_UNSETTLED}
            await mark(events, mine, session, keep=settlement.keep_published)
        if settlement.failed:
            changes = [
                UpdateOne({"_id": identity(failure.event.id, stream), **_UNSETTLED}, failed(failure))
                for failure in settlement.failed
            ]
            await events.bulk_write(changes, session=session)
        dying = [*settlement.dead, *(Failure(event, PARKED, event.attempts) for event in parked)]
        await self._dead_letters.move_to_dead(stream, deaths(dying), session)
        if held:
            pending = {"_id": identities(held, stream), "status": "pending"}
            await events.update_many(pending, {"$set": {"status": "held"}}, session=session)
        for key in settlement.release_keys:
            if await self._held_keys.release(place, key, session):
                modes.pop(key, None)
        return modes.keys()

    async def _passed(self, settlement: Settlement, session: Session | None) -> Collection[str]:
        """The keys to hold whose head is not there any more: the last owner has marked it as published, or an operator
        has acted on it. Nothing would release such a key."""
        own = {failure.event.id: failure.event.key for failure in (*settlement.failed, *settlement.dead)}
        heads = {key: {hold.dead_head} - {None} for key, hold in settlement.hold_keys.items()}
        for event_id, key in own.items():
            if key in heads:
                heads[key].add(event_id)
        wanted = [identity(head, settlement.grant.stream) for some in heads.values() for head in some if head]
        if not wanted:
            return ()
        mine = {"_id": {"$in": wanted}}
        waiting = self._db.collection("event").find({**mine, **_UNSETTLED}, {"_id": 1}, session=session)
        dead = self._db.collection("dead_letter").find(mine, {"_id": 1}, session=session)
        # A head that waits and is not in this settlement was replayed.
        there = {each["_id"]["id"] for each in await waiting.to_list()} & own.keys()
        there |= {each["_id"]["id"] for each in await dead.to_list()}
        return {key for key, some in heads.items() if not some <= there}


def _shard(grant: Grant) -> Document:
    return {"stream": grant.stream, "shard": grant.shard}
