"""Dead letters on MongoDB. Events that die move to a collection of their own."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias
from uuid import UUID

from pymongo import UpdateOne

from pillarbox.mongo.documents import identity, to_dead_letter
from pillarbox.store import Failure
from pillarbox.stores._errors import error_entry
from pillarbox.stores.mongo.database import MongoDatabase, Session
from pillarbox.stores.mongo.expressions import kept_error, literal

Death: TypeAlias = tuple[int, str]  # attempts and error


def deaths(failures: Iterable[Failure]) -> dict[UUID, Death]:
    return {failure.event.id: (failure.attempts, kept_error(failure.error)) for failure in failures}


class DeadLetters:
    """The collection of dead letters."""

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database

    async def move_to_dead(self, stream: str, dying: Mapping[UUID, Death], session: Session | None) -> None:
        """Make dead letters of events of one stream.

        An event that died, was written again and dies again has one dead letter, the new one."""
        if not dying:
            return
        events = self._db.collection("event")
        mine = {"$in": [identity(event_id, stream) for event_id in dying]}
        unpublished = {"_id": mine, "status": {"$ne": "published"}}
        letters = []
        # Small pages: an event can have 16 MB.
        async for document in events.find(unpublished, session=session, batch_size=8):
            attempts, error = dying[document["_id"]["id"]]
            letter = to_dead_letter(document, attempts, error, [error_entry(error, attempts)])
            change = {"$replaceWith": {"$mergeObjects": [literal(letter), {"died_at": "$$NOW"}]}}
            letters.append(UpdateOne({"_id": document["_id"]}, [change], upsert=True))
        if letters:
            await self._db.collection("dead_letter").bulk_write(letters, session=session)
            await events.delete_many(unpublished, session=session)
