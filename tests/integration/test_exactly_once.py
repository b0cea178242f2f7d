"""Exactly once into Kafka: each event is in the topic once for those who read committed messages, whoever dies."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import pytest_asyncio
from confluent_kafka import Producer as ConfluentProducer
from confluent_kafka import TopicPartition

from pillarbox.batch import Batch, Part
from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError, Outage
from pillarbox.event import Event, Status
from pillarbox.publisher import PUBLISHED, UNTRIED, Place
from pillarbox.publishers.kafka import KafkaPublisher
from pillarbox.publishers.kafka import progress as kafka_progress
from pillarbox.publishers.kafka import topics as kafka_topics
from pillarbox.store import Store, batch_of, new_ticket
from pillarbox.stores.sqlite import SqliteStore
from servers import Kafka, KafkaCluster, MongoStandalone
from servers.fixtures import OwnServer
from tests.integration.relays import (
    STREAM,
    CircuitState,
    Outbox,
    RelayProcess,
    SqlOutbox,
    attempts,
    counts,
    eventually,
    execute,
    in_order,
    mixed,
    mongo_outbox,
    numbered,
    relay,
    settled,
    stream,
    until,
    worker_of,
)
from tests.integration.test_kafka_publisher import Cluster, kafka_admin

pytestmark = pytest.mark.asyncio

KEYS = ("ann", "bob", "eve", "joe")
EACH = 15
ALL = EACH * len(KEYS)
LEASE = 1.0
AWAY = "kafka://127.0.0.1:9?topic=orders&delivery=exactly-once"


class Topic:
    """A topic as a consumer sees it that reads committed messages."""

    def __init__(self, server: Kafka | KafkaCluster, partitions: int = 2, **config: Any) -> None:
        self.servers = server.bootstrap_servers
        self.admin = kafka_admin.AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        self.name = Cluster(server).topic(partitions, **config)
        self._reader = Cluster(server, **{"isolation.level": "read_committed"})

    def url(self, **options: object) -> str:
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"kafka://{self.servers}?topic={self.name}&delivery=exactly-once{more}"

    async def read(self) -> dict[str | None, list[int]]:
        """The numbers of the events by key, in the order of the topic."""
        found: dict[str | None, list[int]] = {}
        for record in await asyncio.to_thread(self._reader.read_to_end, self.name):
            key = None if record.key is None else record.key.decode()
            found.setdefault(key, []).append(json.loads(record.value or b"")["n"])
        return found

    async def has(self, wanted: dict[str | None, list[int]]) -> None:
        """A commit is answered before its messages can be read."""
        count = sum(map(len, wanted.values()))
        assert await eventually(self.read, lambda found: sum(map(len, found.values())) >= count) == wanted

    async def has_each_event_once(self) -> None:
        await self.has(in_order(KEYS, EACH))


@pytest.fixture
def topic(kafka: Kafka) -> Topic:
    return Topic(kafka)


@pytest_asyncio.fixture
async def store(sqlite: SqlOutbox) -> AsyncIterator[Store]:
    store = sqlite()
    await store.migrate()
    await store.open()
    yield store
    await store.close()


async def filled(outbox: Outbox) -> Store:
    store = outbox()
    await store.migrate()
    await store.open()
    await store.add(mixed(KEYS, EACH))
    return store


def process(
    store: Any, folder: Path, topic: Topic, number: signal.Signals, point: str, **settings: Any
) -> RelayProcess:
    order = {"to": topic.url(), "signal_at": [point, int(number)], "batch": 5, "lease": LEASE, **settings}
    return RelayProcess(store, folder / "ledger", **order)


async def served(store: Store, topic: Topic, wanted: dict[Status, int], **options: object) -> None:
    async with relay(store, stream(topic.url(**options), lease=LEASE)):
        await settled(store, wanted)


async def test_a_relay_that_dies_between_commit_and_settle_makes_no_copy(
    outbox: Outbox, topic: Topic, tmp_path: Path
) -> None:
    store = await filled(outbox)
    killed = process(store, tmp_path, topic, signal.SIGKILL, "transaction_committed").start()
    try:
        assert await killed.ended() == -signal.SIGKILL
    finally:
        killed.close()
    assert (await counts(store))[Status.PENDING] == ALL
    await served(store, topic, {Status.PUBLISHED: ALL})
    await topic.has_each_event_once()
    await store.close()


@pytest.mark.parametrize(
    "point",
    [
        "transaction_begun",
        "transaction_confirmed",
        pytest.param("shard_fenced", marks=pytest.mark.long),
        pytest.param("progress_read", marks=pytest.mark.long),
        pytest.param("transaction_sent", marks=pytest.mark.long),
    ],
)
async def test_a_relay_that_dies_at_any_point_makes_no_copy(
    sqlite: SqlOutbox, topic: Topic, tmp_path: Path, point: str
) -> None:
    store = await filled(sqlite)
    killed = process(store, tmp_path, topic, signal.SIGKILL, point).start()
    try:
        assert await killed.ended() == -signal.SIGKILL
    finally:
        killed.close()
    await served(store, topic, {Status.PUBLISHED: ALL})
    await topic.has_each_event_once()
    await store.close()


@pytest.mark.parametrize(
    "point",
    [
        "transaction_confirmed",
        pytest.param("transaction_begun", marks=pytest.mark.long),
        pytest.param("transaction_committed", marks=pytest.mark.long),
    ],
)
async def test_a_relay_that_was_frozen_makes_no_copy(
    sqlite: SqlOutbox, topic: Topic, tmp_path: Path, point: str
) -> None:
    store = await filled(sqlite)
    frozen = process(store, tmp_path, topic, signal.SIGSTOP, point).start()
    try:
        await asyncio.to_thread(os.waitid, os.P_PID, frozen.pid, os.WSTOPPED)
        await served(store, topic, {Status.PUBLISHED: ALL})
        frozen.send(signal.SIGCONT)
        await store.add(numbered("later", 3))
        async with relay(store, stream(topic.url(), lease=LEASE)):
            await settled(store, {Status.PUBLISHED: ALL + 3})
        frozen.send(signal.SIGTERM)
        await frozen.ended()
    finally:
        frozen.close()
    await topic.has(in_order(KEYS, EACH) | {"later": [1, 2, 3]})
    await store.close()


class Producer:
    """A publisher that serves one shard, without a relay."""

    def __init__(self, topic: Topic, identity: str, token: int, **options: Any) -> None:
        self.publisher = KafkaPublisher.from_url(topic.url(), **options)
        self.place = Place(identity, STREAM, 0, 4, token)

    async def recover(self) -> bytes:
        await self.publisher.open()
        return await self.publisher.recover(self.place)

    async def recovered(self) -> bool:
        """Whether it can publish now."""
        try:
            self.found = await self.recover()
        except Outage:
            return False
        return True

    async def publish(self, events: Sequence[Event], ticket: bytes = b"") -> Sequence[Any]:
        part = Part(0, self.place.token, events, ticket or new_ticket(events, None))
        return await self.publisher.publish(Batch(STREAM, [part]))


async def test_an_owner_that_lost_its_shard_is_fenced(topic: Topic) -> None:
    old, new = (Producer(topic, f"zombie-{topic.name}", token) for token in (1, 2))
    assert await old.recover() == b""
    events = numbered("ann", 3)
    ticket = new_ticket(events, None)
    assert await old.publish(events, ticket) == [PUBLISHED] * 3
    assert await new.recover() == ticket
    assert await old.publish(numbered("bob", 3)) == [UNTRIED] * 3
    assert await new.publish(numbered("eve", 2)) == [PUBLISHED] * 2
    for each in (old, new):
        await each.publisher.close()
    await topic.has({"ann": [1, 2, 3], "eve": [1, 2]})


async def test_nothing_is_published_before_a_recovery(topic: Topic) -> None:
    producer = Producer(topic, f"unready-{topic.name}", 1)
    await producer.publisher.open()
    assert await producer.publish(numbered("ann", 2)) == [UNTRIED] * 2
    await producer.recover()
    await producer.publisher.close()
    assert await topic.read() == {}


async def leader_of(servers: str, name: str) -> int:
    """The number of the node that leads the first partition; -1: none does."""
    admin = kafka_admin.AdminClient({"bootstrap.servers": servers, "log_level": 0})
    found = await asyncio.to_thread(admin.list_topics, name, 30)
    leader: int = found.topics[name].partitions[0].leader
    return leader


@pytest.mark.long
async def test_a_broker_that_was_frozen_hides_no_ticket(own_server: OwnServer) -> None:
    """It takes itself for the leader of what it knew, until it learns that it was replaced meanwhile."""
    cluster = own_server(KafkaCluster)
    topic = Topic(cluster, replicas=[[1, 2, 3]])
    identity = f"frozen-{topic.name}"
    first = Producer(topic, identity, 1)
    await first.recover()
    progress_topic = f"{identity}.{STREAM}.progress"
    leader = await leader_of(topic.servers, progress_topic)
    frozen = cluster.nodes[leader - 1]
    others = ",".join(node.address for node in cluster.nodes if node is not frozen)
    old, new = (Producer(topic, identity, token, servers=others) for token in (2, 3))
    await old.recover()
    known = new_ticket(events := numbered("ann", 1), None)
    assert await old.publish(events, known) == [PUBLISHED]
    frozen.pause()
    await eventually(lambda: leader_of(others, progress_topic), lambda number: number not in (leader, -1), 60)
    await eventually(new.recovered, seconds=60)
    assert new.found == known
    newest = new_ticket(events := numbered("ann", 1, first=2), batch_of(known))

    async def published() -> bool:
        return await new.recovered() and await new.publish(events, newest) == [PUBLISHED]

    await eventually(published, seconds=60)
    # When a client that knows the frozen node as the leader recovers, and the node goes on meanwhile
    old.place = old.place._replace(token=4)
    producers: Any = old.publisher._senders
    progress = producers._make(old.place)._progress
    read = progress.last

    def last(*arguments: Any) -> bytes:
        Timer(0.3, frozen.resume).start()
        ticket: bytes = read(*arguments)
        return ticket

    progress.last = last
    await eventually(old.recovered, seconds=60)
    assert old.found == newest
    for each in (first, old, new):
        await each.publisher.close()


async def test_a_recovery_writes_nothing_behind_an_open_transaction(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka can leave one open, and what the same producer commits next would commit it too, though it was aborted."""
    monkeypatch.setattr(kafka_progress, "_READ_SECONDS", 0.5)
    identity = f"open-{topic.name}"
    old, new = (Producer(topic, identity, token) for token in (1, 2))
    await old.recover()
    shard = TopicPartition(f"{identity}.{STREAM}.progress", 0)

    def end() -> int:
        (answer,) = topic.admin.list_offsets({shard: kafka_admin.OffsetSpec.latest()}).values()
        found: int = answer.result().offset
        return found

    stranger = ConfluentProducer({"bootstrap.servers": topic.servers, "transactional.id": f"{identity}-stranger"})
    stranger.init_transactions(10)
    stranger.begin_transaction()
    stranger.produce(shard.topic, b"nothing", b"key", shard.partition)
    stranger.flush(10)
    before = end()
    with pytest.raises(Outage, match="cannot be read to its end"):
        await new.recover()
    assert end() == before
    stranger.abort_transaction(10)
    assert await eventually(new.recovered)
    for each in (old, new):
        await each.publisher.close()


