"""MySQL and MongoDB as Kafka Connect's connectors and our relay see them: each with an outbox of its own."""

import asyncio
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pymysql
from pymongo import MongoClient

from benchmarks.bed import Bed
from benchmarks.load import add_more, fill
from benchmarks.load_events import KEYS, payload
from benchmarks.load_mysql import NAMED, TEXT
from benchmarks.steady import key_of
from pillarbox import Outbox
from pillarbox.ids import uuid7
from pillarbox.stores.mysql.url import connect_settings
from servers import Server

TABLE = "peer_outbox"
Write = Callable[[int], None]
"""Writes the event of this number in a transaction of its own."""
Settings = dict[str, str]

# For throughput, as in the rows on PostgreSQL.
_PRODUCER = {
    "producer.override.acks": "all",
    "producer.override.enable.idempotence": "true",
    "producer.override.max.in.flight.requests.per.connection": "5",
    "producer.override.linger.ms": "5",
    "producer.override.batch.size": "262144",
}
_DEBEZIUM = {
    "tasks.max": "1",
    "snapshot.mode": "no_data",
    "extended.headers.enabled": "false",
    "tombstones.on.delete": "false",
    "skipped.operations": "u,d,t",
    "max.batch.size": "8192",
    "max.queue.size": "32768",
    "poll.interval.ms": "5",
    "transforms": "outbox",
    "value.converter": "io.debezium.converters.BinaryDataConverter",
    **_PRODUCER,
}
DEBEZIUM_AT_ONCE = {"poll.interval.ms": "1", "producer.override.linger.ms": "0"}
MONGO_AT_ONCE = {"poll.await.time.ms": "1", "producer.override.linger.ms": "0"}


class Place(ABC):
    """One database. freezes: a backlog is no single transaction, so both sides stand still while it is loaded."""

    name: str
    freezes: bool
    url: str
    server: Server

    def clear(self, side: str) -> None:
        """An empty outbox of ours or of the peer."""
        if side == "ours":
            fill(self.url, 0)
        else:
            self.clear_peer()

    def add(self, side: str, events: int) -> None:
        """A backlog."""
        if side == "ours":
            asyncio.run(add_more(self.url, "outbox", events))
        else:
            self.add_to_peer(events)

    @abstractmethod
    def clear_peer(self) -> None: ...

    @abstractmethod
    def add_to_peer(self, events: int) -> None: ...

    @abstractmethod
    def writer(self, side: str) -> Any:
        """A context manager that gives a ``Write`` with a connection of its own."""

    @abstractmethod
    def debezium(self, name: str, topic: str, bootstrap_servers: str) -> Settings:
        """The settings of Debezium's connector with its outbox event router."""


class OnMysql(Place):
    """The table that Debezium documents, with the payload as bytes."""

    name = "mysql"
    freezes = False

    def __init__(self, bed: Bed) -> None:
        self.server = bed.binlog_mysql
        self.url = self.server.url

    def clear_peer(self) -> None:
        with self._connected() as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP TABLE IF EXISTS {TABLE}")
            cursor.execute(
                f"CREATE TABLE {TABLE} (id char(36) PRIMARY KEY, aggregatetype varchar(255) NOT NULL, "
                "aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload blob)"
            )

    def add_to_peer(self, events: int) -> None:
        named = NAMED.format(first=0, last=events)
        with self._connected() as connection, connection.cursor() as cursor:
            cursor.execute(f"INSERT INTO {TABLE} SELECT UUID(), 'order', name, 'order.created', {TEXT} FROM {named}")

    @contextmanager
    def writer(self, side: str) -> Iterator[Write]:
        outbox = Outbox()
        with self._connected() as connection:

            def ours(number: int) -> None:
                connection.begin()
                outbox.add(connection, "order.created", payload(number), key=key_of(number))
                connection.commit()

            def peer(number: int) -> None:
                row = (str(uuid7()), key_of(number), payload(number))
                connection.begin()
                with connection.cursor() as cursor:
                    cursor.execute(f"INSERT INTO {TABLE} VALUES (%s, 'order', %s, 'order.created', %s)", row)
                connection.commit()

            yield ours if side == "ours" else peer

    def debezium(self, name: str, topic: str, bootstrap_servers: str) -> Settings:
        parts = urlsplit(self.url)
        database = parts.path.strip("/")
        return {
            "connector.class": "io.debezium.connector.mysql.MySqlConnector",
            "database.hostname": str(parts.hostname),
            "database.port": str(parts.port),
            "database.user": str(parts.username),
            "database.server.id": str(zlib.crc32(name.encode())),
            "database.include.list": database,
            "table.include.list": f"{database}.{TABLE}",
            "include.schema.changes": "false",
            "schema.history.internal.kafka.bootstrap.servers": bootstrap_servers,
            "schema.history.internal.kafka.topic": f"{name}.history",
            "schema.history.internal.store.only.captured.tables.ddl": "true",
            "topic.prefix": name,
            "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
            "transforms.outbox.route.topic.replacement": topic,
            **_DEBEZIUM,
        }

    def _connected(self) -> Any:
        return pymysql.connect(**connect_settings(self.url), autocommit=True)


