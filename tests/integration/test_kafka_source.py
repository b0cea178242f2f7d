"""The Kafka source on a real broker: what its contract cannot say for all brokers."""

import asyncio
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import IO, Any
from uuid import uuid4

import pytest
import pytest_asyncio
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import admin as confluent_admin

from pillarbox.conformance.source import Reader
from pillarbox.errors import ConfigError, Outage
from pillarbox.source import Lane
from pillarbox.sources.kafka import KafkaSource, reader
from pillarbox.urls import source_from_url
from servers import Kafka
from servers.fixtures import OwnServer
from tests.integration.relays import eventually
from tests.integration.relays import until as until_true
from tests.integration.test_kafka_publisher import GUARDED

SERVERS = "127.0.0.1:9092"
LIMIT_SECONDS = 60.0
BOTH = pytest.mark.parametrize("protocol", ["classic", "consumer"])
kafka_admin: Any = confluent_admin  # its types leave out what it exports


class Cluster:
    """Topics of the broker, read and written without the source."""

    def __init__(self, server: Kafka, **login: str) -> None:
        self.servers = server.bootstrap_servers
        config: dict[str, Any] = {"bootstrap.servers": self.servers, "log_level": 0, **login}
        self.admin = kafka_admin.AdminClient(config)
        self.producer: Any = Producer(config)
        self._config = config

    def topic(self, partitions: int = 1) -> str:
        name = f"source-{uuid4().hex[:10]}"
        self.admin.create_topics([kafka_admin.NewTopic(name, partitions, 1)])[name].result()
        return name

    def send(self, topic: str, *bodies: bytes | None, partition: int = 0, headers: Any = None) -> None:
        for body in bodies:
            self.producer.produce(topic, body, partition=partition, headers=headers)
        assert self.producer.flush(30) == 0

    def committed(self, topic: str, group: str) -> int:
        consumer = Consumer({**self._config, "group.id": group})
        (found,) = consumer.committed([TopicPartition(topic, 0)], timeout=30)
        consumer.close()
        return int(found.offset)

    def source(self, topic: str, **settings: Any) -> KafkaSource:
        return KafkaSource(servers=self.servers, topic=topic, **settings)


class Told(Reader):
    """Also keeps the failures of lanes."""

    def __init__(self, source: KafkaSource) -> None:
        super().__init__(source, LIMIT_SECONDS)
        self.failures: list[tuple[Lane, str]] = []

    def failed(self, lane: Lane, error: str) -> None:
        self.failures.append((lane, error))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The actions of warnings."""
    return [getattr(record, "action", "") for record in caplog.records if record.levelno >= logging.WARNING]


_opened: list[KafkaSource] = []


async def opened(source: KafkaSource, group: str = "cards") -> Told:
    told = Told(source)
    await source.open(group, told)
    _opened.append(source)
    return told


@pytest_asyncio.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    """Also after a test that failed: Kafka's client never returns when the garbage collector ends an open consumer."""
    yield
    while _opened:
        await _opened.pop().close()


@pytest.fixture
def cluster(kafka: Kafka) -> Cluster:
    return Cluster(kafka)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"topic": ""}, "no Kafka topic is given; write for instance topic=orders"),
        ({"topic": "orders,no topic!"}, "topic='no topic!' is not a name that Kafka takes"),
        ({"topic": "t", "start": "begin"}, "start='begin': use one of: earliest, latest"),
        ({"topic": "t", "servers": ""}, "servers='' names no Kafka broker"),
        ({"topic": "t", "properties": {"group.id": "x"}}, "group.id='x' is refused; name the group with group="),
        ({"topic": "t", "properties": {"enable.auto.commit": "true"}}, "an offset is committed when its event is done"),
        ({"topic": "t", "properties": {"auto.offset.reset": "latest"}}, "say with start= where a new group begins"),
        ({"topic": "t", "properties": {"partition.assignment.strategy": "range"}}, "leave it out"),
        ({"topic": "t", "properties": {"bootstrap.servers": "x:1"}}, "name the brokers with servers="),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        KafkaSource(**{"servers": SERVERS, **settings})


def test_a_url_has_the_settings() -> None:
    source = source_from_url("kafka://host?topic=a,b&group=g&start=latest&fetch.wait.max.ms=9")
    assert source.description == "kafka host:9092 a,b"
    with pytest.raises(ConfigError, match="unknown option 'topics' in the Kafka URL; did you mean 'topic'"):
        source_from_url("kafka://host?topics=a")


