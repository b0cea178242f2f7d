import asyncio
import time
from typing import Any

import pulsar as client_library
import pytest

from pillarbox.conformance.source import Reader
from pillarbox.errors import ConfigError, Outage
from pillarbox.pulsar import client as pulsar_client
from pillarbox.source import Order
from pillarbox.sources.pulsar import PulsarSource
from pillarbox.urls import source_from_url
from servers import Pulsar
from servers.fixtures import OwnServer
from tests.pulsar_cluster import Cluster

pytestmark = pytest.mark.asyncio


@pytest.fixture
def cluster(pulsar: Pulsar) -> Cluster:
    return Cluster(pulsar)


async def send(cluster: Cluster, topic: str, messages: list[tuple[str, bytes]], **producer: Any) -> None:
    """Send keys and bodies in order."""

    def work() -> None:
        client = cluster.client()
        made = client.create_producer(topic, **producer)
        for key, body in messages:
            made.send_async(body, lambda _result, _id: None, None, key)
        made.flush()
        client.close()

    await asyncio.to_thread(work)


async def opened(cluster: Cluster, topic: str, connect_timeout: str = "20s") -> Reader:
    reader = Reader(PulsarSource(servers=cluster.servers, topic=topic, connect_timeout=connect_timeout), 60.0)
    await reader.source.open("cards", reader)
    return reader


async def test_a_url_makes_a_source() -> None:
    source = source_from_url("pulsar://host/acme/shop?topic=orders")
    assert source.description == "pulsar host:6650 orders"
    assert source.features.order is Order.KEY
    assert not source.features.lag
    assert await source.lag() == {}


async def test_two_sources_share_keys_and_keep_their_order(cluster: Cluster) -> None:
    # Given two consumers of one name
    topic = cluster.topic()
    first, second = await opened(cluster, topic), await opened(cluster, topic)
    sent = [(f"k{n % 20}", b"k%d %d" % (n % 20, n)) for n in range(200)]
    # When batches with one key each are sent
    kinds = {"batching_enabled": True, "batching_type": client_library.BatchingType.KeyBased}
    await send(cluster, topic, sent, **kinds)
    async with asyncio.timeout(60):
        while len(first.messages) + len(second.messages) < 200:
            await asyncio.gather(first.receive(), second.receive())
    # Then each key came to one of them, in order, and both had some
    keys = [{message.key for message in reader.messages} for reader in (first, second)]
    assert keys[0]
    assert keys[1]
    assert not keys[0] & keys[1]
    for reader in (first, second):
        for key in {message.key for message in reader.messages}:
            numbers = [int(message.body.split()[1]) for message in reader.messages if message.key == key]
            assert numbers == sorted(numbers)
    # And what an ended one had not settled comes to the other, in order
    lost = sorted((message.body for message in first.messages), key=lambda body: int(body.split()[1]))
    second.settle(second.messages)
    await first.source.close()
    again = [message.body for message in await second.read(len(lost))]
    assert sorted(again, key=lambda body: int(body.split()[1])) == lost
    await second.source.close()


async def test_a_batch_that_was_settled_in_part_holds_up_no_key(cluster: Cluster) -> None:
    # Given consumers that end in the middle of a batch
    topics = [cluster.topic() for _ in range(4)]

    async def moved(topic: str) -> None:
        kinds = {"batching_enabled": True, "batching_type": client_library.BatchingType.KeyBased}
        await send(cluster, topic, [("k", b"%d" % n) for n in range(4)], **kinds)
        first = await opened(cluster, topic)
        first.settle((await first.read(4))[:2])
        await first.source.close()
        # The whole batch comes again, to be settled by the next one.
        second = await opened(cluster, topic)
        second.settle(await second.read(4))
        assert second.bodies == [b"0", b"1", b"2", b"3"]
        # When more consumers join, so that the key most likely moves
        readers = [second, *[await opened(cluster, topic) for _ in range(3)]]
        await send(cluster, topic, [("k", b"new")])
        # Then its next message comes to one of them
        async with asyncio.timeout(30):
            while not any(b"new" in reader.bodies for reader in readers):
                await asyncio.gather(*(reader.receive() for reader in readers))
        await asyncio.gather(*(reader.source.close() for reader in readers))

    await asyncio.gather(*map(moved, topics))


async def test_a_cancelled_open_leaves_no_member_behind(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = cluster.topic()
    begun = asyncio.Event()
    loop, subscribe = asyncio.get_running_loop(), pulsar_client.new_consumer

    def slow(*given: Any, **options: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        return subscribe(*given, **options)

    monkeypatch.setattr("pillarbox.sources.pulsar.new_consumer", slow)
    opening = asyncio.create_task(opened(cluster, topic))
    await begun.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    # Another consumer of that name gets every key.
    reader = await opened(cluster, topic)
    await send(cluster, topic, [(f"k{n}", b"%d" % n) for n in range(50)])
    await reader.read(50)
    await reader.source.close()


@pytest.mark.long
async def test_after_an_outage_it_reads_on(own_server: OwnServer) -> None:
    server = own_server(Pulsar)
    cluster = Cluster(server)
    topic = cluster.topic()
    await send(cluster, topic, [("a", b"1"), ("a", b"2")])
    reader = await opened(cluster, topic, connect_timeout="2s")
    first = await reader.read(2)
    reader.settle(first[:1])
    # Longer than the patience of the client with its first tries
    server.kill()
    begun = time.monotonic()
    while time.monotonic() < begun + 20:
        await reader.receive()
    await asyncio.to_thread(server.start)
    await send(cluster, topic, [("a", b"3")])
    await reader.read_until(lambda: b"3" in reader.bodies, "the message after the outage")
    assert reader.bodies[-1] == b"3"
    # A new client gets what was not settled again. The old one, if it was quicker, still has it in hand.
    assert not reader.gone or reader.bodies[-2] == b"2"
    await reader.source.close()


async def test_a_missing_topic_is_an_outage_that_says_so(cluster: Cluster) -> None:
    topic = f"{cluster.namespace()}/nowhere"
    source = PulsarSource(servers=cluster.servers, topic=topic, connect_timeout="5s")
    with pytest.raises(Outage, match=r"cannot be read \(TopicNotFound\); create the topic, or its namespace"):
        await source.open("cards", Reader(source, 1.0))
    await source.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("pulsar://h", "no Pulsar topic is given"),
        ("pulsar://h?topic=t&start=now", "start='now' is unknown"),
        ("pulsar://h?topic=t&batching=key", "unknown option 'batching' in the Pulsar URL"),
    ],
)
async def test_a_wrong_url_names_what_is_wrong(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PulsarSource.from_url(url)
