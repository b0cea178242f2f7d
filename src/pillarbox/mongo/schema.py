"""The collections of an outbox, their indexes and their version."""

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pymongo import ASCENDING

from pillarbox.event import Status
from pillarbox.mongo.documents import MOST_ATTEMPTS, Document
from pillarbox.names import Names

# The one document of the collection meta: {_id, version, shards}.
META_ID: Final = "schema"


class Step(NamedTuple):
    """The step to one schema version."""

    number: int
    name: str


STEPS: Final = (Step(1, "0001_outbox"),)
VERSION: Final = STEPS[-1].number
COLLECTIONS: Final = (
    *("event", "stream", "worker", "lease", "held_key", "dead_letter", "audit", "key_lock"),
    *("inbox", "inbox_version", "idempotency", "consumer"),
)
# An index holds only events that its query finds, so a settle removes an event from one index and adds it to none.
_INDEXES: Final[Mapping[str, Sequence[tuple[str, Sequence[str], Document]]]] = {
    "event": (
        ("ready", ("stream", "shard", "seq"), {"partialFilterExpression": {"status": "pending"}}),
        (
            "held",
            ("stream", "shard", "key", "seq"),
            {"partialFilterExpression": {"status": {"$in": ["failed", "held"]}}},
        ),
        (
            "due",
            ("stream", "next_attempt_at", "seq"),
            {"partialFilterExpression": {"next_attempt_at": {"$exists": True}}},
        ),
        ("leased", ("stream", "lease_until"), {"partialFilterExpression": {"status": "processing"}}),
    ),
    "worker": (("name", ("stream", "name"), {"unique": True}),),
    "lease": (("shard", ("stream", "shard"), {"unique": True}),),
    "held_key": (
        ("key", ("stream", "shard", "key"), {"unique": True}),
        ("due", ("stream", "shard", "next_attempt_at"), {}),
        ("dead_head", ("dead_head",), {"partialFilterExpression": {"dead_head": {"$exists": True}}}),
    ),
    # consumer is empty in a dead letter of a relay. replay_at and the lease belong to consumers.
    "dead_letter": (
        ("stream", ("consumer", "stream", "died_at", "seq"), {}),
        ("died", ("died_at",), {}),
        ("seq", ("consumer", "seq"), {}),
        ("replay", ("consumer", "seq", "replay_at"), {"partialFilterExpression": {"replay_at": {"$exists": True}}}),
    ),
    "audit": (("newest", ("seq",), {}),),
    # One document for each key that was written lately: {_id: key_hash, at}.
    "key_lock": (("expiry", ("at",), {"expireAfterSeconds": 3600}),),
    # {_id: {consumer, event_id}, processed_at, aggregate_id, aggregate_version, dead}
    "inbox": (("age", ("processed_at",), {}),),
    # {_id: {consumer, name}, seen_at, seen_until, source, lanes, paused_lanes, held_keys, lag_events, lag_seconds,
    # failed_lanes}
    "consumer": (),
    # {_id: SHA-256 of scope and key, fingerprint, created_at, status, headers, body}
    "idempotency": (("age", ("created_at",), {}),),
}
# Only on request. An event without an aggregate is not in it.
AGGREGATE_INDEX: Final[Document] = {
    "name": "aggregate",
    "key": {"aggregate_id": ASCENDING, "aggregate_version": ASCENDING},
    "partialFilterExpression": {"aggregate_id": {"$exists": True}},
}


_INTEGER: Final = ["int", "long"]
_TYPES: Final[Mapping[str, object]] = {
    **dict.fromkeys(("stream", "tenant", "topic", "type", "content_type"), "string"),
    **dict.fromkeys(("aggregate_type", "aggregate_id", "key", "routing_key", "schema_id", "schema_version"), "string"),
    **dict.fromkeys(("shard", "key_hash", "aggregate_version", "max_attempts", "occurred_us"), _INTEGER),
    **dict.fromkeys(("created_at", "occurred_at", "available_at", "next_attempt_at"), "date"),
    "seq": "timestamp",
    "payload": "binData",
}
_DOCUMENT: Final[Document] = {
    "required": [
        *("_id", "seq", "stream", "shard", "key_hash", "status", "tenant", "topic", "type", "payload"),
        *("content_type", "created_at", "attempts"),
    ],
    "properties": {
        **{name: {"bsonType": types} for name, types in _TYPES.items()},
        "_id": {
            "bsonType": "object",
            "required": ["id", "stream"],
            "properties": {"id": {"bsonType": "binData"}, "stream": {"bsonType": "string"}},
        },
        "status": {"enum": [each.value for each in Status if each is not Status.DEAD]},
        "attempts": {"bsonType": _INTEGER, "minimum": 0, "maximum": MOST_ATTEMPTS},
        "headers": {"bsonType": "object", "additionalProperties": {"bsonType": "string"}},
    },
}


def collection(names: Names, name: str) -> str:
    """The full name of a collection."""
    return f"{names.prefix}_{name}"


def options(name: str, shards: int) -> Document:
    """The options of a new collection. The validator of events refuses a writer with another number of shards, which
    would break the order of keys, and a document that no relay could read or settle."""
    if name != "event":
        return {}
    rules = {"$expr": {"$eq": ["$shard", {"$mod": ["$key_hash", shards]}]}, "$jsonSchema": _DOCUMENT}
    # Moderate: a document that is wrong already can still be claimed, and then die.
    return {"validator": rules, "validationLevel": "moderate"}


def indexes(name: str, *, aggregate_index: bool = False) -> Sequence[Document]:
    """The indexes of a collection, as ``createIndexes`` takes them."""
    own = [
        {"name": index, "key": dict.fromkeys(fields, ASCENDING), **options}
        for index, fields, options in _INDEXES.get(name, ())
    ]
    return [*own, AGGREGATE_INDEX] if aggregate_index and name == "event" else own


def script(database: str, names: Mapping[str, str], shards: int, after: int, *, aggregate_index: bool) -> str:
    """A migration as a script for ``mongosh``. ``names`` has the full name of each collection."""
    steps = []
    if after < VERSION:
        for name in COLLECTIONS:
            steps.append(f"createCollection({json.dumps(names[name])}, {json.dumps(options(name, shards))});")
            steps += [_create_index(names[name], index) for index in indexes(name)]
    if aggregate_index:
        steps.append(_create_index(names["event"], AGGREGATE_INDEX))
    if after < VERSION:
        meta: Document = {"_id": META_ID, "version": VERSION, "shards": shards}
        majority = {"writeConcern": {"w": "majority"}}
        steps.append(
            f"getCollection({json.dumps(names['meta'])}).insertOne({json.dumps(meta)}, {json.dumps(majority)});"
        )
    if not steps:
        return ""
    lines = [f"const outbox = db.getSiblingDB({json.dumps(database)});", *(f"outbox.{step}" for step in steps)]
    return "\n".join(lines) + "\n"


def _create_index(collection: str, index: Document) -> str:
    options = {field: value for field, value in index.items() if field != "key"}
    return f"getCollection({json.dumps(collection)}).createIndex({json.dumps(index['key'])}, {json.dumps(options)});"
