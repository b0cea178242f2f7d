import asyncio
import logging
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import admin as confluent_admin

from pillarbox.batch import Batch
from pillarbox.envelopes import Envelope, Message, default_headers
from pillarbox.errors import ConfigError, Outage
from pillarbox.event import NO_HEADERS, Event, Status
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Publisher, Result
from pillarbox.publishers.kafka import KafkaPublisher
from pillarbox.publishers.kafka import sender as kafka_sender
from pillarbox.publishers.kafka import topics as kafka_topics
from pillarbox.relay import OnDead, Stream
from pillarbox.relay.destination import publisher_of
from pillarbox.urls import publisher_from_url
from servers import Kafka, KafkaCluster
from servers.fixtures import OwnServer

pytestmark = pytest.mark.asyncio

NOW = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
SERVERS = "127.0.0.1:9092"
kafka_admin: Any = confluent_admin  # its types leave out what it exports


class Record(NamedTuple):
    partition: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]
    timestamp: int


class Cluster:
    """Topics and records of the broker, read without the publisher."""

    def __init__(self, server: Kafka | KafkaCluster, **login: str) -> None:
        self.servers = server.bootstrap_servers
        self._config: dict[str, Any] = {"bootstrap.servers": self.servers, "log_level": 0, **login}
        self._admin = kafka_admin.AdminClient(self._config)

    def topic(self, partitions: int = 1, *, replicas: list[list[int]] | None = None, **config: object) -> str:
        name = f"t-{uuid.uuid4().hex[:12]}"
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        new = (
            kafka_admin.NewTopic(name, replica_assignment=replicas, num_partitions=len(replicas), config=settings)
            if replicas
            else kafka_admin.NewTopic(name, partitions, 1, config=settings)
        )
        while True:
            try:
                self._admin.create_topics([new])[name].result()
            except KafkaException as error:
                code = error.args[0].code()
                if code == KafkaError._DESTROY_BROKER:
                    continue  # the client asked a broker that another test has killed
                if code != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
            return name

    def delete(self, *topics: str) -> None:
        for answer in self._admin.delete_topics(list(topics)).values():
            answer.result()

    def read(self, topic: str) -> list[Record]:
        """All records, partition by partition."""
        consumer = Consumer({**self._config, "group.id": "test", "enable.auto.commit": False})
        records = []
        try:
            for partition in consumer.list_topics(topic, timeout=10).topics[topic].partitions:
                start, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
                consumer.assign([TopicPartition(topic, partition, start)])
                while start < end:
                    message: Any = consumer.poll(10)
                    assert message is not None, f"{topic} ends before its end at {end}"
                    assert message.error() is None
                    start = message.offset() + 1
                    headers = message.headers() or []
                    stamp = message.timestamp()[1]
                    records.append(Record(partition, message.key(), message.value(), dict(headers), stamp))
        finally:
            consumer.close()
        return records

    def read_to_end(self, topic: str) -> list[Record]:
        """All records that are committed. The last place of a partition may have none: the marker of a transaction."""
        consumer = Consumer(
            {**self._config, "group.id": "test", "enable.auto.commit": False, "enable.partition.eof": True}
        )
        records = []
        try:
            for partition in consumer.list_topics(topic, timeout=10).topics[topic].partitions:
                consumer.assign([TopicPartition(topic, partition, 0)])
                while True:
                    message: Any = consumer.poll(10)
                    assert message is not None, f"{topic} gives nothing"
                    if message.error() is not None:
                        assert message.error().code() == KafkaError._PARTITION_EOF
                        break
                    stamp, headers = message.timestamp()[1], dict(message.headers() or [])
                    records.append(Record(partition, message.key(), message.value(), headers, stamp))
        finally:
            consumer.close()
        return records


class Signals(logging.Handler):
    """Lets a test await what the publisher logs."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        def note() -> None:
            self.actions[getattr(record, "action", "")] += 1
            self._tell = self._loop.create_task(self._notify())

        self._loop.call_soon_threadsafe(note)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, action: str) -> None:
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: self.actions[action] > 0)


@pytest.fixture
def cluster(kafka: Kafka) -> Cluster:
    return Cluster(kafka)


@pytest_asyncio.fixture
async def signals(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Signals]:
    monkeypatch.setattr(kafka_sender, "QUIET_SECONDS", 0.3)
    handler = Signals()
    logger = logging.getLogger("pillarbox.publishers.kafka")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture
def limits_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster does not allow describing its topics, so only the broker refuses events."""
    monkeypatch.setattr(kafka_topics.Topics, "_rules", lambda _, names: {n: kafka_topics.Topic(n) for n in names})


Opened = Callable[..., Awaitable[KafkaPublisher]]


