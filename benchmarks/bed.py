"""The servers of a run, and the folder in which its processes work."""

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

from benchmarks.hooks import Hooks
from benchmarks.jetstreams import JetStreams
from benchmarks.pulsar_topics import PulsarTopics
from benchmarks.rabbit import Queues
from benchmarks.redis_streams import RedisStreams
from pillarbox.stores.mysql.url import connect_settings
from servers import Kafka, MariaDB, Mongo, MySQL, Nats, Postgres, Pulsar, RabbitMQ, Receiver, Valkey, start_all
from servers.process import drop_folder, make_folder

S = TypeVar("S", MySQL, MariaDB)

PARTITIONS = 8
# fsync and full_page_writes stay on. Vacuum runs after loading, checkpoints run before a round: during a round they
# would slow down only one side of a pair.
POSTGRES_SETTINGS = {
    "autovacuum": "off",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "shared_buffers": "256MB",
}
# innodb_flush_log_at_trx_commit stays 1. The buffer pool holds the longest backlog, because MariaDB does not use the
# file cache of the system as the other servers do.
MYSQL_SETTINGS = {"innodb_buffer_pool_size": "2G", "innodb_log_file_size": "1G"}


class BenchMongo(Mongo):
    """MongoDB with room for the longest backlog and for the changes of a whole round."""

    def __init__(self) -> None:
        super().__init__(cache_gb=2, oplog_mb=4096)

    @property
    def url(self) -> str:
        return super().url.replace("/?", "/bench?")


class Bed:
    """The servers of this run: PostgreSQL and Kafka, and others when a row asks for them. All end with the run."""

    def __init__(self) -> None:
        self.postgres = Postgres(settings=POSTGRES_SETTINGS)
        self.kafka = Kafka(jit="normal")
        self._stack = ExitStack()
        self._admin: Any = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # If this process is killed, the sweeper of the servers ends the processes that work in this folder.
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
        """The database of the outboxes. The harness asks its questions in the other database."""
        return _bench(self.postgres)

    @property
    def sqlite_path(self) -> Path:
        return self.folder / "outbox.db"

    @cached_property
    def logical_url(self) -> str:
        """The database of a second PostgreSQL, with logical decoding."""
        # A backlog is one transaction; with less memory logical decoding would write it to disk first.
        settings = {**POSTGRES_SETTINGS, "wal_level": "logical", "logical_decoding_work_mem": "512MB"}
        server = Postgres(settings=settings)
        server.start()
        self._stack.callback(server.close)
        asyncio.run(_create_database(server))
        print("server    PostgreSQL, a second one (wal_level logical, fsync on)", flush=True)
        return _bench(server)

    @cached_property
    def counting_postgres(self) -> Postgres:
        """A second PostgreSQL that counts statements, so that counting does not slow down the first one."""
        server = Postgres(settings={**POSTGRES_SETTINGS, "shared_preload_libraries": "pg_stat_statements"})
        server.start()
        self._stack.callback(server.close)
        print("server    PostgreSQL, a second one (pg_stat_statements, fsync on)", flush=True)
        return server

    @cached_property
    def mysql(self) -> MySQL:
        return self._started(MySQL(settings=MYSQL_SETTINGS))

    @cached_property
    def binlog_mysql(self) -> MySQL:
        """A second MySQL, with a binary log."""
        return self._started(MySQL(settings={**MYSQL_SETTINGS, "log-bin": "binlog", "server-id": "1"}))

    @cached_property
    def mariadb(self) -> MariaDB:
        return self._started(MariaDB(settings=MYSQL_SETTINGS))

    @cached_property
    def queues(self) -> Queues:
        server = RabbitMQ()
        server.start()
        self._stack.callback(server.close)
        print("server    RabbitMQ (quorum queues)", flush=True)
        return Queues(server)

    @cached_property
    def jetstreams(self) -> JetStreams:
        server = Nats()
        server.start()
        self._stack.callback(server.close)
        print("server    NATS (streams in files, sync_interval always)", flush=True)
        return JetStreams(server)

    @cached_property
    def redis_streams(self) -> RedisStreams:
        server = Valkey()
        server.start()
        self._stack.callback(server.close)
        print("server    Valkey (appendfsync always)", flush=True)
        return RedisStreams(server)

    @cached_property
    def hooks(self) -> Hooks:
        server = Receiver()
        server.start()
        self._stack.callback(server.close)
        print("server    an HTTP receiver, which notes each request", flush=True)
        return Hooks(server)

    @cached_property
    def mongo(self) -> "BenchMongo":
        server = BenchMongo()
        server.start()
        self._stack.callback(server.close)
        version = server.admin({"buildInfo": 1})["version"]
        print(f"server    MongoDB {version} (one node, majority writes wait for the journal)", flush=True)
        return server

    @cached_property
    def pulsar(self) -> PulsarTopics:
        server = Pulsar(jit="normal")
        server.start()
        self._stack.callback(server.close)
        print("server    Pulsar standalone (one bookie, its journal is synced)", flush=True)
        return PulsarTopics(server)

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
        """The number of messages in a topic. Nothing is deleted while it is measured."""
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": "bench"})
        try:
            places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
            return sum(consumer.get_watermark_offsets(place, timeout=10)[1] for place in places)
        finally:
            consumer.close()

    async def question(self, query: str) -> Any:
        """Ask in the other database, so that the question is not counted in the measured one."""
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
    """Print a line about the progress."""
    print(line, file=sys.stderr, flush=True)
