"""Marks on MongoDB: events that are published, without a transaction.

A mark is true whoever writes it: the destination has the event. So it needs no fence. It changes only events that are
still pending, and what another owner or an operator made of them meanwhile stays.
"""

from collections.abc import Collection, Sequence
from time import monotonic
from typing import Any, Final

from pillarbox.event import Status
from pillarbox.mongo.documents import Document, from_seq, identities
from pillarbox.store import Settlement
from pillarbox.stores.mongo import database
from pillarbox.stores.mongo.database import MongoDatabase, Session
from pillarbox.stores.mongo.leases import Leases
from pillarbox.tasks import run_to_completion

_PUBLISHED: Final[Document] = {
    "$set": {"status": "published"},
    "$currentDate": {"published_at": True},
    "$inc": {"attempts": 1},
}
# Much shorter than any lease. A mark that takes longer may meet the end of its lease.
_SLOW_SECONDS: Final = 0.1


def only_marks(settlement: Settlement) -> bool:
    """Whether it says nothing but that events are published which were pending when they were read."""
    return settlement.only_published and all(event.status is Status.PENDING for event in settlement.published)


async def mark(events: database.Collection, mine: Document, session: Session | None, *, keep: bool) -> int:
    """Mark these events as published, or delete them where they are not kept; returns their number."""
    if keep:
        return (await events.update_many(mine, _PUBLISHED, session=session)).modified_count
    return (await events.delete_many(mine, session=session)).deleted_count


class Marks:
    """Writes the settlements of turns in which everything was published."""

    def __init__(self, db: MongoDatabase, leases: Leases) -> None:
        self._db = db
        self._leases = leases

    async def write(self, settlements: Sequence[Settlement]) -> Collection[int]:
        """The shards that are still owned. Those that were lost before are left alone. Of those that are lost at this
        moment some events may be marked, which is true: they are published.
        """
        if not settlements:
            return ()
        # To the end: a mark that is cut off leaves events that are published again.
        return await run_to_completion(self._write(settlements))

    async def _write(self, settlements: Sequence[Settlement]) -> Collection[int]:
        async with self._db.session() as session:
            asked, begun = [settlement.grant for settlement in settlements], monotonic()
            owned = {grant.shard for grant in await self._leases.owned(asked, session)}
            missed = 0
            for keep in (True, False):
                events = [
                    event
                    for settlement in settlements
                    if settlement.keep_published is keep and settlement.grant.shard in owned
                    for event in settlement.published
                ]
                if events:
                    mine: dict[str, Any] = {
                        "_id": identities(events, events[0].stream),
                        "status": "pending",
                        # A replay gives an event a later place, and asks for one more delivery.
                        "seq": {"$lte": from_seq(max(event.seq for event in events))},
                    }
                    missed += len(events) - await mark(self._db.collection("event"), mine, session, keep=keep)
            if missed or monotonic() > begun + _SLOW_SECONDS:
                # Another worker may have taken a shard meanwhile, and may have published its events too.
                owned &= {grant.shard for grant in await self._leases.owned(asked, session)}
        return owned
