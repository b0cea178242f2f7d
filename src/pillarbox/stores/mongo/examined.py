"""Checks of a MongoDB server. What changes documents is asked for one that does not exist."""

from collections.abc import Mapping, Sequence
from typing import Final

from pymongo.errors import OperationFailure, WriteError

from pillarbox.finding import Finding, failed, ok, warning
from pillarbox.mongo.documents import Document
from pillarbox.stores._server import old_transaction
from pillarbox.stores.mongo.database import MongoDatabase

_WRITES: Final = ("find", "insert", "update", "remove")
# Each collection of a relay with what it does there.
_NEEDED: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(("event", "stream", "worker", "lease", "held_key", "dead_letter"), _WRITES),
    "audit": ("find", "insert"),
    "inbox": ("find", "remove"),
    "idempotency": ("find", "remove"),
}
_UNAUTHORIZED: Final = 13
_NONE: Final = {"_id": "no document of an outbox"}
# No id is a list: the server refuses this after it has found the right to insert.
_REFUSED: Final[Document] = {"_id": []}
_OPEN_TRANSACTIONS: Final[list[Document]] = [
    {"$currentOp": {"allUsers": True, "idleSessions": True}},
    {"$match": {"transaction.timeOpenMicros": {"$gt": 0}}},
    {"$group": {"_id": None, "micros": {"$max": "$transaction.timeOpenMicros"}}},
]


class MongoExamined:
    """The part that checks a server."""

    def __init__(self, database: MongoDatabase) -> None:
        self._db = database

    async def examine(self, lease_seconds: float) -> Sequence[Finding]:
        found = [await self._rights(), self._replicated()]
        return [*found, await self._old_transactions()] if self._db.replicated else found

    async def _rights(self) -> Finding:
        lacking = []
        for name, rights in _NEEDED.items():
            missing = [right for right in rights if not await self._may(name, right)]
            lacking += [f"{', '.join(missing)} on {self._db.names[name]}"] if missing else []
        if not lacking:
            return ok("rights", "this user may do all that a relay does")
        return failed("rights", f"this user lacks {'; '.join(lacking)}", "grant it the role readWrite on this database")

    async def _may(self, name: str, right: str) -> bool:
        collection = self._db.collection(name)
        with self._db.commands():
            try:
                if right == "find":
                    await collection.find_one(_NONE)
                elif right == "update":
                    await collection.update_one(_NONE, {"$set": {"none": 1}})
                elif right == "remove":
                    await collection.delete_one(_NONE)
                else:
                    await collection.insert_one(dict(_REFUSED))
            except WriteError:
                return right == "insert"
            except OperationFailure as error:
                if error.code != _UNAUTHORIZED:
                    raise
                return False
        return True

    async def _old_transactions(self) -> Finding:
        with self._db.commands():
            try:
                cursor = await self._db.opened.client.admin.aggregate(_OPEN_TRANSACTIONS)
                found = await cursor.to_list()
            except OperationFailure as error:
                if error.code != _UNAUTHORIZED:
                    raise
                remedy = "grant it the role clusterMonitor if you want to know"
                return warning("old_transactions", "this user may not see the transactions of others", remedy)
        return old_transaction(found[0]["micros"] / 1e6 if found else None, "a transaction of a session")

    def _replicated(self) -> Finding:
        if self._db.replicated:
            return ok("replica_set", "the server is a replica set, with transactions and change streams")
        return warning(
            "replica_set",
            "the server stands alone, without transactions and change streams: an event and its data can be torn apart "
            "by a crash, and relays poll",
            "make it a replica set, even of one node",
        )