@pytest.mark.asyncio
async def test_properties_that_the_client_does_not_know_are_refused() -> None:
    source = KafkaSource(servers=SERVERS, topic="t", properties={"fetch.wait.max.mz": 5})
    with pytest.raises(ConfigError, match=r'the Kafka client refuses its properties: No such .*"fetch\.wait\.max\.mz"'):
        await opened(source)


@pytest.mark.asyncio
async def test_a_topic_that_does_not_exist_is_one_clear_error(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="topic 'nowhere' does not exist on kafka"):
        await opened(cluster.source(f"{cluster.topic()},nowhere"))


@BOTH
@pytest.mark.asyncio
async def test_a_topic_that_is_deleted_ends_its_source(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setattr(reader, "CHECK_SECONDS", 0.1)
    topics = sorted([cluster.topic(), cluster.topic()])
    told = await opened(cluster.source(",".join(topics), properties={"group.protocol": protocol}), f"g-{topics[0]}")
    await told.read_until(lambda: len(told.lanes) == 2, "two lanes")
    cluster.admin.delete_topics(topics[:1])[topics[0]].result()
    with pytest.raises(ConfigError, match=f"topic '{topics[0]}' does not exist on kafka"):
        await told.read_until(lambda: False, "the end")


@pytest.mark.asyncio
async def test_a_cluster_that_is_not_there_is_an_outage() -> None:
    source = KafkaSource(servers="127.0.0.1:1", topic="t", connect_timeout="300ms")
    with pytest.raises(Outage, match=r"kafka 127\.0\.0\.1:1 t cannot be reached: "):
        await opened(source)
    await source.close()


@pytest.mark.asyncio
async def test_rights_that_are_missing(own_server: OwnServer) -> None:
    login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
    server = own_server(Kafka, settings=GUARDED)
    admin = Cluster(server, **login, **{"sasl.username": "admin", "sasl.password": "pw"})
    topic = admin.topic()
    admin.send(topic, b"1")

    def source(password: str = "pw") -> KafkaSource:
        address = f"app:{password}@{server.bootstrap_servers}"
        return KafkaSource.from_url(f"kafka://{address}?topic={topic}&security.protocol=SASL_PLAINTEXT")

    def allow(kind: str, name: str, operation: str) -> None:
        rule = kafka_admin.AclBinding(
            kafka_admin.ResourceType[kind],
            name,
            kafka_admin.ResourcePatternType.LITERAL,
            "User:app",
            "*",
            kafka_admin.AclOperation[operation],
            kafka_admin.AclPermissionType.ALLOW,
        )
        for answer in admin.admin.create_acls([rule]).values():
            answer.result()

    with pytest.raises(Outage, match="Authentication failed") as caught:
        await opened(source("guess"))
    assert "guess" not in str(caught.value)

    async def refusal() -> str:
        """Why it cannot be opened. The broker applies a new right a moment after it has taken it."""
        try:
            told = await opened(source())
        except ConfigError as error:
            return str(error)
        await told.source.close()
        return ""

    # Neither is allowed yet, and the broker may refuse either first.
    unreadable = re.compile(f"topic '{topic}' on kafka .* may not be read; allow this client to read it")
    await eventually(refusal, lambda said: unreadable.search(said) is not None)
    allow("TOPIC", topic, "DESCRIBE")
    await eventually(refusal, lambda said: "group 'cards' on kafka" in said and "may not be used; allow" in said)
    allow("GROUP", "cards", "READ")
    await eventually(refusal, lambda said: not said)
    told = await opened(source())
    with pytest.raises(ConfigError, match=f"topic '{topic}' on kafka .* may not be read"):
        await told.read(1)
    await told.source.close()
    allow("TOPIC", topic, "READ")
    told = await opened(source())
    assert [message.body for message in await told.read(1)] == [b"1"]
    await told.source.close()


@BOTH
@pytest.mark.asyncio
async def test_data_that_are_gone_fail_their_lane_alone(cluster: Cluster, protocol: str) -> None:
    topic, properties = cluster.topic(2), {"group.protocol": protocol}
    group = f"g-{topic}"
    cluster.send(topic, b"1", b"2", b"3", partition=0)
    cluster.send(topic, b"a", partition=1)
    told = await opened(cluster.source(topic, properties=properties), group)
    messages = await told.read(4)
    told.settle([message for message in messages if message.body in (b"1", b"a")])
    await told.source.close()
    cluster.admin.delete_records([TopicPartition(topic, 0, 3)])[TopicPartition(topic, 0, 3)].result()
    cluster.send(topic, b"4", partition=0)
    cluster.send(topic, b"b", partition=1)
    told = await opened(cluster.source(topic, properties=properties), group)
    await told.read_until(lambda: bool(told.failures and told.messages), "a failure and a message")
    ((lane, error),) = told.failures
    assert lane.name == f"{topic}/0"
    assert error.startswith(f"partition 0 of topic {topic!r} does not have offset 1: its retention has deleted it")
    assert f"--group {group} --topic {topic}:0 --reset-offsets --to-earliest --execute" in error
    cluster.send(topic, b"c", partition=1)
    await told.read_until(lambda: told.bodies == [b"b", b"c"], "the other lane's messages")
    await told.source.close()
    assert cluster.committed(topic, group) == 1


@BOTH
@pytest.mark.asyncio
async def test_what_stands_behind_the_last_message_is_settled_with_it(cluster: Cluster, protocol: str) -> None:
    """Else retention, which deletes the markers of transactions too, would seem to have deleted a message."""
    topic, properties = cluster.topic(2), {"group.protocol": protocol}
    group = f"g-{topic}"
    writer: Any = Producer({"bootstrap.servers": cluster.servers, "transactional.id": topic, "log_level": 0})
    await asyncio.to_thread(writer.init_transactions)

    def write(body: bytes, *, is_committed: bool = True) -> None:
        writer.begin_transaction()
        writer.produce(topic, body, partition=0)
        writer.flush()
        (writer.commit_transaction if is_committed else writer.abort_transaction)()

    await asyncio.to_thread(write, b"1")
    await asyncio.to_thread(write, b"2")
    await asyncio.to_thread(write, b"never", is_committed=False)
    told = await opened(cluster.source(topic, properties=properties), group)
    messages = await told.read(2)
    told.settle(messages[:1])
    for _ in range(3):
        await told.receive()
    assert sum((await told.source.lag()).values()) > 0, "the second message is not settled"
    told.settle(messages[1:])
    async with asyncio.timeout(LIMIT_SECONDS):
        # The marker of an aborted transaction may come a moment later.
        while sum((await told.source.lag()).values()):
            await told.receive()
    await told.source.close()
    assert cluster.committed(topic, group) == 6
    cluster.admin.delete_records([TopicPartition(topic, 0, 6)])[TopicPartition(topic, 0, 6)].result()
    told = await opened(cluster.source(topic, properties=properties), group)
    await asyncio.to_thread(write, b"3")
    assert [message.body for message in await told.read(1)] == [b"3"]
    assert not told.failures
    await told.source.close()


@pytest.mark.asyncio
async def test_the_lag_is_not_known_where_a_part_of_it_is_not(cluster: Cluster, kafka: Kafka) -> None:
    topic = cluster.topic(2)
    told = await opened(cluster.source(topic), f"g-{topic}")
    for partition in range(2):
        cluster.send(topic, b"1", b"2", partition=partition)
    messages = await told.read(4)
    told.settle([each for each in messages if each.body == b"1"])
    assert sorted((await told.source.lag()).values()) == [1, 1]
    # The client asks the broker for the end of a partition that is paused.
    told.source.pause(messages[0].lane)
    await told.receive()
    kafka.pause()
    try:
        assert await told.source.lag() == {}
    finally:
        kafka.resume()


@pytest.mark.asyncio
async def test_a_close_does_not_wait_for_offsets(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its partitions are given to it, and the broker does not tell where to begin."""

    def unknown(_reader: Any, _found: Any) -> None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    monkeypatch.setattr(reader.Reader, "_start", unknown)
    topic = cluster.topic()
    told = await opened(cluster.source(topic), f"g-{topic}")
    receiving = asyncio.create_task(told.receive())
    await until_true(lambda: "kafka_offsets_unknown" in said(caplog))
    receiving.cancel()
    await asyncio.wait([receiving])
    await told.source.close()
    assert "kafka_close_unanswered" not in said(caplog)


@pytest.mark.asyncio
async def test_a_close_leaves_no_answer_behind(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is on its way to the broker, and finds it away after the close."""
    topic, forgotten = cluster.topic(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))
    told = await opened(cluster.source(topic), f"g-{topic}")

    def away(_reader: Any, _limit: int) -> None:
        time.sleep(0.1)
        raise Outage("away")

    monkeypatch.setattr(reader.Reader, "read", away)
    receiving = asyncio.create_task(told.source.receive(1, 1.0))
    await asyncio.sleep(0)
    receiving.cancel()
    await asyncio.wait([receiving])
    await told.source.close()
    del receiving
    gc.collect()
    assert not forgotten


@BOTH
@pytest.mark.asyncio
async def test_one_of_two_members_of_the_same_name_is_shut_out(cluster: Cluster, protocol: str) -> None:
    topic, properties = cluster.topic(), {"group.protocol": protocol, "group.instance.id": "one"}
    members = [await opened(cluster.source(topic, properties=properties), f"g-{topic}") for _ in range(2)]

    async def both() -> None:
        await asyncio.gather(*(each.receive() for each in members))

    with pytest.raises(ConfigError, match=r"has shut this consumer of group .* out: .*; give each process a group"):
        await until(both, lambda: False)
    await asyncio.gather(*(each.source.close() for each in members))


@pytest.mark.asyncio
async def test_the_end_of_a_new_group_is_where_it_began(cluster: Cluster) -> None:
    topic = cluster.topic()
    group = f"g-{topic}"
    cluster.send(topic, b"before")
    told = await opened(cluster.source(topic, start="latest"), group)
    await told.read_until(lambda: bool(told.lanes), "a lane")
    await told.source.close()
    cluster.send(topic, b"while it was away")
    told = await opened(cluster.source(topic, start="latest"), group)
    assert [message.body for message in await told.read(1)] == [b"while it was away"]
    await told.source.close()


@pytest.mark.asyncio
async def test_a_cancelled_receive_loses_nothing(cluster: Cluster) -> None:
    topic = cluster.topic()
    told = await opened(cluster.source(topic), f"g-{topic}")
    await told.read_until(lambda: bool(told.lanes), "a lane")
    for number in range(20):
        receiving = asyncio.create_task(told.source.receive(2, LIMIT_SECONDS))
        await asyncio.sleep(0)
        cluster.send(topic, b"%d" % number)
        receiving.cancel()
        await asyncio.wait([receiving])
        if not receiving.cancelled():
            told.messages += receiving.result()
    await told.read_until(lambda: len(told.messages) >= 20, "20 messages")
    assert told.bodies == [b"%d" % number for number in range(20)]
    await told.source.close()


@pytest.mark.asyncio
async def test_headers_and_bodies_without_a_value(cluster: Cluster) -> None:
    topic = cluster.topic()
    cluster.send(topic, None, headers=[("tenant", None), ("type", b"card.removed"), ("type", b"again")])
    told = await opened(cluster.source(topic), f"g-{topic}")
    (message,) = await told.read(1)
    assert (message.body, message.headers) == (b"", [("type", b"card.removed"), ("type", b"again")])
    assert message.place == f"{topic}/0/0"
    await told.source.close()


# With the new protocol the broker waits for the end of a session of 45 s.
@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.long)])
@pytest.mark.asyncio
async def test_a_consumer_that_asks_for_nothing_loses_its_lanes(cluster: Cluster, protocol: str) -> None:
    """Its settles after that are not committed: another consumer has the lanes."""
    topic = cluster.topic()
    group = f"g-{topic}"
    properties = {"group.protocol": protocol, "max.poll.interval.ms": 2000}
    if protocol == "classic":
        properties["session.timeout.ms"] = 2000
    cluster.send(topic, b"1", b"2", b"3")
    first = await opened(cluster.source(topic, properties=properties), group)
    messages = await first.read(3)
    second = await opened(cluster.source(topic, properties={"group.protocol": protocol}), group)
    again = await second.read(3)
    assert [message.body for message in again] == [b"1", b"2", b"3"]
    second.settle(again[:1])
    first.settle(messages)
    await second.source.close()
    await first.read_until(lambda: bool(first.gone), "the loss")
    assert first.gone == [messages[0].lane]
    await first.source.close()
    assert cluster.committed(topic, group) == 1


