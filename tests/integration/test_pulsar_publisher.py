import asyncio
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pulsar as client_library
import pytest
import pytest_asyncio

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.envelopes import default_headers
from pillarbox.errors import ConfigError, Outage
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Publisher, Result
from pillarbox.publishers.pulsar import PulsarPublisher
from pillarbox.publishers.pulsar import routes as pulsar_routes
from pillarbox.publishers.pulsar import sender as pulsar_sender
from pillarbox.publishers.pulsar.hashing import java_hash
from pillarbox.urls import publisher_from_url
from proof.proxy_thread import ProxyThread
from servers import Pulsar
from servers.fixtures import OwnServer
from servers.process import wait_until
from tests.integration.relays import eventually
from tests.pulsar_cluster import Cluster, Record

pytestmark = pytest.mark.asyncio

SERVERS = "127.0.0.1:6650"


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
def cluster(pulsar: Pulsar) -> Cluster:
    return Cluster(pulsar)


@pytest_asyncio.fixture
async def signals(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Signals]:
    monkeypatch.setattr(pulsar_sender, "QUIET_SECONDS", 0.3)
    handler = Signals()
    logger = logging.getLogger("pillarbox.publishers.pulsar")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


Opened = Callable[..., Awaitable[PulsarPublisher]]


@pytest_asyncio.fixture
async def opened() -> AsyncIterator[Opened]:
    """Makes and opens publishers, and closes them after the test."""
    publishers = []

    async def make(cluster: Cluster, **arguments: Any) -> PulsarPublisher:
        publisher = PulsarPublisher(servers=cluster.servers, **{"topic": "*", "connect_timeout": "10s", **arguments})
        publishers.append(publisher)
        await publisher.open()
        return publisher

    yield make
    await asyncio.gather(*(publisher.close() for publisher in publishers))


def an_event(number: int = 0, **changes: Any) -> Event:
    return make_event(**{"key": f"k{number % 10}", "payload": b"%d" % number, **changes})


def events(count: int, start: int = 0, **changes: Any) -> list[Event]:
    return [an_event(number, **changes) for number in range(start, start + count)]


def in_order(records: Sequence[Record]) -> bool:
    """Whether each key's numbers grow strictly on one partition: no disorder and no copy."""
    runs: dict[str | None, list[tuple[int, int]]] = defaultdict(list)
    for record in records:
        runs[record.key].append((record.partition, int(record.value)))
    return all(len({partition for partition, _ in run}) == 1 and run == sorted(set(run)) for run in runs.values())


def is_waiting(outcome: Outcome) -> bool:
    return outcome.result is Result.RETRY and not outcome.charged and (outcome.after_seconds or 0) >= 1


async def test_it_is_a_publisher() -> None:
    publisher = publisher_from_url("pulsar://a,b:7000?topic=*&producers=2")
    assert isinstance(publisher, Publisher)
    assert publisher.description == "pulsar a:6650,b:7000"
    assert publisher.features.calls == 2
    assert publisher.features.strict_keys
    assert not publisher.features.deduplicates


