"""The upsert on MongoDB."""

from typing import Any, Final

from pymongo.errors import DuplicateKeyError

from pillarbox.drivers.contract import Steps
from pillarbox.drivers.pymongo import Call, PyMongo
from pillarbox.errors import ConfigError
from pillarbox.mongo.documents import Document
from pillarbox.projections.row import Row

_ATTEMPTS: Final = 10


def check(row: Row) -> None:
    """Refuse names that MongoDB would read as a path or an operator."""
    if not isinstance(row.table, str) or not row.table.strip(".") or any(sign in row.table for sign in ("$", "\0")):
        raise ConfigError(f"{row.table!r} cannot name a collection; use a text without $")
    for field in (*row.key, *row.values, *row.guard):
        if not isinstance(field, str) or not field or field.startswith("$") or any(sign in field for sign in ".\0"):
            raise ConfigError(f"{field!r} cannot name a field; use a text without a dot and without $ at its start")


def upsert(row: Row, driver: PyMongo) -> Steps[bool]:
    """Write the document. True if it was written."""
    found = {field: {"$eq": value} for field, value in row.key.items()}
    change = {"$set": row.values} if row.version is None else [_unless_newer(row)]
    call = Call(None, row.table, "update_one", (found, change, True))
    attempts = 0
    while True:
        try:
            done = yield call
        except DuplicateKeyError as error:
            attempts += 1
            # Another one has inserted it a moment ago. A transaction has ended with the error.
            is_of_key = {*(error.details or {}).get("keyPattern", ())} == {*row.key}
            if not is_of_key or driver.in_transaction() or attempts == _ATTEMPTS:
                raise
        else:
            return row.version is None or done.upserted_id is not None or done.modified_count == 1


def _unless_newer(row: Row) -> Document:
    """A stage that sets the fields, unless the document's version is the same or newer. A missing field is less than
    every number and every id."""
    assert row.version is not None
    number, event_id = f"${row.version_column}", f"${row.id_column}"
    newer: Any = {"$lt": [number, row.version.number]}
    if row.version.id is not None:
        same = {"$eq": [number, row.version.number]}
        newer = {"$or": [newer, {"$and": [same, {"$lt": [event_id, row.version.id]}]}]}
    fields = {**row.values, **row.guard}
    return {"$set": {field: {"$cond": [newer, {"$literal": value}, f"${field}"]} for field, value in fields.items()}}