@pytest_asyncio.fixture
async def opened() -> AsyncIterator[Opened]:
    """Makes and opens publishers, and closes them after the test."""
    publishers = []

    async def make(cluster: Cluster, **arguments: Any) -> KafkaPublisher:
        publisher = KafkaPublisher(servers=cluster.servers, **{"topic": "*", **arguments})
        publishers.append(publisher)
        await publisher.open()
        return publisher

    yield make
    await asyncio.gather(*(publisher.close() for publisher in publishers))


def an_event(number: int = 0, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "id": uuid.uuid4(),
        "seq": number,
        "stream": "default",
        "tenant": "default",
        "topic": "",
        "type": "order.created",
        "aggregate_type": "order",
        "aggregate_id": str(number),
        "aggregate_version": None,
        "key": f"k{number % 10}",
        "routing_key": None,
        "payload": b"%d" % number,
        "content_type": "application/json",
        "schema_id": None,
        "schema_version": None,
        "occurred_at": NOW,
        "created_at": NOW,
        "attempts": 0,
        "max_attempts": None,
        "status": Status.PENDING,
        "headers": NO_HEADERS,
    }
    return Event(**{**fields, **changes})


def events(count: int, start: int = 0, **changes: Any) -> list[Event]:
    return [an_event(number, **changes) for number in range(start, start + count)]


def results(outcomes: Sequence[Outcome]) -> list[Result]:
    return [outcome.result for outcome in outcomes]


def in_order(records: list[Record]) -> bool:
    """Whether each key's numbers grow strictly on one partition: no disorder and no copy."""
    runs: dict[bytes | None, list[tuple[int, int]]] = defaultdict(list)
    for record in records:
        runs[record.key].append((record.partition, int(record.value or b"")))
    return all(len({partition for partition, _ in run}) == 1 and run == sorted(set(run)) for run in runs.values())


async def test_it_is_a_publisher() -> None:
    publisher = KafkaPublisher(servers=["a:9092", "b:9092"], topic="*", producers=2)
    assert isinstance(publisher, Publisher)
    assert publisher.description == "kafka a:9092,b:9092"
    assert publisher.features.calls == 2
    assert publisher.features.strict_keys
    assert not publisher.features.deduplicates