async def test_every_event_is_confirmed_and_in_order(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic(3)
    publisher = await opened(cluster, topic=topic)
    for start in (0, 1000):
        assert list(await publisher.publish(Batch.of(events(1000, start)))) == [PUBLISHED] * 1000
    assert await publisher.publish(Batch.of(events(20, 2000, key=None))) == [PUBLISHED] * 20
    records = cluster.read(topic)
    assert sorted(int(record.value) for record in records) == list(range(2020))
    keyed = [record for record in records if record.key is not None]
    assert in_order(keyed)
    # Each key is where Java's client would write it, and no batch has two keys.
    assert all(record.partition == java_hash(str(record.key)) % 3 for record in keyed)
    batches: dict[tuple[int, int], set[str | None]] = defaultdict(set)
    for record in records:
        batches[record.batch].add(record.key)
    assert all(len(keys) == 1 for keys in batches.values())
    assert len(batches) < 1000
    assert list(await publisher.publish(Batch.of([]))) == []


async def test_plain_batches_have_many_keys(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic, batching="plain", compression="zstd")
    assert list(await publisher.publish(Batch.of(events(1000)))) == [PUBLISHED] * 1000
    records = cluster.read(topic)
    assert in_order(records)
    keys: dict[tuple[int, int], set[str | None]] = defaultdict(set)
    for record in records:
        keys[record.batch].add(record.key)
    assert max(map(len, keys.values())) > 1


async def test_bytes_key_headers_and_time(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic, headers=lambda event: [*default_headers(event), ("region", b"eu")])
    event = an_event(key="ключ", payload=b'{"a":  1.0}\x00\xff')
    before = datetime.now(UTC).timestamp() * 1000
    assert await publisher.publish(Batch.of([event, an_event(key=None, payload=b"")])) == [PUBLISHED] * 2
    record, empty = cluster.read(topic)
    assert record.key == "ключ"
    assert record.value == b'{"a":  1.0}\x00\xff'
    assert record.headers == {**{name: value.decode() for name, value in default_headers(event)}, "region": "eu"}
    assert record.timestamp >= before - 1000
    assert (empty.key, empty.value) == (None, b"")


async def test_envelopes_by_name(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic, envelope="cloudevents", source="/shop")
    assert await publisher.publish(Batch.of([an_event()])) == [PUBLISHED]
    (record,) = cluster.read(topic)
    assert record.headers["ce_source"] == "/shop"


async def test_a_header_that_is_no_text_is_rejected(cluster: Cluster, opened: Opened) -> None:
    publisher = await opened(cluster, topic=cluster.topic(), headers=lambda event: [("raw", b"\xff")])
    (outcome,) = await publisher.publish(Batch.of([an_event()]))
    assert outcome.result is Result.REJECTED
    assert outcome.error == "the envelope or header builder failed with UnicodeDecodeError; correct it"


async def test_a_key_across_topics_keeps_its_order(cluster: Cluster, opened: Opened) -> None:
    first, second = cluster.topic(), cluster.topic(2)
    publisher = await opened(cluster, topic=first)
    batch = [an_event(n, key="k", topic="" if n % 4 < 2 else f"public/default/{second}") for n in range(12)]
    assert await publisher.publish(Batch.of(batch)) == [PUBLISHED] * 12
    assert [record.value for record in cluster.read(first)] == [b"0", b"1", b"4", b"5", b"8", b"9"]
    assert [record.value for record in cluster.read(second)] == [b"2", b"3", b"6", b"7", b"10", b"11"]


async def test_an_event_whose_topic_is_missing_waits(
    cluster: Cluster, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = f"{cluster.namespace()}/nowhere"
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic)
    batch = [
        an_event(0, key="a", topic=nowhere),
        an_event(1, key="a"),
        an_event(2, key="b"),
        an_event(3, topic="x://y"),
    ]
    for _ in range(2):
        waiting, held, fine, impossible = await publisher.publish(Batch.of(batch))
        assert is_waiting(waiting)
        assert waiting.error == (
            f"topic 'persistent://{nowhere}' on pulsar {cluster.servers} does not exist; create it, or its namespace"
        )
        assert (held, fine) == (UNTRIED, PUBLISHED)
        assert impossible.result is Result.REJECTED
        assert "is not a name that Pulsar takes" in str(impossible.error)
    assert [record.value for record in cluster.read(topic)] == [b"2", b"2"]
    assert caplog.text.count("wait, uncharged") == 1


async def test_an_event_without_any_topic_waits(cluster: Cluster, opened: Opened) -> None:
    publisher = await opened(cluster)
    (outcome,) = await publisher.publish(Batch.of([an_event()]))
    assert is_waiting(outcome)
    assert "the event has no topic" in str(outcome.error)


async def test_a_missing_default_topic_is_an_outage(cluster: Cluster, opened: Opened) -> None:
    namespace = cluster.namespace()
    own = cluster.topic()
    publisher = await opened(cluster, topic="later", namespace=namespace)
    batch = [an_event(1), an_event(1), an_event(2, topic=f"public/default/{own}")]
    down, untried, fine = await publisher.publish(Batch.of(batch))
    assert down.is_outage
    assert "does not exist" in str(down.error)
    assert (untried, fine) == (UNTRIED, PUBLISHED)
    cluster.admin("PUT", f"persistent/{namespace}/later")
    assert await publisher.publish(Batch.of(batch[:2])) == [PUBLISHED] * 2


async def test_an_event_that_is_too_large_is_rejected(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic)
    limit = 5 * 1024 * 1024
    # Within a few bytes of the limit the client would send what the broker refuses, and wait for ever.
    for size in (limit + 1, limit, limit - 20, limit - 900):
        batch = [an_event(0, key="a"), an_event(key="a", payload=b"x" * size), an_event(1, key="a"), an_event(2)]
        first, large, behind, other = await publisher.publish(Batch.of(batch))
        assert (first, behind, other) == (PUBLISHED, UNTRIED, PUBLISHED)
        assert large.result is Result.REJECTED
        assert "raise maxMessageSize of the brokers and max_message_bytes" in str(large.error)
    assert await publisher.publish(Batch.of([an_event(payload=b"x" * (limit - 4000))])) == [PUBLISHED]


@pytest.mark.long
async def test_the_limit_of_a_broker_that_takes_less(
    own_server: OwnServer, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow this machine is, a batch has all events of a call.
    monkeypatch.setattr("pillarbox.pulsar.client._LINGER_MILLISECONDS", 500)
    # Given a broker with a smaller limit than the publisher knows
    server = own_server(Pulsar, settings={"maxMessageSize": "100000"})
    cluster = Cluster(server)
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic)
    # When a payload is above it, the client says so at once
    batch = [an_event(0, key="a"), an_event(key="a", payload=b"x" * 100_001), an_event(1, key="a"), an_event(2)]
    first, large, behind, other = await publisher.publish(Batch.of(batch))
    assert (first, behind, other) == (PUBLISHED, UNTRIED, PUBLISHED)
    assert large.result is Result.REJECTED
    # And when a batch is above it, no event is to blame
    outcomes = await publisher.publish(Batch.of(events(40, key="b", payload=b"x" * 3000)))
    assert outcomes[0].is_outage
    assert "set max_message_bytes= to maxMessageSize" in str(outcomes[0].error)
    knowing = await opened(cluster, topic=topic, max_message_bytes=100_000)
    assert await knowing.publish(Batch.of(events(40, key="b", payload=b"x" * 3000))) == [PUBLISHED] * 40


async def test_a_topic_that_takes_less_than_its_broker_is_named(
    cluster: Cluster, opened: Opened, signals: Signals
) -> None:
    topic = cluster.topic()
    cluster.admin("POST", f"persistent/public/default/{topic}/maxMessageSize", 20_000)
    publisher = await opened(cluster, topic=topic, producers=1, stuck="5s")
    large = an_event(key="a", payload=b"x" * 30_000)

    async def publish() -> Outcome:
        return (await publisher.publish(Batch.of([large])))[0]

    # The broker learns of a topic's policy a moment later. Then it refuses the message, and the client tells nobody.
    refused = await eventually(publish, lambda outcome: outcome.is_outage, 40)
    assert "set max_message_bytes= to it" in str(refused.error)
    # Others go on, and with the setting the event is at fault
    assert await publisher.publish(Batch.of([an_event(1, key="b")])) == [PUBLISHED]
    knowing = await opened(cluster, topic=topic, max_message_bytes=20_000)
    rejected, behind, other = await knowing.publish(Batch.of([large, an_event(2, key="a"), an_event(3, key="b")]))
    assert (rejected.result, behind, other) == (Result.REJECTED, UNTRIED, PUBLISHED)


async def test_a_topic_that_enforces_a_schema_is_named(cluster: Cluster, opened: Opened) -> None:
    namespace, other = cluster.namespace(), cluster.topic()
    topic = cluster.topic(namespace=namespace)
    cluster.admin("POST", f"schemas/{namespace}/{topic}/schema", {"type": "STRING", "schema": "", "properties": {}})
    cluster.admin("POST", f"namespaces/{namespace}/schemaValidationEnforced", True)
    publisher = await opened(cluster, topic=other)
    # When it stands alone in a call, too, the call ends
    (waiting,) = await publisher.publish(Batch.of([an_event(1, topic=f"{namespace}/{topic}")]))
    assert is_waiting(waiting)
    assert "takes only messages with a schema" in str(waiting.error)
    default = await opened(cluster, topic=topic, namespace=namespace)
    (down,) = await default.publish(Batch.of([an_event(1)]))
    assert down.is_outage


async def test_a_topic_that_its_broker_refuses_hides_no_other(cluster: Cluster, opened: Opened) -> None:
    # Given a namespace that wants encrypted messages, for which the client has no name of its own
    namespace = cluster.namespace()
    bad, good = f"{namespace}/{cluster.topic(namespace=namespace)}", cluster.topic()
    cluster.admin("POST", f"namespaces/{namespace}/encryptionRequired", True)
    publisher = await opened(cluster, producers=1, stuck="1s", connect_timeout="1s")
    # Then a call for it alone ends, and it holds up nothing else
    (waiting,) = await publisher.publish(Batch.of([an_event(0, topic=bad)]))
    assert is_waiting(waiting)
    assert "is not served now" in str(waiting.error)
    for number in range(2):
        batch = Batch.of([an_event(0, topic=bad), an_event(number, topic=good, key="other")])
        waiting, fine = await publisher.publish(batch)
        assert is_waiting(waiting)
        assert fine == PUBLISHED
        publisher = await opened(cluster, producers=1, stuck="1s", connect_timeout="1s")
    assert len(cluster.read(good)) == 2
    # And for a default topic it is an outage
    default = await opened(cluster, topic=bad, stuck="1s", connect_timeout="1s", producers=1)
    (down,) = await default.publish(Batch.of([an_event(0)]))
    assert down.is_outage
    assert "is not served now" in str(down.error)


async def test_long_headers_do_not_make_a_batch_too_large(cluster: Cluster, opened: Opened) -> None:
    publisher = await opened(cluster, topic=cluster.topic())
    batch = events(600, key="k", headers={"long": "x" * 20_000})
    assert await publisher.publish(Batch.of(batch)) == [PUBLISHED] * 600


async def test_new_partitions_are_used_and_announced(
    cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pulsar_routes, "ASK_AGAIN_SECONDS", 0.0)
    topic = cluster.topic(2)
    publisher = await opened(cluster, topic=topic)
    assert await publisher.publish(Batch.of(events(10))) == [PUBLISHED] * 10
    cluster.admin("POST", f"persistent/public/default/{topic}/partitions", 5)
    assert await publisher.publish(Batch.of(events(10))) == [PUBLISHED] * 10
    assert {record.partition for record in cluster.read(topic)} == {
        java_hash(f"k{n}") % m for n in range(10) for m in (2, 5)
    }
    assert caplog.text.count("has 5 partitions in place of 2: keys move") == 1


async def test_a_topic_that_is_deleted_under_its_producer(cluster: Cluster, opened: Opened) -> None:
    # Given a namespace that makes no topics by itself, and a topic that has a producer
    namespace = cluster.namespace()
    for name in ("gone", "kept"):
        cluster.admin("PUT", f"persistent/{namespace}/{name}")
    publisher = await opened(cluster, topic="kept", namespace=namespace, stuck="1s", producers=1)
    assert await publisher.publish(Batch.of([an_event(0, topic="gone"), an_event(1)])) == [PUBLISHED] * 2
    # When it is deleted, its events wait, uncharged, and nobody else
    cluster.admin("DELETE", f"persistent/{namespace}/gone?force=true")
    for _ in range(2):
        lost, kept = await publisher.publish(Batch.of([an_event(0, topic="gone"), an_event(1)]))
        assert (lost.result, lost.charged, kept) == (Result.RETRY, False, PUBLISHED)


async def test_a_topic_that_is_terminated_under_its_producer(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic()
    publisher = await opened(cluster, producers=1)
    assert await publisher.publish(Batch.of([an_event(0, topic=topic)])) == [PUBLISHED]
    cluster.admin("POST", f"persistent/public/default/{topic}/terminate")

    async def found() -> Result:
        (outcome,) = await publisher.publish(Batch.of([an_event(1, topic=topic)]))
        return outcome.result

    assert await eventually(found, lambda result: result is not Result.RETRY) is Result.REJECTED
    assert await found() is Result.REJECTED


async def test_a_topic_that_another_producer_had_for_itself(cluster: Cluster, opened: Opened) -> None:
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic, producers=1)

    async def publish() -> Outcome:
        return (await publisher.publish(Batch.of([an_event(0)])))[0]

    assert await publish() == PUBLISHED
    client = cluster.client()
    alone = client_library.ProducerAccessMode.ExclusiveWithFencing
    await asyncio.to_thread(client.create_producer, topic, access_mode=alone)
    refused = await eventually(publish, lambda outcome: outcome.is_outage)
    assert "end that producer" in (refused.error or "")
    await asyncio.to_thread(client.close)
    assert await eventually(publish, lambda outcome: outcome == PUBLISHED)


@pytest.mark.long
async def test_a_broker_that_is_away_when_opening(own_server: OwnServer) -> None:
    server = own_server(Pulsar)
    await asyncio.to_thread(server.kill)
    publisher = PulsarPublisher.from_url(f"{server.url}?topic=t&connect_timeout=2s")
    with pytest.raises(
        Outage, match=r"pulsar 127\.0\.0\.1:\d+ cannot be reached \(\w+\); the relay tries again\. If a broker listens"
    ):
        await publisher.open()
    (outcome,) = await publisher.publish(Batch.of([an_event()]))
    assert outcome.is_outage


@pytest.mark.long
async def test_faults_in_the_middle_of_calls_lose_and_reorder_nothing(
    own_server: OwnServer, opened: Opened, signals: Signals
) -> None:
    server = own_server(Pulsar, proxies=1)
    cluster = Cluster(server)
    topic = cluster.topic(2)
    sent = 0

    def more(count: int) -> Batch:
        nonlocal sent
        sent += count
        return Batch.of(events(count, sent - count))

    async def delivered(batch: Batch) -> None:
        """Publish until all is confirmed, as a relay does. No event is charged."""
        while batch:
            outcomes = await publisher.publish(batch)
            assert all(each.result is not Result.RETRY or not each.charged for each in outcomes)
            assert Result.REJECTED not in {each.result for each in outcomes}
            batch = Batch.of([event for event, each in zip(batch, outcomes, strict=True) if each != PUBLISHED])

    with ProxyThread() as thread:
        (ports,) = server.proxies
        proxy = thread.open("127.0.0.1", ports.target, port=ports.listen)
        publisher = PulsarPublisher(servers=f"127.0.0.1:{proxy.port}", topic=topic, producers=1, connect_timeout="20s")
        await publisher.open()
        assert await publisher.publish(more(100)) == [PUBLISHED] * 100
        # Cut after some bytes of a call
        thread.run(proxy.cut_after(20_000, "to_server"))
        call = asyncio.create_task(delivered(more(2000)))
        await signals.wait_for("destination_silent")
        thread.run(proxy.heal())
        await call
        # Paused: the connections stay, and nothing answers
        signals.actions.clear()
        server.pause()
        call = asyncio.create_task(delivered(more(500)))
        await signals.wait_for("destination_silent")
        assert not call.done()
        server.resume()
        await call
        # Killed while a call is on its way
        call = asyncio.create_task(delivered(more(2000)))
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.restart)
        await call
        await publisher.close()
    # Nothing is lost, and first copies are in order. A copy is possible: the publisher may use a new connection.
    first: dict[int, Record] = {}
    for record in cluster.read(topic):
        first.setdefault(int(record.value), record)
    assert sorted(first) == list(range(sent))
    assert in_order(list(first.values()))


