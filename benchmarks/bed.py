"""The servers that a run measures on, and the folder that its processes work in."""

import asyncio
import sys
import uuid
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import asyncpg
import pymysql
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from pillarbox.stores._mysql_url import connect_settings
from tests.servers import Kafka, MariaDB, Mongo, MySQL, Postgres, start_all
from tests.servers.process import drop_folder, make_folder

S = TypeVar("S", MySQL, MariaDB)

PARTITIONS = 8
# fsync and full_page_writes stay on. Vacuum runs when a table was loaded, and checkpoints before a round: in the middle
# of one they would hit one side of a pair only.
POSTGRES_SETTINGS = {
    "autovacuum": "off",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "shared_buffers": "256MB",
}
# innodb_flush_log_at_trx_commit stays 1. The pool holds the longest backlog: MariaDB reads past the system's cache,
# which the other servers have behind their own.
MYSQL_SETTINGS = {"innodb_buffer_pool_size": "2G", "innodb_log_file_size": "1G"}


class BenchMongo(Mongo):
    """With room for the longest backlog, and for the changes of a whole round."""

    def __init__(self) -> None:
        super().__init__(cache_gb=2, oplog_mb=4096)

    @property
    def url(self) -> str:
        return super().url.replace("/?", "/bench?")


class Bed:
    """PostgreSQL and Kafka of this run's own, and MySQL and MariaDB when a row asks; all end with it."""

    def __init__(self) -> None:
        self.postgres = Postgres(settings=POSTGRES_SETTINGS)
        self.kafka = Kafka(jit="normal")
        self._stack = ExitStack()
        self._admin: Any = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # In the care of the servers' sweeper, which ends what works in there when this process is killed.
            self.folder = make_folder("bench")
            stack.callback(drop_folder, self.folder)
            start_all([self.postgres, self.kafka])
            stack.callback(self.kafka.close)
            stack.callback(self.postgres.close)
            self._admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 2})
            asyncio.run(_create_database(self.postgres))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def servers(self) -> str:
        return self.kafka.bootstrap_servers

    @property
    def url(self) -> str:
        """The database of the outboxes; questions of the harness about it go through the other one."""
        return _bench(self.postgres)

    @property
    def sqlite_path(self) -> Path:
        return self.folder / "outbox.db"

    @cached_property
    def logical_url(self) -> str:
        """The database of a second PostgreSQL, which also logs what logical decoding needs."""
        # A backlog is one transaction, which logical decoding would otherwise put on disk first.
        settings = {**POSTGRES_SETTINGS, "wal_level": "logical", "logical_decoding_work_mem": "512MB"}
        server = Postgres(settings=settings)
        server.start()
        self._stack.callback(server.close)
        asyncio.run(_create_database(server))
        print("server    PostgreSQL, a second one (wal_level logical, fsync on)", flush=True)
        return _bench(server)

    @cached_property
    def mysql(self) -> MySQL:
        return self._started(MySQL(settings=MYSQL_SETTINGS))

    @cached_property
    def mariadb(self) -> MariaDB:
        return self._started(MariaDB(settings=MYSQL_SETTINGS))

    @cached_property
    def mongo(self) -> "BenchMongo":
        server = BenchMongo()
        server.start()
        self._stack.callback(server.close)
        version = server.admin({"buildInfo": 1})["version"]
        print(f"server    MongoDB {version} (one node, majority writes wait for the journal)", flush=True)
        return server

    def _started(self, server: S) -> S:
        server.start()
        self._stack.callback(server.close)
        settings = connect_settings(server.url)
        with pymysql.connect(host=settings["host"], port=settings["port"], user=settings["user"]) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT VERSION()")
            ((version,),) = cursor.fetchall()
        print(f"server    {type(server).__name__} {version} (flushed at every commit)", flush=True)
        return server

    def topic(self, name: str) -> str:
        """A new topic."""
        unique = f"{name}-{uuid.uuid4().hex[:6]}"
        topic = NewTopic(unique, num_partitions=PARTITIONS, replication_factor=1)
        self._admin.create_topics([topic])[unique].result(30)
        return unique

    def drop_topic(self, name: str) -> None:
        self._admin.delete_topics([name])[name].result(30)

    def messages(self, topic: str) -> int:
        """How many a topic has; nothing is ever deleted from it while it is measured."""
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": "bench"})
        try:
            places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
            return sum(consumer.get_watermark_offsets(place, timeout=10)[1] for place in places)
        finally:
            consumer.close()

    async def question(self, query: str) -> Any:
        """Asked in the other database, so that it does not count among the transactions of this one."""
        connection = await asyncpg.connect(self.postgres.url)
        try:
            return await connection.fetchval(query)
        finally:
            await connection.close()


def _bench(server: Postgres) -> str:
    return server.url.removesuffix("/postgres") + "/bench"


async def _create_database(server: Postgres) -> None:
    connection = await asyncpg.connect(server.url)
    try:
        await connection.execute("CREATE DATABASE bench")
    finally:
        await connection.close()


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)
