"""Writing through a store on MongoDB."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from pillarbox.event import Event
from pillarbox.mongo.documents import encoded
from pillarbox.stores.mongo.database import MongoDatabase, Session


class MongoWriting:
    """Adds events, in a session with a transaction or in one of its own."""

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database

    def transaction(self) -> AbstractAsyncContextManager[Session | None]:
        return self._db.transaction()

    async def add(self, events: Sequence[Event], tx: Session | None = None) -> None:
        if not events:
            return
        documents = [encoded(event, self._db.outbox.shards) for event in events]

        async def insert(session: Session | None) -> None:
            await self._db.collection("event").insert_many(documents, session=session)

        if tx is None:
            await self._db.transact(insert)
            return
        with self._db.commands():
            await insert(tx)
