"""The sessions in which shards are settled."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from bson import Binary
from pymongo.errors import PyMongoError

from pillarbox.errors import StoreDown
from pillarbox.store import Grant
from pillarbox.stores.mongo.database import CODEC, MongoDatabase, Session
from pillarbox.stores.mongo.documents import Document

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
        """What its lease has of it."""
        name: Binary = self.session.session_id["id"]
        return name


class SettlingSessions:
    """One session for each shard that is owned; its id stands in the lease.

    A transaction does not end with the connection of a worker that was killed: the server keeps it for a minute, and
    with it the document of the lease, which a take-over has to change. Whoever takes over ends it by this id.
    """

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database
        self._open: dict[Grant, Settling] = {}

    def new(self) -> Settling:
        return Settling(self._db.new_session())

    def keep(self, grant: Grant, settling: Settling) -> None:
        """To settle with, once the lease names it: a session that no lease names would hold up a take-over."""
        self._open[grant] = settling

    async def transact(self, grant: Grant, fence: Document, work: Callable[[Session | None], Awaitable[T]]) -> T:
        """Run it in a transaction of the grant's own session."""
        if not self._db.replicated:
            return await self._db.transact(work)
        if grant not in self._open:
            # Taken before this store was closed, and opened again.
            settling = self.new()
            with self._db.errors():
                await self._db.collection("lease").update_one(fence, {"$set": {"session": settling.name}})
            self.keep(grant, settling)
        settling = self._open[grant]
        async with settling.one_at_a_time:
            try:
                return await self._db.transact(work, settling.session)
            except StoreDown as error:
                if getattr(error.__cause__, "code", None) != _INTERRUPTED:
                    raise
            # By a take-over, which may have come before the commit or after it: looking once more tells.
            return await self._db.transact(work, settling.session)

    async def end_left_open(self, lease: Document) -> None:
        """End what the last owner of an expired lease left open."""
        session = lease.get("session")
        if session is None or not self._db.replicated:
            return
        try:
            await self._db.opened.client.admin.command("killSessions", [{"id": session}], codec_options=CODEC)
        except PyMongoError as error:
            log.warning(
                "shard %d of stream '%s': a transaction that its last owner may have left open could not be ended "
                "(%s); the take-over can wait for it for a minute",
                lease["shard"],
                lease["stream"],
                type(error).__name__,
                extra={"action": "left_open", "stream": lease["stream"], "shard": lease["shard"]},
            )

    def drop(self, grants: Iterable[Grant]) -> None:
        """Forgotten rather than ended, which would hand it to the next that wants one: a take-over that comes late
        would interrupt somebody else's work."""
        for grant in grants:
            self._open.pop(grant, None)

    def close(self) -> None:
        self._open.clear()
