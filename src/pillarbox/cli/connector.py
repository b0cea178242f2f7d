"""The settings of Debezium's connectors with which its outbox event router reads an outbox of ours."""

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from pillarbox.envelopes.debezium import PLACED
from pillarbox.errors import ConfigError

# Kafka Connect's own provider of variables puts the password in.
FROM_ENVIRONMENT: Final = "${env:PILLARBOX_PASSWORD}"
# A slot of PostgreSQL has such a name.
NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
_CONVERTERS: Final = "org.apache.kafka.connect.storage"
_DEFAULT_SCHEMA: Final = "public"
_MONGO_ID: Final = "event_id"
_PORTS: Final = {"postgresql": 5432, "mysql": 3306}


class Outbox(NamedTuple):
    """What a connector has to know of an outbox and of its destination.

    url: of the store. topic: for events without a topic of their own; empty: each has one.
    """

    url: str
    prefix: str
    schema: str | None
    stream: str
    servers: str
    topic: str


class Connector(NamedTuple):
    """envelope: the one with which a relay sends the same messages. publication: the statement that makes it, on
    PostgreSQL."""

    settings: Mapping[str, str]
    envelope: str
    publication: str | None = None


def connector(name: str, outbox: Outbox) -> Connector:
    """The settings of the connector for this store."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name is {name!r}; use up to 63 small letters, digits and _, and a letter first")
    parts = urlsplit(outbox.url)
    match parts.scheme:
        case "postgresql":
            return _postgres(name, outbox, parts)
        case "mysql":
            return Connector(_mysql(name, outbox, parts), "debezium_base64")
        case "mongodb" | "mongodb+srv":
            return Connector(_mongo(name, outbox, parts), "debezium_base64")
    raise ConfigError(
        f"Debezium has no connector for an outbox at {parts.scheme}:, or its router cannot read one; "
        "it can on PostgreSQL, MySQL and MongoDB"
    )


def _common(name: str, outbox: Outbox, router: str, columns: str) -> dict[str, str]:
    """columns: what the names of the router's settings begin with."""
    placed = ",".join(f"{column}:header:{header}" for column, header in PLACED.items())
    # An event's own topic stays; an empty one is the default topic.
    route = ("^$", outbox.topic) if outbox.topic else ("(.*)", "$1")
    return {
        "tasks.max": "1",
        "topic.prefix": name,
        "snapshot.mode": "no_data",
        # A relay's and an operator's changes are no events.
        "skipped.operations": "u,d,t",
        "tombstones.on.delete": "false",
        "extended.headers.enabled": "false",
        "key.converter": f"{_CONVERTERS}.StringConverter",
        "value.converter": "io.debezium.converters.BinaryDataConverter",
        "header.converter": f"{_CONVERTERS}.SimpleHeaderConverter",
        "transforms": "outbox",
        "transforms.outbox.type": router,
        f"transforms.outbox.{columns}.field.event.key": "key",
        f"transforms.outbox.{columns}.field.event.payload": "payload",
        f"transforms.outbox.{columns}.fields.additional.placement": placed,
        "transforms.outbox.route.by.field": "topic",
        "transforms.outbox.route.topic.regex": route[0],
        "transforms.outbox.route.topic.replacement": route[1],
    }


def _table(name: str, outbox: Outbox, parts: SplitResult) -> dict[str, str]:
    login = {"database.user": unquote(parts.username)} if parts.username else {}
    if parts.password:
        login["database.password"] = FROM_ENVIRONMENT
    return {
        "database.hostname": unquote(parts.hostname or "localhost"),
        "database.port": str(parts.port or _PORTS[parts.scheme]),
        **login,
        **_common(name, outbox, "io.debezium.transforms.outbox.EventRouter", "table"),
    }


def _postgres(name: str, outbox: Outbox, parts: SplitResult) -> Connector:
    if "," in parts.netloc:
        raise ConfigError("the store URL names several servers, and a connector takes one; name the primary")
    table = f"{outbox.schema or _DEFAULT_SCHEMA}.{outbox.prefix}_event"
    settings = {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.dbname": unquote(parts.path.strip("/")),
        "plugin.name": "pgoutput",
        "slot.name": name,
        "publication.name": name,
        # It is ours: the connector's own would not choose the stream.
        "publication.autocreate.mode": "disabled",
        "table.include.list": table,
        **_table(name, outbox, parts),
    }
    stream = outbox.stream.replace("'", "''")
    publication = f"CREATE PUBLICATION {name} FOR TABLE {table} WHERE (stream = '{stream}') WITH (publish = 'insert');"
    return Connector(settings, "debezium", publication)


def _mysql(name: str, outbox: Outbox, parts: SplitResult) -> dict[str, str]:
    database = unquote(parts.path.strip("/"))
    return {
        "connector.class": "io.debezium.connector.mysql.MySqlConnector",
        # Each replica has a number of its own; above the small ones that people give.
        "database.server.id": str(zlib.crc32(name.encode()) % 2**31 + 2**30),
        "database.include.list": outbox.schema or database,
        "table.include.list": f"{outbox.schema or database}.{outbox.prefix}_event",
        "include.schema.changes": "false",
        "schema.history.internal.kafka.bootstrap.servers": outbox.servers,
        "schema.history.internal.kafka.topic": f"{name}.schema-history",
        "schema.history.internal.store.only.captured.tables.ddl": "true",
        **_table(name, outbox, parts),
    }


def _mongo(name: str, outbox: Outbox, parts: SplitResult) -> dict[str, str]:
    database = outbox.schema or unquote(parts.path.strip("/"))
    options = dict(parse_qsl(parts.query))
    login: dict[str, str] = {}
    if parts.username:
        source = options.pop("authSource", None) or unquote(parts.path.strip("/")) or "admin"
        login = {
            "mongodb.user": unquote(parts.username),
            "mongodb.password": FROM_ENVIRONMENT,
            "mongodb.authsource": source,
        }
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2], path="/", query=urlencode(options))
    return {
        "connector.class": "io.debezium.connector.mongodb.MongoDbConnector",
        "mongodb.connection.string": address.geturl(),
        **login,
        "collection.include.list": f"{database}.{outbox.prefix}_event",
        "capture.mode": "change_streams",
        "cursor.pipeline": json.dumps(_pipeline(outbox.stream)),
        **_common(name, outbox, "io.debezium.connector.mongodb.transforms.outbox.MongoEventRouter", "collection"),
        "transforms.outbox.collection.field.event.id": _MONGO_ID,
    }


def _pipeline(stream: str) -> list[dict[str, Any]]:
    """The events of one stream. The id stands inside of ``_id``, and an event without a key has no field for it: the
    router fails where a field is missing."""
    found = {_MONGO_ID: "$fullDocument._id.id", "key": {"$ifNull": ["$fullDocument.key", None]}}
    return [
        {"$match": {"fullDocument.stream": stream}},
        {"$set": {f"fullDocument.{field}": value for field, value in found.items()}},
    ]
