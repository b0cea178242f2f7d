"""Held keys on MongoDB, as settles and operators change them."""

from collections.abc import Iterable
from typing import Final
from uuid import UUID

from pillarbox.mongo.documents import Document
from pillarbox.store import Hold, HoldMode
from pillarbox.stores.mongo.database import MongoDatabase, Session
from pillarbox.stores.mongo.expressions import later_or_never

WAITS_FOR_KEY: Final[Document] = {"status": {"$in": ["failed", "held"]}}
_DUE_NOW: Final[list[Document]] = [
    {"$set": {"mode": "retrying", "next_attempt_at": "$$NOW"}},
    {"$unset": "dead_head"},
]


class HeldKeys:
    """The collection of held keys. ``place`` is a stream and a shard."""

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database

    async def lock(self, place: Document, keys: Iterable[str], session: Session | None) -> dict[str, HoldMode]:
        """The held keys among these. A settle and an operator both change a held key's document first, so they conflict
        and one of them is run again."""
        wanted = sorted(keys)
        if not wanted:
            return {}
        where = {**place, "key": {"$in": wanted}}
        held_keys = self._db.collection("held_key")
        await held_keys.update_many(where, {"$inc": {"changes": 1}}, session=session)
        found = held_keys.find(where, {"key": 1, "mode": 1}, session=session)
        return {row["key"]: HoldMode(row["mode"]) async for row in found}

    async def hold(self, place: Document, key: str, hold: Hold, session: Session | None) -> None:
        change = {
            "mode": hold.mode.value,
            "next_attempt_at": later_or_never(hold.delay),
            "dead_head": "$$REMOVE" if hold.dead_head is None else hold.dead_head,
        }
        await self._db.collection("held_key").update_one(
            {**place, "key": key}, [{"$set": change}], upsert=True, session=session
        )

    async def release(self, place: Document, key: str, session: Session | None) -> bool:
        """Release a retrying key that no event waits for; whether it was released."""
        own = {**place, "key": key}
        waits = {**own, **WAITS_FOR_KEY}
        if await self._db.collection("event").find_one(waits, {"_id": 1}, hint="held", session=session):
            return False
        done = await self._db.collection("held_key").delete_one({**own, "mode": "retrying"}, session=session)
        return bool(done.deleted_count)

    async def make_due(self, place: Document, key: str, acted_on: UUID, session: Session | None) -> None:
        """Free a key after an operator decided about its dead letter. It waits for one dead letter only."""
        waits_for_it = {"$or": [{"mode": "retrying"}, {"dead_head": acted_on}]}
        await self._db.collection("held_key").update_one(
            {**place, "key": key, **waits_for_it}, _DUE_NOW, session=session
        )