@BOTH
@pytest.mark.asyncio
async def test_a_revocation_does_not_wait_for_ever(
    cluster: Cluster, protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reader, "REVOKE_SECONDS", 0.2)
    topic, properties = cluster.topic(2), {"group.protocol": protocol}
    group = f"g-{topic}"
    first = await opened(cluster.source(topic, properties=properties), group)
    await first.read_until(lambda: len(first.lanes) == 2, "both lanes")

    async def hang(lanes: Sequence[Lane]) -> None:
        await asyncio.Event().wait()

    first.on_revoke = hang
    second = await opened(cluster.source(topic, properties=properties), group)

    async def one() -> None:
        await asyncio.gather(first.receive(), second.receive())

    await until(one, lambda: len(first.gone) == 1 and len(second.lanes) == 1)
    assert said(caplog) == ["kafka_revoke_unfinished"]
    await asyncio.gather(first.source.close(), second.source.close())


@pytest.mark.asyncio
async def test_rebalances_all_the_time_deliver_what_is_settled_once(cluster: Cluster) -> None:
    """A second consumer joins and leaves five times while messages come."""
    topic = cluster.topic(4)
    group = f"g-{topic}"
    settled: list[bytes] = []

    async def take(told: Told) -> None:
        found = await told.receive()
        settled.extend(message.body for message in found if message.lane in told.lanes)
        told.settle(message for message in found if message.lane in told.lanes)

    first = await opened(cluster.source(topic), group)
    for number in range(5):
        for partition in range(4):
            cluster.send(topic, b"%d/%d" % (partition, number), partition=partition)
        second = await opened(cluster.source(topic), group)

        async def both(second: Told = second) -> None:
            await asyncio.gather(take(first), take(second))

        await until(both, lambda second=second: len(second.lanes) == 2)  # type: ignore[misc]
        await second.source.close()
    await until(lambda: take(first), lambda: len(settled) >= 20)
    await first.source.close()
    assert sorted(settled) == sorted(b"%d/%d" % (part, number) for part in range(4) for number in range(5))


