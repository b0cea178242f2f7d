"""Checks of a MongoDB server. What changes documents is asked for one that does not exist."""

from collections.abc import Sequence
from typing import Final

from pymongo.errors import OperationFailure

from pillarbox.finding import Finding, failed, ok, warning
from pillarbox.stores.mongo.database import MongoDatabase

_WRITTEN: Final = ("event", "stream", "worker", "lease", "held_key", "dead_letter")
_PRUNED: Final = ("inbox", "idempotency")
_UNAUTHORIZED: Final = 13
_NONE: Final = {"_id": "no document of an outbox"}


class MongoExamined:
    """The part that checks a server."""

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database

    async def examine(self, lease_seconds: float) -> Sequence[Finding]:
        return [await self._rights(), self._replicated()]

    async def _rights(self) -> Finding:
        lacking = [
            *[
                f"{right} on {name}"
                for name in _WRITTEN
                for right in ("find", "update", "remove")
                if not await self._may(name, right)
            ],
            *[
                f"{right} on {name}"
                for name in _PRUNED
                for right in ("find", "remove")
                if not await self._may(name, right)
            ],
        ]
        if not lacking:
            return ok("rights", "this user may do all that a relay does")
        return failed("rights", f"this user lacks {', '.join(lacking)}", "grant it the role readWrite on this database")

    async def _may(self, name: str, right: str) -> bool:
        collection = self._db.collection(name)
        with self._db.commands():
            try:
                if right == "find":
                    await collection.find_one(_NONE)
                elif right == "update":
                    await collection.update_one(_NONE, {"$set": {"none": 1}})
                else:
                    await collection.delete_one(_NONE)
            except OperationFailure as error:
                if error.code != _UNAUTHORIZED:
                    raise
                return False
        return True

    def _replicated(self) -> Finding:
        if self._db.replicated:
            return ok("replica_set", "the server is a replica set, with transactions and change streams")
        return warning(
            "replica_set",
            "the server stands alone, without transactions and change streams: an event and its data can be torn apart "
            "by a crash, and relays poll",
            "make it a replica set, even of one node",
        )