async def test_every_event_is_confirmed_and_in_order(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic(3)
    publisher = await opened(cluster, topic=topic)
    for start in (0, 1000):
        assert list(await publisher.publish(Batch.of(events(1000, start)))) == [PUBLISHED] * 1000
    records = cluster.read(topic)
    assert sorted(int(record.value or b"") for record in records) == list(range(2000))
    assert in_order(records)
    assert list(await publisher.publish(Batch.of([]))) == []


async def test_bytes_key_headers_and_time(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic, headers=lambda event: [*default_headers(event), ("region", b"eu")])
    event = an_event(key="ключ", payload=b'{"a":  1.0}\x00\xff')
    before = time.time() * 1000
    assert await publisher.publish(Batch.of([event, an_event(key=None, payload=b"")])) == [PUBLISHED] * 2
    record, empty = cluster.read(topic)
    assert record.key == "ключ".encode()
    assert record.value == b'{"a":  1.0}\x00\xff'
    assert record.headers == {**dict(default_headers(event)), "region": b"eu"}
    # The send time: a broker could refuse the event's own time, or delete the record at once.
    assert record.timestamp >= before - 1000
    assert (empty.key, empty.value) == (None, b"")


async def test_envelopes_by_name(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic, envelope="cloudevents", source="/shop")
    assert await publisher.publish(Batch.of([an_event()])) == [PUBLISHED]
    (record,) = cluster.read(topic)
    assert record.headers["ce_source"] == b"/shop"


async def test_a_single_event_does_not_linger(cluster: Cluster, opened: Opened) -> None:
    publisher = await opened(cluster, topic=cluster.topic(), properties={"linger.ms": 20_000})
    async with asyncio.timeout(10):
        assert await publisher.publish(Batch.of([an_event()])) == [PUBLISHED]


async def test_a_key_across_topics_keeps_its_order(cluster: Cluster, opened: Opened) -> None:
    first, second = cluster.topic(), cluster.topic()
    publisher = await opened(cluster, topic=first)
    batch = [an_event(n, key="k", topic="" if n % 4 < 2 else second) for n in range(12)]
    assert await publisher.publish(Batch.of(batch)) == [PUBLISHED] * 12
    assert [record.value for record in cluster.read(first)] == [b"0", b"1", b"4", b"5", b"8", b"9"]
    assert [record.value for record in cluster.read(second)] == [b"2", b"3", b"6", b"7", b"10", b"11"]


def is_waiting(outcome: Outcome) -> bool:
    return outcome.result is Result.RETRY and not outcome.charged and (outcome.after_seconds or 0) >= 1


async def test_an_event_whose_topic_is_missing_waits(
    cluster: Cluster, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic)
    batch = [an_event(0, key="a", topic="nowhere"), an_event(1, key="a"), an_event(2, key="b")]
    for _ in range(2):
        waiting, held, fine = await publisher.publish(Batch.of(batch))
        assert is_waiting(waiting)
        assert waiting.error == f"topic 'nowhere' does not exist on kafka {cluster.servers}; create it"
        assert held == UNTRIED
        assert fine == PUBLISHED
    assert [record.value for record in cluster.read(topic)] == [b"2", b"2"]
    assert caplog.text.count("events for topic 'nowhere' wait, uncharged") == 1


async def test_missing_topics_cost_the_others_one_question(
    cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a cluster that makes no topics by itself
    asked: list[list[str]] = []
    errors = kafka_topics.Topics._errors

    def counted(self: kafka_topics.Topics, names: Sequence[str]) -> dict[str, Any]:
        answers = errors(self, names)
        asked.append(sorted(names))  # a question that was not answered in time is asked again
        return answers

    by_name: Counter[str] = Counter()
    threads = set()

    list_topics = kafka_admin.AdminClient.list_topics

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        if "topic" in options:
            by_name[options["topic"]] += 1
            threads.add(threading.current_thread().name)
        return list_topics(self, *args, **options)

    monkeypatch.setattr(kafka_topics.Topics, "_errors", counted)
    monkeypatch.setattr(kafka_admin.AdminClient, "list_topics", noted)
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic)
    assert asked == [[topic]]
    # When events for 60 missing topics stand among others
    missing = [f"missing-{number:02}" for number in range(60)]
    batch = [an_event(n, key=f"k{n}", topic=missing[n // 2] if n % 2 else "") for n in range(120)]
    monkeypatch.setattr(kafka_topics, "MISSING_SECONDS", (3600.0, 3600.0))
    for _ in range(5):
        outcomes = await publisher.publish(Batch.of(batch))
        # Then each call confirms the others at once
        assert [outcome == PUBLISHED for outcome in outcomes] == [n % 2 == 0 for n in range(120)]
        assert all(is_waiting(outcome) for outcome in outcomes[1::2])
    # And one question was about all of them; they are asked for by name once, and elsewhere
    assert asked == [[topic], missing]
    await publisher.close()
    assert set(by_name.values()) <= {1}
    assert threads <= {"pillarbox-kafka-topics"}


async def test_an_impossible_topic_name_is_rejected(cluster: Cluster, opened: Opened) -> None:
    publisher = await opened(cluster)
    (refused,) = await publisher.publish(Batch.of([an_event(topic="no topic!")]))
    assert refused.result is Result.REJECTED
    assert "is not a name" in str(refused.error)


async def test_a_missing_default_topic_is_an_outage(cluster: Cluster, opened: Opened) -> None:
    name = f"t-{uuid.uuid4().hex[:12]}"
    publisher = await opened(cluster, topic=name)
    own = cluster.topic()
    down, untried, fine = await publisher.publish(Batch.of([an_event(1), an_event(1), an_event(2, topic=own)]))
    assert down.is_outage
    assert down.error == f"topic {name!r} does not exist on kafka {cluster.servers}; create it"
    assert untried == UNTRIED
    assert fine == PUBLISHED


async def test_a_topic_that_appears_is_used(cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_topics, "MISSING_SECONDS", (0.0, 0.0))
    publisher = await opened(cluster)
    name = f"t-{uuid.uuid4().hex[:12]}"
    (waiting,) = await publisher.publish(Batch.of([an_event(topic=name)]))
    assert is_waiting(waiting)
    cluster._admin.create_topics([kafka_admin.NewTopic(name, 1, 1)])[name].result()
    assert await publisher.publish(Batch.of([an_event(topic=name)])) == [PUBLISHED]


async def test_a_cluster_that_makes_topics_makes_this_one(
    own_server: OwnServer, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_topics, "MISSING_SECONDS", (0.0, 0.0))
    cluster = Cluster(own_server(Kafka, settings={"auto.create.topics.enable": "true"}))
    publisher = await opened(cluster)
    batch = Batch.of([an_event(topic="new")])
    async with asyncio.timeout(30):
        while (outcomes := await publisher.publish(batch)) != [PUBLISHED]:
            assert is_waiting(outcomes[0])
    assert len(cluster.read("new")) == 1


async def test_a_topic_that_disappears(cluster: Cluster, opened: Opened) -> None:
    default, own, other = cluster.topic(), cluster.topic(), cluster.topic()
    properties = {"topic.metadata.propagation.max.ms": 1000}
    publisher = await opened(cluster, topic=default, producers=1, properties=properties)
    batch = [an_event(0), an_event(1, topic=own), an_event(2, topic=other)]
    assert await publisher.publish(Batch.of(batch)) == [PUBLISHED] * 3
    cluster.delete(default, own)
    for noticed in (False, True):
        down, waiting, fine = await publisher.publish(Batch.of(batch))
        # At first the client may only see that its partition is gone.
        assert down.is_outage or (not noticed and down.result is Result.RETRY and not down.charged)
        assert is_waiting(waiting) or (not noticed and waiting.result is Result.RETRY and not waiting.charged)
        assert fine == PUBLISHED


async def test_an_event_without_any_topic_waits(
    cluster: Cluster, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = await opened(cluster, topic="*")
    waiting, fine = await publisher.publish(Batch.of([an_event(1), an_event(2, topic=cluster.topic())]))
    assert is_waiting(waiting)
    assert "the event has no topic" in str(waiting.error)
    assert fine == PUBLISHED
    assert "events for topic '' wait, uncharged: the event has no topic" in caplog.text


@pytest.mark.parametrize(
    ("topic", "said"),
    [("", r"no Kafka topic is given; .*topic=\*"), ("no topic!", "'no topic!' is not a name"), ("..", "not a name")],
)
async def test_a_publisher_without_a_usable_topic_is_refused(topic: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        KafkaPublisher(servers=SERVERS, topic=topic)
    with pytest.raises(ConfigError, match=said):
        publisher_from_url(f"kafka://{SERVERS}?topic={topic}")


async def test_a_topic_with_a_small_limit_takes_many_small_events(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic(max_message_bytes=2000)
    publisher = await opened(cluster, topic=topic)
    assert await publisher.publish(Batch.of(events(200))) == [PUBLISHED] * 200
    assert in_order(cluster.read(topic))


async def test_too_large_is_rejected_and_its_neighbours_are_unharmed(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic(max_message_bytes=5000)
    publisher = await opened(cluster, topic=topic)
    batch = events(200)
    batch[50] = an_event(50, key="big", payload=b"x" * 5000)
    batch[51] = an_event(51, key="big")
    outcomes = await publisher.publish(Batch.of(batch))
    assert outcomes[50].result is Result.REJECTED
    assert f"topic {topic!r} at most 5000" in str(outcomes[50].error)
    assert outcomes[51] == UNTRIED
    assert outcomes.count(PUBLISHED) == 198
    assert in_order(cluster.read(topic))


async def test_the_limit_is_met_to_the_byte(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic(max_message_bytes=100_000)
    publisher = await opened(cluster, topic=topic)
    (refused,) = await publisher.publish(Batch.of([an_event(payload=b"x" * 100_000)]))
    excess = int(str(refused.error).split()[3]) - 100_000
    assert await publisher.publish(Batch.of([an_event(payload=b"x" * (100_000 - excess))])) == [PUBLISHED]
    assert results(await publisher.publish(Batch.of([an_event(payload=b"x" * (100_001 - excess))]))) == [
        Result.REJECTED
    ]
    assert len(cluster.read(topic)) == 1


async def test_topics_with_different_limits(cluster: Cluster, opened: Opened) -> None:
    small, large = cluster.topic(max_message_bytes=2000), cluster.topic(max_message_bytes=3_000_000)
    publisher = await opened(cluster, topic=small)
    batch = [*events(100), an_event(100, key="l", topic=large, payload=b"1" * 2_900_000)]
    assert await publisher.publish(Batch.of(batch)) == [PUBLISHED] * 101


async def test_large_headers_are_found_by_the_broker(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic(max_message_bytes=5000)
    publisher = await opened(cluster, topic=topic, headers=lambda e: [("h", b"x" * (6000 if e.seq == 5 else 1))])
    outcomes = await publisher.publish(Batch.of(events(30)))
    assert [n for n, each in enumerate(outcomes) if each.result is Result.REJECTED] == [5]
    assert [n for n, each in enumerate(outcomes) if each == UNTRIED] == [15, 25]
    assert in_order(cluster.read(topic))


async def test_the_broker_decides_about_compressed_events(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic(max_message_bytes=5000)
    publisher = await opened(cluster, topic=topic, properties={"compression.type": "gzip"})
    noise = b"".join(uuid.uuid4().bytes for _ in range(1000))
    batch = [an_event(0, key="a", payload=b"1" * 50_000), an_event(1, key="b", payload=noise)]
    assert results(await publisher.publish(Batch.of(batch))) == [Result.PUBLISHED, Result.REJECTED]


async def test_no_key_in_a_compacted_topic_is_rejected(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic(cleanup_policy="compact")
    publisher = await opened(cluster, topic=topic)
    refused, fine = await publisher.publish(Batch.of([an_event(0, key=None), an_event(1)]))
    assert refused.result is Result.REJECTED
    assert "compacted" in str(refused.error)
    assert fine == PUBLISHED


@pytest.mark.usefixtures("limits_unknown")
async def test_only_the_bad_event_of_a_refused_batch_dies(cluster: Cluster, opened: Opened) -> None:
    # Given a compacted topic, and a cluster that does not say so
    topic = cluster.topic(cleanup_policy="compact")
    publisher = await opened(cluster, topic=topic, producers=1)
    # When two events without a key stand among legal ones, in one record batch
    batch = events(100, 1)
    batch[30] = an_event(31, key=None)
    batch[60] = an_event(61, key=None)
    outcomes = await publisher.publish(Batch.of(batch))
    # Then the broker refuses them all, and in the end only those two
    assert [n for n, each in enumerate(outcomes) if each.result is Result.REJECTED] == [30, 60]
    assert list(outcomes).count(PUBLISHED) == 98
    assert "refused the event" in str(outcomes[30].error)
    assert in_order(cluster.read(topic))
    assert await publisher.publish(Batch.of(events(10, 200))) == [PUBLISHED] * 10


@pytest.mark.usefixtures("limits_unknown")
async def test_a_refused_batch_is_not_overtaken(cluster: Cluster, opened: Opened) -> None:
    # Given small batches, so that many are in flight when one is refused
    topic = cluster.topic(max_message_bytes=5000)
    publisher = await opened(cluster, topic=topic, producers=1, properties={"batch.num.messages": 10})
    batch = events(300, 1)
    batch[45] = an_event(46, key="big", payload=b"1" * 6000)
    batch[250] = an_event(251, key="big")
    outcomes = await publisher.publish(Batch.of(batch))
    assert results(outcomes)[45] is Result.REJECTED
    assert outcomes[250] == UNTRIED
    assert list(outcomes).count(PUBLISHED) == 298
    assert in_order(cluster.read(topic))


@pytest.mark.usefixtures("limits_unknown")
@pytest.mark.parametrize("strict_keys", [True, False])
async def test_nothing_follows_a_refused_event_of_its_key(cluster: Cluster, opened: Opened, strict_keys: bool) -> None:
    topic = cluster.topic(max_message_bytes=5000)
    publisher = await opened(cluster, topic=topic, producers=1, strict_keys=strict_keys)
    batch = [an_event(n, key="k", payload=b"1" * 6000 if n == 3 else b"%d" % n) for n in range(1, 7)]
    assert results(await publisher.publish(Batch.of(batch))) == [
        *[Result.PUBLISHED] * 2,
        Result.REJECTED,
        *[Result.UNTRIED] * 3,
    ]
    assert [record.value for record in cluster.read(topic)] == [b"1", b"2"]


async def test_strict_keys_delivers_in_order(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic(3)
    publisher = await opened(cluster, topic=topic, strict_keys=True)
    assert await publisher.publish(Batch.of(events(200))) == [PUBLISHED] * 200
    assert in_order(cluster.read(topic))


@pytest.fixture
def waves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of events that were sent before their reports were awaited."""
    sizes = []
    produce = kafka_sender.Sender._produce

    def noted(self: Any, *arguments: Any) -> Any:
        sent, later = produce(self, *arguments)
        sizes.append(len(sent))
        return sent, later

    monkeypatch.setattr(kafka_sender.Sender, "_produce", noted)
    return sizes


@pytest.mark.parametrize("by_url", [True, False])
async def test_a_stream_that_holds_keys_gets_strict_keys(cluster: Cluster, waves: list[int], by_url: bool) -> None:
    topic = cluster.topic()
    url, shared = f"kafka://{cluster.servers}?topic={topic}", KafkaPublisher(servers=cluster.servers, topic=topic)
    for policy, expected in (("block", [1, 1, 1]), ("park", [1, 1, 1]), ("skip", [3])):
        publisher = publisher_of(Stream("default", url if by_url else shared, on_dead=OnDead(policy)))
        waves.clear()
        await publisher.open()
        assert await publisher.publish(Batch.of(events(3, key="k"))) == [PUBLISHED] * 3
        await publisher.close()
        assert waves == expected


async def test_a_header_builder_named_in_the_url(cluster: Cluster) -> None:
    topic = cluster.topic()
    publisher = publisher_from_url(f"kafka://{cluster.servers}?topic={topic}&headers=pillarbox.envelopes:event_headers")
    await publisher.open()
    assert await publisher.publish(Batch.of([an_event(headers={"region": "eu"})])) == [PUBLISHED]
    await publisher.close()
    (record,) = cluster.read(topic)
    assert record.headers == {"region": b"eu"}


async def test_an_envelope_of_ones_own(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic()
    by_id = await opened(cluster, topic=topic, envelope=lambda event: Message(event.id.bytes, b"v", []))
    framed = await opened(cluster, topic=topic, envelope=Framed())
    event = an_event(payload=b"1")
    for publisher in (by_id, framed):
        assert await publisher.publish(Batch.of([event])) == [PUBLISHED]
    first, second = cluster.read(topic)
    assert (first.key, first.value) == (event.id.bytes, b"v")
    assert (second.key, second.value) == (b"k0", b"\x001")


class Framed(Envelope):
    def body(self, event: Event) -> bytes:
        return b"\x00" + event.payload


async def test_a_failing_header_builder_rejects_only_its_event(cluster: Cluster, opened: Opened) -> None:
    def headers(event: Event) -> list[tuple[str, bytes]]:
        return [("n", b"1" if event.seq != 1 else str(1 / 0).encode())]

    publisher = await opened(cluster, topic=cluster.topic(), headers=headers)
    fine, refused = await publisher.publish(Batch.of([an_event(0), an_event(1, payload=b"secret")]))
    assert fine == PUBLISHED
    assert refused.result is Result.REJECTED
    assert "ZeroDivisionError" in str(refused.error)
    assert "secret" not in str(refused.error)


async def test_more_calls_than_producers(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic(2)
    publisher = await opened(cluster, topic=topic, producers=2)
    calls = [publisher.publish(Batch.of([an_event(n, key=f"c{call}") for n in range(50)])) for call in range(8)]
    assert all(list(outcomes) == [PUBLISHED] * 50 for outcomes in await asyncio.gather(*calls))
    assert in_order(cluster.read(topic))


async def test_a_queue_that_is_full_is_worked_off(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic, properties={"queue.buffering.max.messages": 100})
    assert await publisher.publish(Batch.of(events(1000))) == [PUBLISHED] * 1000
    assert in_order(cluster.read(topic))


async def test_closed_and_never_opened(cluster: Cluster, opened: Opened) -> None:
    publisher = KafkaPublisher(servers=cluster.servers, topic=cluster.topic())
    assert (await publisher.publish(Batch.of([an_event()])))[0].is_outage
    await publisher.open()
    await publisher.open()
    await publisher.close()
    await publisher.close()
    assert await publisher.publish(Batch.of([an_event()])) == [UNTRIED]
    await publisher.open()
    assert await publisher.publish(Batch.of([an_event()])) == [PUBLISHED]
    await publisher.close()


async def test_a_broker_that_is_away_at_open() -> None:
    publisher = KafkaPublisher(servers="127.0.0.1:1", topic="t", connect_timeout=0.5)
    with pytest.raises(Outage, match=r"kafka 127.0.0.1:1 cannot be reached: .*; the relay tries again"):
        await publisher.open()
    await publisher.close()


async def test_a_killed_broker_costs_nothing(own_server: OwnServer, opened: Opened, signals: Signals) -> None:
    # Given a broker that dies while batches are in flight
    server = own_server(Kafka)
    cluster = Cluster(server)
    topic = cluster.topic(2)
    publisher = await opened(cluster, topic=topic)

    async def one_shard(shard: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        is_last = False
        while not is_last:
            is_last = killed.is_set()
            first = len(outcomes)
            batch = [an_event(n, key=f"s{shard}-{n % 5}") for n in range(first, first + 100)]
            outcomes += await publisher.publish(Batch.of(batch))
            first_done.set()
        return outcomes

    first_done, killed = asyncio.Event(), asyncio.Event()
    work = asyncio.gather(*(one_shard(shard) for shard in range(4)))
    await first_done.wait()
    await asyncio.to_thread(server.kill)
    killed.set()
    await signals.wait_for("destination_silent")
    # When it comes back
    await asyncio.to_thread(server.restart)
    # Then nothing is lost, doubled or out of order
    outcomes = [outcome for each in await work for outcome in each]
    assert set(outcomes) == {PUBLISHED}
    records = cluster.read(topic)
    assert len(records) == len(outcomes)
    assert in_order(records)
    assert signals.actions["destination_silent"] == signals.actions["destination_back"] > 0


async def test_a_paused_broker_is_waited_for(own_server: OwnServer, opened: Opened, signals: Signals) -> None:
    server = own_server(Kafka)
    cluster = Cluster(server)
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic)
    assert await publisher.publish(Batch.of(events(10))) == [PUBLISHED] * 10
    server.pause()
    call = asyncio.create_task(publisher.publish(Batch.of(events(100, 10))))
    await signals.wait_for("destination_silent")
    assert not call.done()
    server.resume()
    assert await call == [PUBLISHED] * 100
    await signals.wait_for("destination_back")
    assert signals.actions == {"destination_silent": 1, "destination_back": 1}
    records = cluster.read(topic)
    assert len(records) == 110
    assert in_order(records)


async def test_close_ends_the_wait_for_a_dead_broker(own_server: OwnServer, opened: Opened, signals: Signals) -> None:
    server = own_server(Kafka)
    cluster = Cluster(server)
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic, producers=1)
    assert await publisher.publish(Batch.of(events(10))) == [PUBLISHED] * 10
    await asyncio.to_thread(server.kill)
    waiting = [asyncio.create_task(publisher.publish(Batch.of(events(10, 10)))) for _ in range(3)]
    await signals.wait_for("destination_silent")
    async with asyncio.timeout(10):
        await publisher.close()
        for call in waiting:
            assert await call == [UNTRIED] * 10


async def test_a_cancelled_call_leaves_a_usable_sender(own_server: OwnServer, opened: Opened, signals: Signals) -> None:
    server = own_server(Kafka)
    cluster = Cluster(server)
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic, producers=1)
    assert await publisher.publish(Batch.of([an_event(0)])) == [PUBLISHED]
    await asyncio.to_thread(server.kill)
    call = asyncio.create_task(publisher.publish(Batch.of(events(10, 1))))
    await signals.wait_for("destination_silent")
    call.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await call
    await asyncio.to_thread(server.restart)
    assert await publisher.publish(Batch.of(events(10, 11))) == [PUBLISHED] * 10
    records = cluster.read(topic)
    assert [record.value for record in records] == [b"%d" % n for n in (0, *range(11, 21))]


async def test_a_stuck_partition_holds_only_its_keys(own_server: OwnServer, opened: Opened) -> None:
    # Given two partitions on two brokers, and the second broker dead
    server = own_server(KafkaCluster)
    cluster = Cluster(server)
    topic = cluster.topic(replicas=[[1], [2]], min_insync_replicas=1)
    publisher = await opened(cluster, topic=topic, stuck=2)
    assert await publisher.publish(Batch.of(events(20))) == [PUBLISHED] * 20
    stuck = {record.key for record in cluster.read(topic) if record.partition == 1}
    assert 0 < len(stuck) < 10
    await asyncio.to_thread(server.nodes[1].kill)
    # When events of both are published
    batch = events(30, 20)
    outcomes = await publisher.publish(Batch.of(batch))
    # Then those of the living partition are published; each key of the dead one waits, uncharged
    seen: set[str | None] = set()
    for event, outcome in zip(batch, outcomes, strict=True):
        if str(event.key).encode() not in stuck:
            assert outcome == PUBLISHED
        elif event.key in seen:
            assert outcome == UNTRIED
        else:
            assert outcome.result is Result.RETRY
            assert not outcome.charged
        seen.add(event.key)
    # And after its return they can be published
    await asyncio.to_thread(server.nodes[1].restart)
    rest = [event for event in batch if str(event.key).encode() in stuck]
    assert await publisher.publish(Batch.of(rest)) == [PUBLISHED] * len(rest)
    records = cluster.read(topic)
    assert len(records) == 50
    assert in_order(records)


GUARDED = {
    "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN",
    "sasl.mechanism.inter.broker.protocol": "PLAIN",
    "listener.name.plaintext.plain.sasl.jaas.config": (
        "org.apache.kafka.common.security.plain.PlainLoginModule required "
        'username="admin" password="pw" user_admin="pw" user_app="pw";'
    ),
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:admin;User:ANONYMOUS",
}


async def test_refusals_of_a_guarded_cluster(own_server: OwnServer, signals: Signals) -> None:
    server = own_server(Kafka, settings=GUARDED)
    login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.password": "pw"}
    cluster = Cluster(server, **login, **{"sasl.username": "admin"})
    topic = cluster.topic()

    def publisher(user: str, password: str, default: str = "*") -> KafkaPublisher:
        address = server.bootstrap_servers
        options = "security.protocol=SASL_PLAINTEXT"
        return KafkaPublisher.from_url(f"kafka://{user}:{password}@{address}?topic={default}&{options}")

    wrong = publisher("app", "guess")
    with pytest.raises(Outage, match="Authentication failed") as caught:
        await wrong.open()
    assert "guess" not in str(caught.value) + wrong.description
    app = publisher("app", "pw", default=topic)
    await app.open()
    down, waiting = await app.publish(Batch.of([an_event(1), an_event(2, topic=topic)]))
    assert down.is_outage
    assert is_waiting(waiting)
    for outcome in (down, waiting):
        assert f"topic {topic!r} on kafka {server.bootstrap_servers} may not be written" in str(outcome.error)
    await app.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", 1),
        ("request.required.acks", "0"),
        ("enable.idempotence", False),
        ("enable.idempotence", "false"),
        ("enable.gapless.guarantee", False),
        ("message.timeout.ms", 3000),
        ("delivery.timeout.ms", "3000"),
        ("retries", 3),
        ("message.send.max.retries", 2147483647),
        ("max.in.flight", 6),
        ("delivery.report.only.error", True),
        ("transactional.id", "x"),
        ("partitioner", "random"),
        ("bootstrap.servers", "x:1"),
        ("on_delivery", print),
    ],
)
async def test_properties_that_break_a_promise_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"Kafka property {name}=.* is refused; "):
        KafkaPublisher(servers=SERVERS, topic="t", properties={name: value})


async def test_harmless_properties_pass() -> None:
    KafkaPublisher(
        servers=SERVERS,
        topic="t",
        properties={
            "acks": "all",
            "enable.idempotence": "true",
            "message.timeout.ms": 0,
            "partitioner": "fnv1a_random",
            "max.in.flight": 1,
            "linger.ms": 5,
        },
    )


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"linger.mz": 5}, r"No such configuration property: \"linger\.mz\""),
        ({"linger.ms": "soon"}, "queue.buffering.max.ms"),
        ({"security.protocol": "ssl", "ssl.ca.location": "/nowhere/ca.pem"}, "ssl.ca.location"),
        ({"security.protocol": "ssl", "ssl.certificate.location": "/nowhere/me.pem"}, "ssl.certificate.location"),
        ({"security.protocol": "ssl", "ssl.key.location": "/nowhere/me.key"}, "ssl.key.location"),
        ({"security.protocol": "sasl_ssl", "sasl.mechanism": "PLIAN"}, "Unsupported SASL mechanism: PLIAN"),
        ({"compression.type": object()}, "compression.codec"),
    ],
)
async def test_properties_with_which_the_client_cannot_work(properties: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await KafkaPublisher(servers=SERVERS, topic="t", properties=properties).open()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("kafka://h?topci=x", r"unknown option 'topci' in the Kafka URL; did you mean 'topic'\?"),
        ("kafka://h?zzz=x", "use one of: topic, envelope"),
        ("kafka://h?topic=t&producers=many", "producers='many' in the Kafka URL is not a number"),
        ("kafka://h?topic=t&producers=0", "producers=0 leaves nothing"),
        ("kafka://h?topic=t&strict_keys=perhaps", "strict_keys='perhaps'"),
        ("kafka://h?topic=t&stuck=0", "stuck is '0'; use 100ms to"),
        ("kafka://h?topic=t&connect_timeout=soon", "connect_timeout is 'soon'; use a duration such as"),
        ("kafka://h?topic=t&acks=1", "acks='1' is refused"),
        ("kafka://h?topic=t&headers=shop", "'shop' does not name a header builder; write MODULE:ATTRIBUTE"),
        ("kafka://h?topic=t&headers=pillarbox.envelopes:ENVELOPES", "is not a function from an event to its headers"),
        ("kafka://h?topic=t&headers=pillarbox.envelopes:event_header", r"did you mean 'event_headers'\?"),
        ("kafka://h?topic=t&envelope=row", r"did you mean 'raw'\?"),
        ("kafka://", "names no broker"),
        ("kafka://h/orders", "has a path"),
        ("amqp://h", "starts with kafka://, not amqp://"),
    ],
)
async def test_a_wrong_url_names_what_is_wrong(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KafkaPublisher.from_url(url)


async def test_a_url_with_everything(cluster: Cluster) -> None:
    topic = cluster.topic()
    publisher = KafkaPublisher.from_url(
        f"kafka://{cluster.servers}?topic={topic}&linger.ms=5&envelope=legacy&producers=2&strict_keys=true"
    )
    assert publisher.features.calls == 2
    await publisher.open()
    assert await publisher.publish(Batch.of([an_event(7)])) == [PUBLISHED]
    await publisher.close()
    (record,) = cluster.read(topic)
    assert b'"payload":7,' in (record.value or b"")


async def test_a_url_hides_its_password() -> None:
    publisher = KafkaPublisher.from_url("kafka://app:s3cret@one,[::1],two:9093?topic=t")
    assert publisher.description == "kafka one:9092,[::1]:9092,two:9093"


async def test_without_the_client_library_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['confluent_kafka'] = None; import pillarbox.publishers.kafka"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert "KafkaPublisher needs an extra; install it with: pip install 'pillarbox[kafka]'" in errors.decode()


async def test_headers_belong_to_a_named_envelope() -> None:
    with pytest.raises(ConfigError, match="give the header builder to your envelope"):
        KafkaPublisher(servers=SERVERS, topic="t", envelope=lambda event: None, headers=default_headers)  # type: ignore[arg-type,return-value]