CHILD = """
import asyncio, sys
from pillarbox.sources.kafka import KafkaSource

class Lanes:
    def assigned(self, lanes): print("assigned", flush=True)
    async def revoked(self, lanes): print("revoked", flush=True)
    def lost(self, lanes): print("lost", flush=True)
    def failed(self, lane, error): print(error, flush=True)

async def main():
    servers, topic, group = sys.argv[1:]
    source = KafkaSource(servers=servers, topic=topic, properties={"session.timeout.ms": 1500})
    await source.open(group, Lanes())
    while True:
        for message in await source.receive(100, 0.2):
            print("message", flush=True)
            source.settle(message.lane, message.position)

asyncio.run(main())
"""


def start(*arguments: str) -> tuple[subprocess.Popen[str], IO[str]]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, child.stdout


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for each in started:
        each.kill()
        each.communicate()


@pytest.mark.asyncio
async def test_a_process_that_stops_for_longer_than_its_session(
    cluster: Cluster, children: list[subprocess.Popen[str]]
) -> None:
    topic = cluster.topic()
    group = f"g-{topic}"
    child, lines = start(cluster.servers, topic, group)
    children.append(child)
    assert await asyncio.to_thread(lines.readline) == "assigned\n"
    os.kill(child.pid, signal.SIGSTOP)
    told = await opened(cluster.source(topic), group)
    cluster.send(topic, b"1")
    told.settle(await told.read(1))
    os.kill(child.pid, signal.SIGCONT)

    async def hear() -> str:
        reading = asyncio.create_task(asyncio.to_thread(lines.readline))
        while not reading.done():
            await told.receive()
        return reading.result()

    # A fetch that was under way when it was stopped may be answered before the group tells it of the loss.
    while (heard := await hear()) == "message\n":
        pass
    assert heard == "lost\n"
    await told.source.close()
    cluster.send(topic, b"2")
    assert await asyncio.to_thread(lines.readline) == "assigned\n"
    assert await asyncio.to_thread(lines.readline) == "message\n"


FORGETFUL = """
import asyncio, gc, sys
from pillarbox.sources.kafka import KafkaSource

class Lanes:
    def assigned(self, lanes): print("assigned", flush=True)
    async def revoked(self, lanes): ...
    def lost(self, lanes): ...
    def failed(self, lane, error): ...

async def main():
    servers, topic, group = sys.argv[1:]
    source = KafkaSource(servers=servers, topic=topic)
    await source.open(group, Lanes())
    await source.receive(1, 30)

asyncio.run(main())
gc.collect()
print("alive", flush=True)
"""


@pytest.mark.asyncio
async def test_a_source_that_was_not_closed_does_not_hold_its_process(cluster: Cluster) -> None:
    topic = cluster.topic()
    cluster.send(topic, b"1")
    command = [sys.executable, "-W", "always", "-c", FORGETFUL, cluster.servers, topic, f"g-{topic}"]
    ended = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True
    )
    assert ended.stdout.splitlines() == ["assigned", "alive"]
    assert "was not closed" in ended.stderr


async def until(step: Callable[[], Awaitable[None]], is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not is_so():
            await step()
