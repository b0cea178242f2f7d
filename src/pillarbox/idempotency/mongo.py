"""The calls of idempotency keys on MongoDB."""

from typing import Any

from pymongo.errors import OperationFailure

from pillarbox.drivers.contract import Steps
from pillarbox.drivers.pymongo import Call, PyMongo
from pillarbox.idempotency.work import Answer, Claim, Key, Stored
from pillarbox.mongo.schema import collection
from pillarbox.outbox.mongo import number_of_shards
from pillarbox.sql.dialects import ErrorKind


def claim(key: Key, driver: PyMongo) -> Steps[Claim | Stored]:
    """Write the document of a key, or read the one that is committed."""
    driver.check()
    yield from number_of_shards(driver, key.names)  # raises SchemaError if there is no outbox
    driver.refuse_standalone("idempotency keys need")
    # An upsert that changes nothing in a document that exists: an insert of a duplicate would end the transaction.
    new = {
        "fingerprint": {"$ifNull": ["$fingerprint", key.fingerprint]},
        "created_at": {"$ifNull": ["$created_at", "$$NOW"]},
    }
    try:
        # The document as it was before; it is made if it is missing.
        before = yield _call(key, "find_one_and_update", {"_id": key.id}, [{"$set": new}], None, None, True)
    except OperationFailure as error:
        if driver.classify(error) in (ErrorKind.CONFLICT, ErrorKind.DUPLICATE):
            return Claim.BUSY
        raise
    if before is None:
        return Claim.NEW
    body = before.get("body")
    return Stored(
        bytes(before["fingerprint"]), before.get("status"), before.get("headers"), None if body is None else bytes(body)
    )


def store(answer: Answer, driver: PyMongo) -> Steps[bool]:
    """Write the answer into the document; false: the document is gone."""
    values = {"status": answer.status, "headers": answer.headers, "body": answer.body}
    updated = yield _call(answer.key, "update_one", {"_id": answer.key.id}, {"$set": values})
    return bool(updated.matched_count)


def _call(key: Key, method: str, *arguments: Any) -> Call:
    return Call(key.names.schema, collection(key.names, "idempotency"), method, arguments)
