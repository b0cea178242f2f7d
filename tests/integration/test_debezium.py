"""Debezium's connectors with the settings of `pillarbox debezium`, and a relay: the same events through both."""

import asyncio
import itertools
import json
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pymysql
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka import admin as confluent_admin
from pymongo import MongoClient

from pillarbox import Outbox
from pillarbox.stores.mysql.url import connect_settings
from pillarbox.urls import store_from_url
from servers import Kafka, Mongo, MySQL, Postgres
from servers.connect import Connect
from servers.fixtures import OwnServer
from servers.process import wait_until
from tests.integration.commands import Command

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

kafka_admin: Any = confluent_admin  # its types leave out what it exports
NAME = "pillarbox"  # as on the page
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "debezium.md"
PARTITIONS = 3
Add = Callable[..., None]


class Sent(NamedTuple):
    """A message as Kafka has it."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]

    @property
    def id(self) -> bytes:
        return dict(self.headers)["id"]


class Topics:
    """New topics, and a look at them from outside."""

    def __init__(self, kafka: Kafka) -> None:
        self._config: dict[str, Any] = {"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0}
        self._admin = kafka_admin.AdminClient(self._config)

    def new(self) -> str:
        name = f"orders-{uuid.uuid4().hex[:10]}"
        self._admin.create_topics([kafka_admin.NewTopic(name, PARTITIONS, 1)])[name].result(30)
        return name

    def read(self, topic: str) -> list[Sent]:
        """All messages, partition by partition."""
        found = []
        consumer = Consumer({**self._config, "group.id": "test", "enable.auto.commit": False})
        try:
            for number in range(PARTITIONS):
                start, end = consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=10)
                consumer.assign([TopicPartition(topic, number, start)])
                for _ in range(start, end):
                    message = consumer.poll(10)
                    assert message is not None
                    assert message.error() is None
                    headers: Any = message.headers()
                    found.append(Sent(topic, number, message.key(), message.value(), headers or []))
        finally:
            consumer.close()
        return found

    def read_all(self, topics: Sequence[str], count: int) -> list[Sent]:
        """Wait until the topics have this many messages together."""

        def there() -> list[Sent]:
            return [each for topic in topics for each in self.read(topic)]

        wait_until(lambda: len(there()) >= count, seconds=60, what=f"{count} messages")
        return there()


@pytest.fixture
def topics(kafka: Kafka) -> Topics:
    return Topics(kafka)


@pytest.fixture
def worker(kafka: Kafka, own_server: OwnServer) -> Connect:
    return own_server(Connect, bootstrap_servers=kafka.bootstrap_servers)


@contextmanager
def adding(url: str) -> Iterator[Add]:
    """A function that adds one event in a transaction of its own."""
    outbox = Outbox()
    if url.startswith("postgresql:"):
        with psycopg.connect(url) as connection:

            def add(*words: Any, **fields: Any) -> None:
                with connection.transaction():
                    outbox.add(connection, *words, **fields)

            yield add
    elif url.startswith("mysql:"):
        with pymysql.connect(**connect_settings(url), autocommit=True) as other:

            def add_there(*words: Any, **fields: Any) -> None:
                other.begin()
                outbox.add(other, *words, **fields)
                other.commit()

            yield add_there
    else:
        with MongoClient[Any](url) as client, client.start_session() as session:

            def add_document(*words: Any, **fields: Any) -> None:
                with session.start_transaction():
                    outbox.add(session, *words, **fields)

            yield add_document


def migrate(url: str) -> None:
    async def make() -> None:
        store = store_from_url(url)
        await store.migrate()
        await store.close()

    asyncio.run(make())


def start(command: Command, worker: Connect, topics: Topics, topic: str, add: Add) -> None:
    """Start the connector with the settings that the command prints; returns when it streams."""
    url, to = command.variables["PILLARBOX_STORE"], f"kafka://{worker.bootstrap_servers}?topic={topic}"
    if url.startswith("postgresql:"):
        statement = command("debezium", "--name", NAME, "--to", to, "--publication").out
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement.encode())
    worker.put(NAME, command("debezium", "--name", NAME, "--to", to).json)
    worker.wait_until_running(NAME)
    probes, numbers = topics.new(), itertools.count()

    def streams() -> bool:
        # It begins at an instant of its own, and what was committed before is not its business.
        if wrong := worker.failure(NAME):
            raise RuntimeError(wrong)
        add("probe", {"n": next(numbers)}, topic=probes)
        return bool(topics.read(probes))

    wait_until(streams, seconds=60, what="the connector to stream")


def events(add: Add, own_topic: str) -> int:
    """Events of every kind. Returns how many."""
    ends_in_zeros = uuid.UUID("0192f0c1-0a0b-7c0d-8e0f-010203040000")
    cases: list[tuple[Any, dict[str, Any]]] = [
        ({"n": 1}, {"key": 7}),
        ({"n": 2}, {}),
        ({"text": "é ☃ \N{PILE OF POO}"}, {"key": "schlüssel-☃", "tenant": "straße"}),
        ({"n": 4}, {"key": 7, "topic": own_topic}),
        (b"\x00\xff\x80 no text", {"key": 8, "content_type": "application/octet-stream"}),
        (b"", {"key": 8, "content_type": "text/plain"}),
        ("  ", {"key": 8, "content_type": "text/plain"}),
        ({"n": 8}, {"key": 9, "id": ends_in_zeros}),
        ({"big": "x" * 200_000}, {"key": 9}),
        (
            {"n": 10},
            {
                "key": "",
                "aggregate_type": "order",
                "aggregate_id": 7,
                "aggregate_version": 3,
                "schema_id": "urn:order",
                "schema_version": "2",
                "headers": {"region": "eu", "id": "mine"},
                "routing_key": "r",
            },
        ),
        *(({"n": 100 + n}, {"key": f"order-{n % 7}"}) for n in range(100)),
    ]
    for payload, fields in cases:
        add("order.created", payload, **fields)
    return len(cases)


def by_id(sent: Sequence[Sent]) -> dict[bytes, Sent]:
    found = {each.id: each for each in sent}
    assert len(found) == len(sent), "copies"
    return found


def order(sent: Sequence[Sent]) -> dict[tuple[str, bytes], list[bytes]]:
    """The ids of each key, in order."""
    found: dict[tuple[str, bytes], list[bytes]] = {}
    for each in sent:
        if each.key is not None:
            found.setdefault((each.topic, each.key), []).append(each.id)
    return found


def both(folder: Path, url: str, envelope: str, worker: Connect, topics: Topics, streams: Sequence[str]) -> None:
    migrate(url)
    command = Command(folder, url)
    topic, own_topic = topics.new(), topics.new()
    to = f"kafka://{worker.bootstrap_servers}?topic={topic}&envelope={envelope}"
    with adding(url) as add:
        start(command, worker, topics, topic, add)
        add("mail", {"n": 0}, stream="mail", key=1)
        count = events(add, own_topic) + len(streams) - 1
    names = [topic, own_topic]
    theirs = topics.read_all(names, count)
    assert worker.failure(NAME) is None
    for stream in streams:
        ended = command("relay", "--drain", "--to", to, "--stream", stream)
        assert ended.code == 0, ended.err
    everything = [each for name in names for each in topics.read(name)]
    ours = []
    for place in {(each.topic, each.partition) for each in everything}:
        # The connector's messages come first in each partition.
        here = [each for each in everything if (each.topic, each.partition) == place]
        ours += here[sum((each.topic, each.partition) == place for each in theirs) :]
    assert len(theirs) == len(ours) == count
    mine = by_id(ours)
    for id_, theirs_one in by_id(theirs).items():
        ours_one = mine[id_]
        assert ours_one.key == theirs_one.key
        assert ours_one.value == theirs_one.value
        assert ours_one.headers == theirs_one.headers
        assert ours_one.topic == theirs_one.topic
        if ours_one.key is not None:
            assert ours_one.partition == theirs_one.partition
    assert order(ours) == order(theirs)


class Application:
    """Writes events of a few keys while its block runs. committed: their numbers, in order, with the instants at which
    their commits had returned."""

    def __init__(self, url: str) -> None:
        self.committed: dict[int, float] = {}
        self._url = url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with adding(self._url) as add:
            for number in itertools.count():
                add("order.created", {"n": number}, key=number % 5)
                self.committed[number] = time.monotonic()
                if self._ended.wait(0.02):
                    return

    def __enter__(self) -> "Application":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


class Seen:
    """The numbers that a topic has, in the order of each partition."""

    def __init__(self, topics: Topics, topic: str) -> None:
        self._topics = topics
        self._topic = topic

    def numbers(self) -> list[int]:
        return [json.loads(each.value or b"")["n"] for each in self._topics.read(self._topic)]

    def copies(self) -> int:
        found = self.numbers()
        return len(found) - len(set(found))

    def all_of(self, numbers: Sequence[int]) -> None:
        wait_until(lambda: set(numbers) <= set(self.numbers()), seconds=60, what="all events")

    def are_in_order(self) -> None:
        """The first copies of each key."""
        firsts: dict[int, list[int]] = {}
        for number in dict.fromkeys(self.numbers()):
            firsts.setdefault(number % 5, []).append(number)
        assert all(found == sorted(found) for found in firsts.values())


def statements() -> list[str]:
    """Those of the page."""
    blocks = re.findall(r"^ *```sql\n(.*?)^ *```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.strip().splitlines()]


def test_over_and_back(topics: Topics, worker: Connect, own_server: OwnServer, tmp_path: Path) -> None:
    url = own_server(Postgres, settings={"wal_level": "logical"}).url
    migrate(url)
    command, topic = Command(tmp_path, url), topics.new()
    seen = Seen(topics, topic)
    relay = ("relay", "--to", f"kafka://{worker.bootstrap_servers}?topic={topic}&envelope=debezium")
    delete, behind, *drop = statements()
    with Application(url) as application, psycopg.connect(url, autocommit=True) as operator:
        with command.start(*relay) as running:
            seen.all_of(range(50))
            with adding(url) as add:
                start(command, worker, topics, topic, add)
            wait_until(lambda: seen.copies() > 0, seconds=60, what="the first event to arrive twice")
            running.terminate()
            assert running.wait(30) == 0
        assert command(*relay, "--drain").code == 0
        over = max(application.committed)
        seen.all_of(range(over + 100))
        over_copies = seen.copies()
        # Everything that was committed until now has been published, and an application that writes has more rows.
        instant = time.monotonic()
        seen.all_of([number for number, at in application.committed.copy().items() if at <= instant])
        row = operator.execute(behind.encode()).fetchone()
        assert row is not None
        age = f"interval '{time.monotonic() - instant + 1:.3f} seconds'"  # a transaction takes less than a second
        operator.execute(delete.replace("interval '10 minutes'", age).encode())
        worker.delete(NAME)
        wait_until(lambda: not is_active(operator), seconds=60, what="the slot to be free")
        gone = max(application.committed)
        with command.start(*relay) as running:
            seen.all_of(range(gone + 100))
            running.terminate()
            assert running.wait(30) == 0
        for statement in drop:
            operator.execute(statement.encode())
    assert command(*relay, "--drain").code == 0
    seen.all_of(list(application.committed))
    assert set(seen.numbers()) == set(application.committed)
    seen.are_in_order()
    twice = [number for number, count in Counter(seen.numbers()).items() if count > 1]
    over_twice, back_twice = [n for n in twice if n <= over], [n for n in twice if n > over]
    # Copies are the events of the time in which both published, and those whose rows were left.
    assert seen.copies() == len(twice)
    assert over_copies == len(over_twice)
    assert min(over_twice) > 0
    assert max(back_twice, default=0) <= gone
    print(f"{len(application.committed)} events, copies: {len(over_twice)} over, {len(back_twice)} back")


def is_active(operator: psycopg.Connection[Any]) -> bool:
    query = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s AND active"
    row = operator.execute(query, (NAME,)).fetchone()
    return row is not None and row[0] > 0


def test_postgres(topics: Topics, worker: Connect, own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(Postgres, settings={"wal_level": "logical"})
    both(tmp_path, server.url, "debezium", worker, topics, ["default"])


def test_mysql(topics: Topics, worker: Connect, own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(MySQL, settings={"log-bin": "binlog", "server-id": "1"})
    both(tmp_path, server.url, "debezium_base64", worker, topics, ["default", "mail"])


def test_mongo(topics: Topics, worker: Connect, own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(Mongo)
    both(tmp_path, server.url.replace("/?", "/shop?"), "debezium_base64", worker, topics, ["default"])
