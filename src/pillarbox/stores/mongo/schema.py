"""The collections of an outbox, their indexes and their version."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from pymongo import ASCENDING

from pillarbox.names import Names
from pillarbox.stores.mongo.documents import Document

# The one document of the collection meta: {_id, version, shards}.
META_ID: Final = "schema"


class Step(NamedTuple):
    """What brings an outbox to a version."""

    number: int
    name: str


STEPS: Final = (Step(1, "0001_outbox"),)
VERSION: Final = STEPS[-1].number
COLLECTIONS: Final = ("event", "stream", "worker", "lease", "blocked_key", "dead_letter", "audit", "key_lock")
# An index holds only what its query looks for, so that a settle takes an event out of one and puts it into none.
_INDEXES: Final[Mapping[str, Sequence[tuple[str, Sequence[str], Document]]]] = {
    "event": (
        ("ready", ("stream", "shard", "seq"), {"partialFilterExpression": {"status": "pending"}}),
        (
            "aside",
            ("stream", "shard", "key", "seq"),
            {"partialFilterExpression": {"status": {"$in": ["failed", "held"]}}},
        ),
        ("due", ("stream", "next_attempt_at"), {"partialFilterExpression": {"next_attempt_at": {"$exists": True}}}),
        ("leased", ("stream", "lease_until"), {"partialFilterExpression": {"status": "processing"}}),
    ),
    "worker": (("name", ("stream", "name"), {"unique": True}),),
    "lease": (("shard", ("stream", "shard"), {"unique": True}),),
    "blocked_key": (
        ("key", ("stream", "shard", "key"), {"unique": True}),
        ("due", ("stream", "shard", "next_attempt_at"), {}),
        ("dead_head", ("dead_head",), {"partialFilterExpression": {"dead_head": {"$exists": True}}}),
    ),
    "dead_letter": (("stream", ("stream", "died_at", "seq"), {}), ("died", ("died_at",), {}), ("seq", ("seq",), {})),
    "audit": (("newest", ("seq",), {}),),
    # One document for each key that was written lately: {_id: key_hash, at}.
    "key_lock": (("expiry", ("at",), {"expireAfterSeconds": 3600}),),
}


def collection(names: Names, name: str) -> str:
    """The name of a collection; ``schema`` names the database that it is in."""
    return f"{names.prefix}_{name}"


def validator(shards: int) -> Document:
    """A writer that believes in another number of shards would break the order of its keys: the server refuses it."""
    return {"$expr": {"$eq": ["$shard", {"$mod": ["$key_hash", shards]}]}}


def indexes(name: str) -> Sequence[Document]:
    """The indexes of a collection, as ``createIndexes`` takes them."""
    return [
        {"name": index, "key": dict.fromkeys(fields, ASCENDING), **options}
        for index, fields, options in _INDEXES.get(name, ())
    ]


def script(database: str, names: Names, shards: int) -> str:
    """What a migration does, as a script for ``mongosh``."""
    lines = [f"const outbox = db.getSiblingDB({json.dumps(database)});"]
    meta = json.dumps(collection(names, "meta"))
    for name in COLLECTIONS:
        options = {"validator": validator(shards)} if name == "event" else {}
        own = json.dumps(collection(names, name))
        lines.append(f"outbox.createCollection({own}, {json.dumps(options)});")
        for index in indexes(name):
            key, rest = index["key"], {field: value for field, value in index.items() if field != "key"}
            lines.append(f"outbox.getCollection({own}).createIndex({json.dumps(key)}, {json.dumps(rest)});")
    document: dict[str, Any] = {"_id": META_ID, "version": VERSION, "shards": shards}
    majority = {"writeConcern": {"w": "majority"}}
    lines.append(f"outbox.getCollection({meta}).insertOne({json.dumps(document)}, {json.dumps(majority)});")
    return "\n".join(lines) + "\n"