class OnMongo(Place):
    """The collection that Debezium documents, with the payload as bytes."""

    name = "mongo"
    freezes = True

    def __init__(self, bed: Bed) -> None:
        self.server = bed.mongo
        self.url = bed.mongo.url

    def clear_peer(self) -> None:
        with MongoClient[dict[str, Any]](self.url) as client:
            client.get_default_database().drop_collection(TABLE)
            client.get_default_database().create_collection(TABLE)

    def add_to_peer(self, events: int) -> None:
        with MongoClient[dict[str, Any]](self.url, w=1, journal=False) as client:
            collection = client.get_default_database()[TABLE]
            for first in range(0, events, 10_000):
                numbers = range(first, min(events, first + 10_000))
                collection.insert_many([_document(n, f"order-{n % KEYS}") for n in numbers], ordered=True)
            client.admin.command("fsync")

    @contextmanager
    def writer(self, side: str) -> Iterator[Write]:
        outbox = Outbox()
        with MongoClient[dict[str, Any]](self.url) as client, client.start_session() as session:
            collection = client.get_default_database()[TABLE]

            def ours(number: int) -> None:
                with session.start_transaction():
                    outbox.add(session, "order.created", payload(number), key=key_of(number))

            def peer(number: int) -> None:
                with session.start_transaction():
                    collection.insert_one(_document(number, key_of(number)), session=session)

            yield ours if side == "ours" else peer

    def debezium(self, name: str, topic: str, bootstrap_servers: str) -> Settings:
        return {
            "connector.class": "io.debezium.connector.mongodb.MongoDbConnector",
            "mongodb.connection.string": self._address,
            "collection.include.list": f"{self._database}.{TABLE}",
            "capture.mode": "change_streams",
            "topic.prefix": name,
            "transforms.outbox.type": "io.debezium.connector.mongodb.transforms.outbox.MongoEventRouter",
            "transforms.outbox.route.topic.replacement": topic,
            **_DEBEZIUM,
        }

    def own(self, name: str, topic: str, bootstrap_servers: str) -> Settings:
        """The settings of MongoDB's own connector: the key and the payload's bytes, as the routers send them."""
        return {
            "connector.class": "com.mongodb.kafka.connect.MongoSourceConnector",
            "tasks.max": "1",
            "connection.uri": self._address,
            "database": self._database,
            "collection": TABLE,
            "pipeline": json.dumps([{"$match": {"operationType": "insert"}}]),
            "publish.full.document.only": "false",
            "topic.namespace.map": json.dumps({"*": topic}),
            "poll.max.batch.size": "8192",
            "poll.await.time.ms": "5",
            "output.format.key": "schema",
            "output.schema.key": _schema("aggregateid", "string"),
            "output.format.value": "schema",
            "output.schema.value": _schema("payload", "bytes"),
            "value.converter": "org.apache.kafka.connect.converters.ByteArrayConverter",
            **_extracted({"Key": "aggregateid", "Value": "payload"}),
            **_PRODUCER,
        }

    @property
    def _database(self) -> str:
        return urlsplit(self.url).path.strip("/")

    @property
    def _address(self) -> str:
        return self.url.replace(f"/{self._database}?", "/?")


def _document(number: int, key: str) -> dict[str, Any]:
    return {
        "_id": str(uuid7()),
        "aggregatetype": "order",
        "aggregateid": key,
        "type": "order.created",
        "payload": payload(number),
    }


def _schema(field: str, kind: str) -> str:
    """An Avro schema of a change that has this field of its document only."""
    document = {"type": "record", "name": "document", "fields": [{"name": field, "type": kind}]}
    return json.dumps({"type": "record", "name": "change", "fields": [{"name": "fullDocument", "type": document}]})


def _extracted(fields: Mapping[str, str]) -> Settings:
    """Transformations that leave a field of the document of the key, and of the value."""
    found = {}
    for side, field in fields.items():
        for step, name in (("document", "fullDocument"), ("field", field)):
            at = f"transforms.{side}{step}"
            found[f"{at}.type"] = f"org.apache.kafka.connect.transforms.ExtractField${side}"
            found[f"{at}.field"] = name
    names = [f"{side}{step}" for side in fields for step in ("document", "field")]
    return {"transforms": ",".join(names), **found}
