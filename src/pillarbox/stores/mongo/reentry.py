"""Re-entry on MongoDB: an event takes a new place at the end of its stream.

Its seq becomes the server's next cluster time, as in an insert. One clock gives both, so each seq is unique and above
all earlier ones.
"""

from collections.abc import Sequence
from typing import Final

from pymongo import UpdateOne

from pillarbox.event import Status
from pillarbox.mongo.documents import NEXT_SEQ, Document, from_dead_letter
from pillarbox.stores.mongo.database import MongoDatabase, Session
from pillarbox.stores.mongo.expressions import past

# Suspects are claimed alone instead.
DUE: Final[Document] = {
    **past("next_attempt_at"),
    "status": {"$in": ["scheduled", "failed"]},
    "suspect": None,
}
_EARLIEST: Final = [("next_attempt_at", 1), ("seq", 1)]
_BACK_TO_ITS_PLACE: Final[Document] = {"$set": {"status": "pending"}, "$unset": {"next_attempt_at": ""}}
_TO_THE_END: Final[Document] = {**_BACK_TO_ITS_PLACE, "$currentDate": {"seq": {"$type": "timestamp"}}}

_OF_BEFORE: Final = {"published_at": "", "suspect": ""}


class Reentry:
    """Lets events enter at the end of their stream."""

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database

    async def reenter_due(self, stream: str, limit: int) -> int:
        """Scheduled events enter at the end, the earliest first. Failed events return to their place."""
        if limit <= 0:
            return 0
        events = self._db.collection("event")
        async with self._db.session() as session:
            due = events.find({"stream": stream, **DUE}, {"status": 1}, sort=_EARLIEST, limit=limit, session=session)
            changes = [
                UpdateOne(
                    {"_id": event["_id"], **DUE},
                    _TO_THE_END if event["status"] == "scheduled" else _BACK_TO_ITS_PLACE,
                )
                async for event in due
            ]
            if not changes:
                return 0
            # One after the other, so that two workers that do this at once keep the order.
            done = await events.bulk_write(changes, ordered=True, session=session)
        return done.modified_count

    async def unpublish(self, events: Sequence[tuple[Document, bool]], session: Session | None) -> None:
        """Published events wait again, from now on: at the end, or, if their key is held, as failed in their old
        places."""
        changes = []
        for event, is_held in events:
            change = {"$set": {"status": "failed" if is_held else "pending", "attempts": 0}, "$unset": _OF_BEFORE}
            now: Document = {"available_at": True}
            if not is_held:
                now["seq"] = {"$type": "timestamp"}
            published = {"_id": event["_id"], "status": "published"}
            changes.append(UpdateOne(published, {**change, "$currentDate": now}))
        await self._db.collection("event").bulk_write(changes, ordered=True, session=session)

    async def revive(self, letters: Sequence[Document], session: Session | None) -> None:
        """Dead letters enter at the end as pending events, in this order."""
        if letters:
            documents = [{**from_dead_letter(letter, Status.PENDING), "seq": NEXT_SEQ} for letter in letters]
            await self._db.collection("event").insert_many(documents, session=session)
