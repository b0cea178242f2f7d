"""Dead letters of consumers on MongoDB, and the processes of consumers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from pillarbox.errors import ConfigError
from pillarbox.event import Event, Status
from pillarbox.mongo.documents import (
    MAX_ERRORS,
    NEXT_SEQ,
    Document,
    error_history,
    identity,
    to_consumers_letter,
    to_event,
)
from pillarbox.store import ConsumerReport, ConsumerStatus, Failure, Ref, Replay
from pillarbox.stores._letters import entries, statuses, storable
from pillarbox.stores._tokens import new_token
from pillarbox.stores.mongo.database import MongoDatabase, Session
from pillarbox.stores.mongo.expressions import kept_error, later, literal, past

_NO_REPLAY: Final = ["replay_at", "lease_owner", "lease_until", "lease_token"]


class MongoConsumers:
    """Serves consumers, and the operator who decides about their dead letters."""

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database

    def _need_transactions(self) -> None:
        if not self._db.replicated:
            raise ConfigError(
                f"{self._db.outbox.description} is a standalone server, which has no transactions, and the dead "
                "letters of a consumer need them; make it a replica set (one node is enough)"
            )

    async def bury(self, consumer: str, failure: Failure, earlier: Sequence[Mapping[str, Any]] = ()) -> bool:
        self._need_transactions()
        event, error = storable(failure.event), kept_error(failure.error)
        mine = {"_id": identity(event.id, event.stream, consumer)}
        added = [{**entry, "error": kept_error(entry["error"])} for entry in entries(failure, earlier)]

        async def work(session: Session | None) -> bool:
            if not await self._count_as_applied(consumer, event, session, is_dead=True):
                return False
            letters = self._db.collection("dead_letter")
            letter = await letters.find_one(mine, {"errors": 1}, session=session)
            if letter is None:
                shards = self._db.outbox.shards
                letter = to_consumers_letter(event, shards, consumer, failure.attempts, error, added)
                # The first change of a new document, because only a plain insert gives it the server's seq.
                await letters.insert_one({**letter, "seq": NEXT_SEQ}, session=session)
            else:
                history = [*error_history(letter), *added][:MAX_ERRORS]
                change = {"attempts": failure.attempts, "error": literal(error), "errors": literal(history)}
                await letters.update_one(mine, [{"$set": change}, {"$unset": _NO_REPLAY}], session=session)
            # By the server's clock.
            await letters.update_one(mine, [{"$set": {"died_at": "$$NOW"}}], session=session)
            return True

        return await self._db.transact(work)

    async def _count_as_applied(self, consumer: str, event: Event, session: Session | None, *, is_dead: bool) -> bool:
        """False: it did already."""
        about = {"aggregate_id": event.aggregate_id, "aggregate_version": event.aggregate_version}
        return await self._add_to_inbox(consumer, event.id, about, session, is_dead=is_dead)

    async def _add_to_inbox(
        self, consumer: str, event_id: UUID, about: Mapping[str, Any], session: Session | None, *, is_dead: bool
    ) -> bool:
        fields: Document = {name: literal(value) for name, value in about.items() if value is not None}
        fields["processed_at"] = "$$NOW"
        if is_dead:
            fields["dead"] = True
        # An upsert: the error of a duplicate insert would end the transaction. A copy is left as it is.
        is_new = {"$eq": [{"$type": "$processed_at"}, "missing"]}
        change = {name: {"$cond": [is_new, value, f"${name}"]} for name, value in fields.items()}
        mine = {"_id": {"consumer": consumer, "event_id": event_id}}
        done = await self._db.collection("inbox").update_one(mine, [{"$set": change}], upsert=True, session=session)
        return done.upserted_id is not None

    async def take_replays(self, consumer: str, worker: str, limit: int, seconds: float) -> Sequence[Replay]:
        self._need_transactions()
        if limit <= 0:
            return []
        token = new_token()
        due = {"consumer": consumer, "replay_at": {"$exists": True}}
        free = {"$or": [{"lease_until": None}, past("lease_until")]}
        own: Document = {"lease_owner": literal(worker), "lease_token": token, "lease_until": later(seconds)}

        async def work(session: Session | None) -> list[Document]:
            letters = self._db.collection("dead_letter")
            found = letters.find({**due, **free}, sort=[("seq", 1)], limit=limit, batch_size=8, session=session)
            taken = [letter async for letter in found]
            if taken:
                mine = {"_id": {"$in": [letter["_id"] for letter in taken]}}
                await letters.update_many(mine, [{"$set": own}], session=session)
            return taken

        return [
            Replay(to_event(letter, Status.PENDING)._replace(attempts=0), letter["error"], token)
            for letter in await self._db.transact(work)
        ]

    async def finish_replay(self, consumer: str, replay: Replay) -> bool:
        self._need_transactions()
        event = replay.event
        mine = {"_id": identity(event.id, event.stream, consumer), "lease_token": replay.token}

        async def work(session: Session | None) -> bool:
            done = await self._db.collection("dead_letter").delete_one(mine, session=session)
            if not done.deleted_count:
                return False
            await self._count_as_applied(consumer, event, session, is_dead=False)
            return True

        return await self._db.transact(work)

    async def replay(self, refs: Sequence[Ref], session: Session | None) -> list[Ref]:
        """Order the replay of these dead letters; returns those that there are."""
        found = await self._existing(refs, session)
        if found:
            mine = {"_id": {"$in": [identity(*ref) for ref in found]}}
            change = [{"$set": {"replay_at": "$$NOW"}}]
            await self._db.collection("dead_letter").update_many(mine, change, session=session)
            rows = {"_id": {"$in": [{"consumer": ref.consumer, "event_id": ref.id} for ref in found]}}
            await self._db.collection("inbox").delete_many(rows, session=session)
        return found

    async def discard(self, refs: Sequence[Ref], session: Session | None) -> list[Ref]:
        """Delete these dead letters; returns those that there were."""
        found = await self._existing(refs, session)
        if found:
            mine = {"_id": {"$in": [identity(*ref) for ref in found]}}
            await self._db.collection("dead_letter").delete_many(mine, session=session)
        for ref in found:
            # The row is missing if the letter waits for a replay.
            await self._add_to_inbox(ref.consumer, ref.id, {}, session, is_dead=True)
        return found

    async def _existing(self, refs: Sequence[Ref], session: Session | None) -> list[Ref]:
        if not refs:
            return []
        self._need_transactions()
        mine = {"_id": {"$in": [identity(*ref) for ref in refs]}}
        letters = self._db.collection("dead_letter").find(mine, {"_id": 1}, sort=[("seq", 1)], session=session)
        return [Ref(each["_id"]["id"], each["_id"]["stream"], each["_id"]["consumer"]) async for each in letters]

    async def report(self, consumer: str, worker: str, report: ConsumerReport, seconds: float) -> None:
        self._need_transactions()
        told = {name: literal(value) for name, value in report._asdict().items()}
        change = {**told, "seen_at": "$$NOW", "seen_until": later(seconds)}
        with self._db.commands():
            await self._db.collection("consumer").update_one(
                {"_id": _process(consumer, worker)}, [{"$set": change}], upsert=True
            )

    async def leave_consumer(self, consumer: str, worker: str) -> None:
        with self._db.commands():
            await self._db.collection("consumer").delete_one({"_id": _process(consumer, worker)})

    async def consumers(self) -> Sequence[ConsumerStatus]:
        with self._db.commands():
            rows = await self._db.collection("consumer").find(sort=[("_id", 1)]).to_list()
        now = await self._db.clock()
        return statuses(
            now,
            [
                (
                    row["_id"]["consumer"],
                    row["_id"]["name"],
                    row["seen_at"],
                    row["seen_until"],
                    ConsumerReport(*(row[name] for name in ConsumerReport._fields)),
                )
                for row in rows
            ],
        )

    async def dead_count(self, consumer: str) -> int:
        with self._db.commands():
            return await self._db.collection("dead_letter").count_documents({"consumer": consumer})

    async def dead_consumers(self) -> Mapping[str, int]:
        group: list[Document] = [
            {"$match": {"consumer": {"$gt": ""}}},
            {"$group": {"_id": "$consumer", "count": {"$sum": 1}}},
        ]
        with self._db.commands():
            groups = await self._db.collection("dead_letter").aggregate(group)
            return {each["_id"]: each["count"] async for each in groups}


def _process(consumer: str, worker: str) -> Document:
    return {"consumer": consumer, "name": worker}
