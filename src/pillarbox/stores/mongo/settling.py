"""Sessions for the settles of shards."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from bson import Binary
from pymongo.errors import PyMongoError

from pillarbox.errors import StoreDown
from pillarbox.mongo.documents import Document
from pillarbox.store import Grant
from pillarbox.stores.mongo.database import CODEC, MongoDatabase, Session

log = logging.getLogger("pillarbox.stores.mongo")

T = TypeVar("T")

_INTERRUPTED: Final = 11601


@dataclass(slots=True)
class Settling:
    """The session of one shard."""

    session: Session
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> Binary:
        """Its id, as the lease keeps it."""
        name: Binary = self.session.session_id["id"]
        return name


class SettlingSessions:
    """One session for each owned shard. The lease has its id.

    When a worker is killed, the server keeps its transaction open for a minute, and locks the lease's document, which a
    take-over has to change. The new owner ends the transaction by this id.
    """

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database
        self._open: dict[Grant, Settling] = {}

    def new(self) -> Settling:
        return Settling(self._db.new_session())

    def keep(self, grant: Grant, settling: Settling) -> None:
        """Settle with this session from now on. The lease must name it, so that a new owner can end its transaction."""
        self._open[grant] = settling

    async def transact(self, grant: Grant, fence: Document, work: Callable[[Session | None], Awaitable[T]]) -> T:
        """Run ``work`` in a transaction of the grant's own session."""
        if not self._db.replicated:
            return await self._db.transact(work)
        if grant not in self._open:
            # The shard was taken before this store was closed and opened again.
            settling = self.new()
            with self._db.commands():
                await self._db.collection("lease").update_one(fence, {"$set": {"session": settling.name}})
            self.keep(grant, settling)
        settling = self._open[grant]
        async with settling.one_at_a_time:
            try:
                return await self._db.transact(work, settling.session)
            except StoreDown as error:
                if getattr(error.__cause__, "code", None) != _INTERRUPTED:
                    raise
            # A take-over ended it, before or after the commit: the next run finds out.
            return await self._db.transact(work, settling.session)

    async def end_left_open(self, lease: Document) -> None:
        """End the transaction that the last owner of an expired lease left open."""
        session = lease.get("session")
        if session is None or not self._db.replicated:
            return
        try:
            await self._db.opened.client.admin.command("killSessions", [{"id": session}], codec_options=CODEC)
        except PyMongoError as error:
            log.warning(
                "shard %d of stream '%s': the last owner may have left a transaction open, and it could not be ended "
                "(%s); the take-over may have to wait for a minute",
                lease["shard"],
                lease["stream"],
                type(error).__name__,
                extra={"action": "left_open", "stream": lease["stream"], "shard": lease["shard"]},
            )

    def drop(self, grants: Iterable[Grant]) -> None:
        """Forget the sessions of these shards without ending them: PyMongo would reuse them, and a late take-over would
        interrupt their next user."""
        for grant in grants:
            self._open.pop(grant, None)

    def close(self) -> None:
        self._open.clear()