async def test_a_ticket_behind_many_transactions_is_found(topic: Topic) -> None:
    producer = Producer(topic, f"many-{topic.name}", 1)
    await producer.recover()
    ticket = b""
    for number in range(50):
        ticket = new_ticket(events := numbered("ann", 1, first=number + 1), None)
        assert await producer.publish(events, ticket) == [PUBLISHED]
    await producer.publisher.close()
    again = Producer(topic, f"many-{topic.name}", 2)
    assert await again.recover() == ticket
    await again.publisher.close()


@pytest.mark.parametrize("known", [True, False], ids=["limit-known", "limit-unknown"])
async def test_a_refused_event_dies_alone(
    kafka: Kafka, store: Store, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    topic = Topic(kafka, 1, max_message_bytes=2000)
    if not known:
        # Then only the broker refuses it, with all records of its batch.
        monkeypatch.setattr(
            kafka_topics.Topics, "_rules_of", lambda _self, name, _answer: kafka_topics.Topic(name, 1_000_000)
        )
    large = make_event(stream=STREAM, key="bob", payload=json.dumps({"n": 2, "x": "x" * 3000}).encode())
    events = [*numbered("ann", 4), *numbered("bob", 1), large, *numbered("eve", 4), *numbered("bob", 1, first=3)]
    await store.add(events)
    await served(store, topic, {Status.PUBLISHED: 10, Status.DEAD: 1})
    await topic.has({"ann": [1, 2, 3, 4], "bob": [1, 3], "eve": [1, 2, 3, 4]})
    (letter,) = await store.dead_letters()
    assert letter.event.id == large.id
    assert set(await attempts(store)) == {1}, "neighbours are charged for their own delivery only"


async def test_a_ticket_may_be_larger_than_the_events_of_its_topic(kafka: Kafka, store: Store) -> None:
    topic = Topic(kafka, 1, max_message_bytes=2000)
    await store.add(numbered("ann", 400))
    await served(store, topic, {Status.PUBLISHED: 400})
    await topic.has({"ann": list(range(1, 401))})


async def test_an_event_without_a_topic_waits_alone(topic: Topic, store: Store) -> None:
    missing = numbered("bob", 1, topic=f"missing-{topic.name}")
    await store.add([*numbered("ann", 3), *missing, *numbered("eve", 3)])
    await served(store, topic, {Status.PUBLISHED: 6, Status.FAILED: 1})
    await topic.has({"ann": [1, 2, 3], "eve": [1, 2, 3]})


async def test_an_outage_charges_nothing_and_makes_no_copy(own_server: OwnServer, store: Store) -> None:
    server = own_server(Kafka)
    topic, state = Topic(server), CircuitState()
    await store.add(mixed(KEYS, EACH))
    settings = {"observers": [state]}
    options = {"transaction.timeout.ms": 2000}
    async with relay(store, stream(topic.url(**options), batch=10), **settings):
        await until(lambda: topic_has_some(topic))
        server.pause()
        await store.add(mixed(KEYS, EACH, first=EACH + 1))
        await until(lambda: state.state == "open")
        server.resume()
        await settled(store, {Status.PUBLISHED: 2 * ALL})
        server.kill()
        await store.add(mixed(KEYS, EACH, first=2 * EACH + 1))
        await until(lambda: state.state == "open")
        server.start()
        await settled(store, {Status.PUBLISHED: 3 * ALL})
    assert set(await attempts(store)) == {1}
    await topic.has(in_order(KEYS, 3 * EACH))


def topic_has_some(topic: Topic) -> bool:
    return bool(topic._reader.read_to_end(topic.name))


def said_by(running: Any) -> str:
    error = running._supervisor.readiness.error(STREAM)
    worker = worker_of(running)
    return str(error or (worker and worker.circuit_error) or "")


async def refused(store: Store, to: str) -> str:
    """What a relay says that cannot serve: why its stream failed, or why its circuit is open."""
    running = relay(store, stream(to, lease=LEASE))
    async with running:
        await until(lambda: said_by(running))
        sentence = said_by(running)
    assert "\n" not in sentence
    return sentence


async def test_a_progress_topic_that_was_deleted_is_noticed(topic: Topic, store: Store) -> None:
    await store.add(mixed(KEYS, EACH))
    await served(store, topic, {Status.PUBLISHED: ALL})
    name = f"{await store.identity()}.{STREAM}.progress"
    topic.admin.delete_topics([name])[name].result()
    await store.add(mixed(KEYS, EACH, first=EACH + 1))
    assert "the progress topic was deleted" in await refused(store, topic.url())
    assert await counts(store) == {Status.PUBLISHED: ALL, Status.PENDING: ALL}
    await store.set_identity("after-the-loss")
    await served(store, topic, {Status.PUBLISHED: 2 * ALL})
    await topic.has(in_order(KEYS, 2 * EACH))


async def test_a_restored_database_is_noticed(topic: Topic, store: Any) -> None:
    for part in (0, 1):
        await store.add(mixed(KEYS, EACH, first=part * EACH + 1))
        await served(store, topic, {Status.PUBLISHED: (part + 1) * ALL})
    await execute(store, "UPDATE {event} SET status = 'pending'")
    await execute(store, "UPDATE {lease} SET settled_batch = NULL")
    assert "do not agree on what was published last" in await refused(store, topic.url())
    await topic.has(in_order(KEYS, 2 * EACH))


async def test_a_copy_of_the_database_with_another_topic_is_refused(kafka: Kafka, topic: Topic, tmp_path: Path) -> None:
    """Its events would count as published in the original, whose topic does not have them."""
    original, copied = (SqliteStore(str(tmp_path / f"{name}.db"), shards=4) for name in ("original", "copy"))
    await original.migrate()
    await original.open()
    await original.add(numbered("ann", 3))
    await served(original, topic, {Status.PUBLISHED: 3})
    await original.add(numbered("ann", 3, first=4))
    await original.close()
    shutil.copy(tmp_path / "original.db", tmp_path / "copy.db")
    await copied.open()
    elsewhere = Topic(kafka)
    assert "pillarbox identity --new" in await refused(copied, elsewhere.url())
    await original.open()
    await served(original, topic, {Status.PUBLISHED: 6})
    await topic.has({"ann": [1, 2, 3, 4, 5, 6]})
    await copied.set_identity("copy-of-it")
    await served(copied, elsewhere, {Status.PUBLISHED: 6})
    await elsewhere.has({"ann": [4, 5, 6]})
    for store in (original, copied):
        await store.close()


async def test_a_database_that_was_restored_under_a_relay_is_noticed(topic: Topic, store: Any) -> None:
    async with relay(store, stream(topic.url(), lease=LEASE)) as running:
        for part in (0, 1):
            await store.add(mixed(KEYS, EACH, first=part * EACH + 1))
            await settled(store, {Status.PUBLISHED: (part + 1) * ALL})
        await execute(store, "UPDATE {lease} SET settled_batch = NULL")
        await execute(store, "UPDATE {event} SET status = 'pending'")
        await until(lambda: said_by(running))
        assert "do not agree on what was published last" in said_by(running)
    await topic.has(in_order(KEYS, 2 * EACH))


@pytest.mark.parametrize(
    ("partitions", "policy", "said"),
    [(3, "compact", "has 3 partitions, and the outbox has 4 shards"), (4, "delete", "kafka-configs --alter")],
    ids=["shards", "policy"],
)
async def test_a_progress_topic_that_cannot_serve_is_refused(
    topic: Topic, store: Store, partitions: int, policy: str, said: str
) -> None:
    name = f"{await store.identity()}.{STREAM}.progress"
    new = kafka_admin.NewTopic(name, partitions, 1, config={"cleanup.policy": policy})
    topic.admin.create_topics([new])[name].result()
    await store.add(numbered("ann", 1))
    assert said in await refused(store, topic.url())


async def test_the_progress_topic_is_made_as_the_destination(kafka: Kafka, store: Store) -> None:
    topic = Topic(kafka, 1, min_insync_replicas=1)
    await store.add(numbered("ann", 1))
    await served(store, topic, {Status.PUBLISHED: 1})
    name = f"{await store.identity()}.{STREAM}.progress"
    resource = kafka_admin.ConfigResource(kafka_admin.ResourceType.TOPIC, name)
    found = topic.admin.describe_configs([resource])[resource].result()
    assert found["cleanup.policy"].value == "compact"
    assert found["min.insync.replicas"].value == "1"
    assert len(topic.admin.list_topics(name).topics[name].partitions) == 4


async def test_a_compacted_topic_is_refused(kafka: Kafka, store: Store) -> None:
    compacted = Topic(kafka, 1, cleanup_policy="compact")
    await store.add(numbered("ann", 1))
    assert "needs a topic with cleanup.policy=delete" in await refused(store, compacted.url())


@pytest.mark.long
async def test_too_few_replicas_for_the_transaction_log_are_named(own_server: OwnServer, store: Store) -> None:
    server = own_server(Kafka, settings={"transaction.state.log.replication.factor": "3"})
    await store.add(numbered("ann", 1))
    said = await refused(store, Topic(server).url())
    assert "transaction.state.log.replication.factor=3" in said
    assert "lower the setting" in said
    assert await attempts(store) == [0]


async def test_a_standalone_mongodb_is_refused_also_without_kafka(mongo_standalone: MongoStandalone) -> None:
    store = mongo_outbox(mongo_standalone.url)()
    await store.migrate()
    await store.open()
    assert "use a replica set, even of one node" in await refused(store, AWAY)
    await store.close()


async def test_a_queue_stream_is_refused(topic: Topic, store: Store) -> None:
    with pytest.raises(ConfigError, match="exactly once needs mode='ordered'"):
        relay(store, stream(topic.url(), mode="queue"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transactional.id": "mine"}, "from the identity of the outbox"),
        ({"acks": "1"}, "only when all in-sync replicas have it"),
        ({"enable.idempotence": "false"}, "a retry gives copies"),
    ],
)
async def test_properties_that_would_break_it_are_refused(options: dict[str, str], said: str) -> None:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    with pytest.raises(ConfigError, match=said):
        KafkaPublisher.from_url(f"kafka://localhost?topic=t&delivery=exactly-once{more}")
    with pytest.raises(ConfigError, match="use one of: at-least-once, exactly-once"):
        KafkaPublisher.from_url("kafka://localhost?topic=t&delivery=once")


async def test_a_transaction_timeout_that_the_client_refuses_is_one_line() -> None:
    publisher = KafkaPublisher.from_url("kafka://localhost?topic=t&delivery=exactly-once&transaction.timeout.ms=500")
    with pytest.raises(
        ConfigError, match=r'^.*"transaction.timeout.ms" value 500 is outside .*; correct or remove it$'
    ):
        await publisher.open()


async def test_a_transaction_timeout_that_the_broker_refuses_is_named(topic: Topic, store: Store) -> None:
    await store.add(numbered("ann", 1))
    said = await refused(store, topic.url(**{"transaction.timeout.ms": 3_600_000}))
    assert "transaction.max.timeout.ms" in said
