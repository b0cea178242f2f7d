"""The steps of the inbox on MongoDB."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from pillarbox.drivers.contract import Steps
from pillarbox.drivers.pymongo import Call, PyMongo
from pillarbox.inbox.work import INBOX, MAX_ROWS, Entry, Place, Version
from pillarbox.mongo.documents import Document
from pillarbox.mongo.schema import collection
from pillarbox.outbox.mongo import number_of_shards


def record(place: Place, entry: Entry, is_limited: bool, driver: PyMongo) -> Steps[bool]:
    """Insert an event; false: it was there. A copy in another open transaction is a conflict at once."""
    yield from _prepare(place, driver)
    # An upsert: the error of a duplicate insert would end the transaction.
    fields = {"processed_at": "$$NOW"} | {name: {"$literal": value} for name, value in _fields(entry).items()}
    kept = {"$set": {name: {"$ifNull": [f"${name}", value]} for name, value in fields.items()}}
    return (yield from _upsert(place, "inbox", _identity(place, entry.id), kept)).upserted_id is not None


def record_all(place: Place, entries: Sequence[Entry], is_limited: bool, driver: PyMongo) -> Steps[set[UUID]]:
    """Insert events with different ids; the ids of those that were not there.

    The look is safe, because it sees the transaction's snapshot: an insert of what was written since is a conflict.
    """
    yield from _prepare(place, driver)
    new: set[UUID] = set()
    for start in range(0, len(entries), MAX_ROWS):
        some = entries[start : start + MAX_ROWS]
        wanted = {"_id": {"$in": [_identity(place, entry.id) for entry in some]}}
        found = yield _call(place, "inbox", "find", wanted, {"_id": True})
        known = {each["_id"]["event_id"] for each in found}
        added = [entry for entry in some if entry.id not in known]
        now = datetime.now(UTC)
        documents = [{"_id": _identity(place, entry.id), "processed_at": now, **_fields(entry)} for entry in added]
        if documents:
            yield _call(place, "inbox", "insert_many", documents)
        new |= {entry.id for entry in added}
    return new


def newer(place: Place, version: Version, driver: PyMongo) -> Steps[bool]:
    """Raise the version of an aggregate; false: it is as high already."""
    yield from _prepare(place, driver)
    seen = {"version": version.number, "event_id": version.event_id}
    # Without a row both are null, which is lower than everything.
    is_newer = {"$lt": [[f"${name}" for name in seen], [*seen.values()]]}
    raised = {name: {"$cond": [is_newer, value, f"${name}"]} for name, value in seen.items()}
    identity = {"consumer": place.consumer, "aggregate": version.digest}
    update = {"$set": {"name": {"$literal": version.name}, **raised}}
    result = yield from _upsert(place, "inbox_version", identity, update)
    return result.upserted_id is not None or result.modified_count == 1


def forget(place: Place, entry: Entry, driver: PyMongo) -> Steps[bool]:
    """Delete an event; false: it was not there."""
    yield from _prepare(place, driver)
    result = yield _call(place, "inbox", "delete_one", {"_id": _identity(place, entry.id)})
    return bool(result.deleted_count)


def _prepare(place: Place, driver: PyMongo) -> Steps[None]:
    """Refuse a handle without a transaction, a database without the collections, and a server without transactions."""
    driver.check(INBOX)
    yield from number_of_shards(driver, place.names)
    driver.refuse_standalone(
        "the inbox needs", ", or write the data with pillarbox.projections.upsert(..., version=...)"
    )


def _identity(place: Place, event_id: UUID) -> Document:
    return {"consumer": place.consumer, "event_id": event_id}


def _fields(entry: Entry) -> Document:
    fields = {"aggregate_id": entry.aggregate_id, "aggregate_version": entry.aggregate_version}
    return {name: value for name, value in fields.items() if value is not None}


def _upsert(place: Place, name: str, identity: Document, update: Document) -> Steps[Any]:
    return (yield _call(place, name, "update_one", {"_id": identity}, [update], True))


def _call(place: Place, name: str, method: str, *arguments: Any) -> Call:
    return Call(place.names.schema, collection(place.names, name), method, arguments)