@pytest.mark.long
async def test_a_connection_that_breaks_before_the_first_answer_loses_nothing(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a broker that drops copies, and a client that connects again by itself
    monkeypatch.setattr(pulsar_sender, "QUIET_SECONDS", 60.0)
    server = own_server(Pulsar, proxies=1)
    cluster = Cluster(server)
    topic = cluster.topic()
    with ProxyThread() as thread:
        (ports,) = server.proxies
        proxy = thread.open("127.0.0.1", ports.target, port=ports.listen)
        publisher = PulsarPublisher(servers=f"127.0.0.1:{proxy.port}", topic=topic, producers=1, connect_timeout="20s")
        await publisher.open()
        # When the connection breaks under the first events of a producer
        thread.run(proxy.drop("to_server"))
        call = asyncio.create_task(publisher.publish(Batch.of(events(100))))
        await asyncio.to_thread(wait_until, lambda: proxy.counts.lost["to_server"] > 0, seconds=30, what="a lost byte")
        thread.run(proxy.heal())
        assert await call == [PUBLISHED] * 100
        # Then the broker does not take its later events for copies of them
        assert await publisher.publish(Batch.of(events(100, 100))) == [PUBLISHED] * 100
        await publisher.close()
    records = cluster.read(topic)
    assert sorted(int(record.value) for record in records) == list(range(200))
    assert in_order(records)


@pytest.mark.long
async def test_close_ends_the_wait_for_a_dead_broker(own_server: OwnServer, opened: Opened, signals: Signals) -> None:
    server = own_server(Pulsar)
    cluster = Cluster(server)
    publisher = await opened(cluster, topic=cluster.topic(), producers=1, connect_timeout="5s")
    assert await publisher.publish(Batch.of(events(10))) == [PUBLISHED] * 10
    await asyncio.to_thread(server.kill)
    waiting = [asyncio.create_task(publisher.publish(Batch.of(events(10, 10)))) for _ in range(3)]
    await signals.wait_for("destination_silent")
    async with asyncio.timeout(20):
        await publisher.close()
        for call in waiting:
            assert await call == [UNTRIED] * 10


@pytest.mark.long
async def test_a_cancelled_call_leaves_a_usable_sender(own_server: OwnServer, opened: Opened, signals: Signals) -> None:
    server = own_server(Pulsar)
    cluster = Cluster(server)
    topic = cluster.topic()
    publisher = await opened(cluster, topic=topic, producers=1)
    assert await publisher.publish(Batch.of([an_event(0)])) == [PUBLISHED]
    await asyncio.to_thread(server.kill)
    call = asyncio.create_task(publisher.publish(Batch.of(events(10, 1))))
    await signals.wait_for("destination_silent")
    call.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await call
    await asyncio.to_thread(server.restart)
    assert await publisher.publish(Batch.of(events(10, 11))) == [PUBLISHED] * 10
    assert [record.value for record in cluster.read(topic)] == [b"%d" % n for n in (0, *range(11, 21))]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("pulsar://h?topci=x", r"unknown option 'topci' in the Pulsar URL; did you mean 'topic'\?"),
        ("pulsar://h?zzz=x", "use one of: topic, envelope"),
        ("pulsar://h", "no Pulsar topic is given; write for instance topic=orders"),
        ("pulsar://h?topic=t&producers=many", "producers='many' in the Pulsar URL is not a number"),
        ("pulsar://h?topic=t&producers=0", "producers=0 leaves nothing"),
        ("pulsar://h?topic=t&max_message_bytes=5", "max_message_bytes=5 is little"),
        ("pulsar://h?topic=t&batching=keys", r"batching='keys' is unknown; did you mean 'key'\?"),
        ("pulsar://h?topic=t&hash=md5", "hash='md5' is unknown"),
        ("pulsar://h?topic=t&compression=gzip", "compression='gzip' is unknown"),
        ("pulsar://h?topic=t&stuck=0", "stuck is '0'; use 100ms to"),
        ("pulsar://h?topic=t&connect_timeout=soon", "connect_timeout is 'soon'; use a duration such as"),
        ("pulsar://h?topic=t&headers=shop", "'shop' does not name a header builder; write MODULE:ATTRIBUTE"),
        ("pulsar://h?topic=t&headers=pillarbox.envelopes:ENVELOPES", "is not a function from an event to its headers"),
        ("pulsar://h?topic=t&envelope=row", r"did you mean 'raw'\?"),
        ("pulsar://h?topic=t&tls_ca=/nowhere", r"need TLS; begin the URL with pulsar\+ssl://"),
        ("pulsar+ssl://h?topic=t&tls_ca=/nowhere", "tls_ca='/nowhere' cannot be read"),
        ("pulsar+ssl://h?topic=t&tls_cert=/a", "tls_cert and tls_key go together"),
        ("pulsar+ssl://h?topic=t&tls_hostname=perhaps", "tls_hostname='perhaps'"),
        ("pulsar://u:p@h?topic=t&token=x", "user and token are given for Pulsar; log in with one of them"),
        ("pulsar://h?topic=t&token_file=/nowhere", "token_file='/nowhere' cannot be read"),
        ("pulsar://", "names no broker"),
        ("pulsar://h:port?topic=t", "a port that is no number"),
        ("pulsar://h/orders?topic=t", "is not a tenant and a namespace"),
        ("amqp://h", r"starts with pulsar:// or pulsar\+ssl://, not amqp://"),
    ],
)
async def test_a_wrong_url_names_what_is_wrong(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PulsarPublisher.from_url(url)


async def test_a_url_hides_its_password() -> None:
    publisher = PulsarPublisher.from_url("pulsar://app:s3cret@one,[::1],two:9093/acme/shop?topic=t")
    assert publisher.description == "pulsar one:6650,[::1]:6650,two:9093"


async def test_without_the_client_library_the_error_names_the_extra() -> None:
    for module, name in (("publishers", "PulsarPublisher"), ("sources", "PulsarSource")):
        program = f"import sys; sys.modules['pulsar'] = None; import pillarbox.{module}.pulsar"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE)
        _, errors = await process.communicate()
        assert f"{name} needs an extra; install it with: pip install 'pillarbox[pulsar]'" in errors.decode()
