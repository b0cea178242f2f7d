"""Actions of operators on MongoDB."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pillarbox.event import Status
from pillarbox.mongo.documents import NEXT_SEQ, Document, from_dead_letter, identity
from pillarbox.store import Ref
from pillarbox.stores.mongo.consumers import MongoConsumers
from pillarbox.stores.mongo.database import MongoDatabase, Session
from pillarbox.stores.mongo.held_keys import HeldKeys
from pillarbox.stores.mongo.reentry import Reentry


class MongoOperator:
    """Pauses and resumes streams, replays and discards dead letters. Each action leaves an audit row."""

    def __init__(
        self, database: MongoDatabase, held_keys: HeldKeys, reentry: Reentry, consumers: MongoConsumers
    ) -> None:
        self._db = database
        self._consumers = consumers
        self._held_keys = held_keys
        self._reentry = reentry

    async def pause(self, stream: str, by: str) -> None:
        await self._set_paused(stream, True, "pause", by)

    async def resume(self, stream: str, by: str) -> None:
        await self._set_paused(stream, False, "resume", by)

    async def _set_paused(self, stream: str, paused: bool, action: str, by: str) -> None:
        async def work(session: Session | None) -> None:
            change = {"$set": {"paused": paused}}
            await self._db.collection("stream").update_one({"_id": stream}, change, upsert=True, session=session)
            await self._db.collection("audit").insert_one(_audit(by, action, stream), session=session)

        await self._db.transact(work)

    async def replay(self, refs: Sequence[Ref], by: str) -> int:
        of_relays, of_consumers = _parted(refs)

        async def work(session: Session | None) -> int:
            letters, held = await self._lock(of_relays, session)
            waiting = [from_dead_letter(letter, Status.FAILED) for letter in letters if _key(letter) in held]
            if waiting:
                await self._db.collection("event").insert_many(waiting, session=session)
            await self._reentry.revive([letter for letter in letters if _key(letter) not in held], session)
            again = await self._consumers.replay(of_consumers, session)
            return await self._finish(letters, "replay", by, session) + await self._note(again, "replay", by, session)

        return await self._db.transact(work)

    async def replay_published(self, refs: Sequence[Ref], by: str) -> int:
        async def work(session: Session | None) -> int:
            mine = {"_id": {"$in": [identity(ref.id, ref.stream) for ref in refs]}, "status": "published"}
            fields = {"seq": 1, "stream": 1, "shard": 1, "key": 1}
            found = self._db.collection("event").find(mine, fields, sort=[("seq", 1)], session=session)
            events = await found.to_list()
            if not events:
                return 0
            held = await self._held_among(events, session)
            await self._reentry.unpublish([(event, _key(event) in held) for event in events], session)
            sent_again = [Ref(event["_id"]["id"], event["stream"]) for event in events]
            await self._note(sent_again, "replay published", by, session)
            for event in events:
                if _key(event) in held:
                    place = {"stream": event["stream"], "shard": event["shard"]}
                    await self._held_keys.make_due(place, event["key"], event["_id"]["id"], session)
            return len(events)

        return await self._db.transact(work)

    async def discard(self, refs: Sequence[Ref], by: str) -> int:
        of_relays, of_consumers = _parted(refs)

        async def work(session: Session | None) -> int:
            letters, _ = await self._lock(of_relays, session)
            gone = await self._consumers.discard(of_consumers, session)
            return await self._finish(letters, "discard", by, session) + await self._note(gone, "discard", by, session)

        return await self._db.transact(work)

    async def _lock(self, refs: Sequence[Ref], session: Session | None) -> tuple[list[Document], set[Any]]:
        """These dead letters in order of seq, and which of their keys are held. From here on a settle of such a key
        conflicts with this transaction, and one of the two is run again."""
        mine = {"_id": {"$in": [identity(ref.id, ref.stream) for ref in refs]}}
        letters = await self._db.collection("dead_letter").find(mine, sort=[("seq", 1)], session=session).to_list()
        return letters, await self._held_among(letters, session)

    async def _held_among(self, documents: Sequence[Document], session: Session | None) -> set[Any]:
        """Which keys of these events or dead letters are held, with their streams."""
        keys: dict[tuple[str, int], set[str]] = defaultdict(set)
        for each in documents:
            if "key" in each:
                keys[each["stream"], each["shard"]].add(each["key"])
        held = set()
        for (stream, shard), named in sorted(keys.items()):
            place = {"stream": stream, "shard": shard}
            held |= {(stream, key) for key in await self._held_keys.lock(place, named, session)}
        return held

    async def _finish(self, letters: Sequence[Document], action: str, by: str, session: Session | None) -> int:
        if not letters:
            return 0
        await self._note([Ref(letter["_id"]["id"], letter["stream"]) for letter in letters], action, by, session)
        ids = [letter["_id"] for letter in letters]
        await self._db.collection("dead_letter").delete_many({"_id": {"$in": ids}}, session=session)
        for letter in letters:
            if "key" in letter:
                place = {"stream": letter["stream"], "shard": letter["shard"]}
                await self._held_keys.make_due(place, letter["key"], letter["_id"]["id"], session)
        return len(letters)

    async def _note(self, refs: Sequence[Ref], action: str, by: str, session: Session | None) -> int:
        if refs:
            rows = [_audit(by, action, ref.stream, ref) for ref in refs]
            await self._db.collection("audit").insert_many(rows, session=session)
        return len(refs)


def _parted(refs: Sequence[Ref]) -> tuple[list[Ref], list[Ref]]:
    """Dead letters of relays, and those of consumers."""
    return [ref for ref in refs if not ref.consumer], [ref for ref in refs if ref.consumer]


def _key(letter: Document) -> tuple[str, str | None]:
    return letter["stream"], letter.get("key")


def _audit(by: str, action: str, stream: str, ref: Ref | None = None) -> Document:
    row = {"seq": NEXT_SEQ, "operator": by, "action": action, "stream": stream}
    if ref is None:
        return row
    return {**row, "event_id": ref.id} | ({"consumer": ref.consumer} if ref.consumer else {})
