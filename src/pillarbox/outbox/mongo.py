"""The steps of events on MongoDB."""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID
from weakref import WeakKeyDictionary

from bson.raw_bson import RawBSONDocument
from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from pillarbox.drivers.contract import Steps
from pillarbox.drivers.pymongo import Call, PyMongo
from pillarbox.errors import SchemaError
from pillarbox.event import Event, key_hash
from pillarbox.mongo.documents import encoded, identity, with_id
from pillarbox.mongo.schema import META_ID, collection
from pillarbox.names import Names
from pillarbox.outbox.work import Question, Write, duplicate, no_tables
from pillarbox.sql.dialects import ErrorKind

_INVALID_DOCUMENT: Final = 121
_IDS_IN_A_QUESTION: Final = 1000
_shards_of: "WeakKeyDictionary[Any, dict[tuple[str, str], int]]" = WeakKeyDictionary()


def add(write: Write, driver: PyMongo) -> Steps[None]:
    """Write events."""
    if write.transactions:
        driver.check()
    shards = yield from shards_of(driver, write.names)
    added = [(event, encoded(event, shards)) for event in write.events]
    if write.lock_keys:
        yield from _lock_keys(write)
    if write.ignore_duplicates:
        # Check first: a duplicate ends the transaction.
        seen = yield from _known(write)
        everything, added = added, []
        for event, document in everything:
            if (event.id, event.stream) not in seen:
                seen.add((event.id, event.stream))
                added.append((event, document))
    yield from _insert(driver, write, added)


def exists(question: Question, driver: PyMongo) -> Steps[bool]:
    """Ask for an event that waits, was published, or is dead."""
    yield from shards_of(driver, question.names)
    wanted = {"_id": with_id(question.id) if question.stream is None else identity(question.id, question.stream)}
    for name in ("event", "dead_letter"):
        found = yield _call(question.names, name, "find_one", wanted, {"_id": True})
        if found is not None:
            return True
    return False


def _call(names: Names, name: str, method: str, *arguments: Any, is_outside: bool = False) -> Call:
    return Call(names.schema, collection(names, name), method, arguments, is_outside)


def _place(driver: PyMongo, names: Names) -> tuple[str, str]:
    return names.schema or driver.database, names.prefix


def shards_of(driver: PyMongo, names: Names) -> Steps[int]:
    """The outbox's number of shards, read once for each client."""
    known = _shards_of.setdefault(driver.client, {})
    place = _place(driver, names)
    if place not in known:
        found = yield _call(names, "meta", "find_one", {"_id": META_ID}, is_outside=True)
        if not found or not found["version"]:
            raise no_tables(names)
        known[place] = int(found["shards"])
    return known[place]


def _lock_keys(write: Write) -> Steps[None]:
    """Write a document for each key: of two such transactions the server ends the later one, which is run again."""
    hashes = sorted({key_hash(event.id, event.key) for event in write.events if event.key is not None})
    touch = {"$currentDate": {"at": True}}
    locks = [UpdateOne({"_id": hashed}, touch, upsert=True) for hashed in hashes]
    if locks:
        yield _call(write.names, "key_lock", "bulk_write", locks)


def _known(write: Write) -> Steps[set[tuple[UUID, str]]]:
    ids = [identity(event.id, event.stream) for event in write.events]
    known: set[tuple[UUID, str]] = set()
    for start in range(0, len(ids), _IDS_IN_A_QUESTION):
        some = {"_id": {"$in": ids[start : start + _IDS_IN_A_QUESTION]}}
        found = yield _call(write.names, "event", "find", some, {"_id": True})
        known.update((each["_id"]["id"], each["_id"]["stream"]) for each in found)
    return known


def _insert(driver: PyMongo, write: Write, added: Sequence[tuple[Event, RawBSONDocument]]) -> Steps[None]:
    while added:
        try:
            yield _call(write.names, "event", "insert_many", [document for _, document in added])
        except BulkWriteError as error:
            refused = (error.details["writeErrors"] or [{"code": None}])[0]
            if refused["code"] == _INVALID_DOCUMENT:
                raise _other_shards(driver, write.names) from error
            if driver.classify(error) is not ErrorKind.DUPLICATE:
                raise
            if not write.ignore_duplicates or driver.in_transaction():
                raise duplicate([added[refused["index"]][0]]) from error
            # Somebody else wrote it since the check. The rest follows in order.
            added = added[refused["index"] + 1 :]
        else:
            return


def _other_shards(driver: PyMongo, names: Names) -> SchemaError:
    _shards_of.get(driver.client, {}).pop(_place(driver, names), None)
    return SchemaError(
        f"the outbox '{names.prefix}' was made again with another number of shards; "
        "run the transaction again: the number is read again"
    )
