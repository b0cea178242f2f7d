"""The fault proxy: with plain sockets and with real servers."""

import asyncio
import hashlib
import random
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pymysql
import pytest
import pytest_asyncio
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka import admin as confluent_admin
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, PyMongoError

from proof.proxy import Proxy
from proof.proxy_thread import ProxyThread
from servers import Kafka, Mongo, MySQL, Postgres
from servers.fixtures import OwnServer

pytestmark = pytest.mark.long
kafka_admin: Any = confluent_admin  # its types leave out what it exports
LONG = 30.0  # reached only if something is wrong


class Peer:
    """A server that records what each connection receives, and answers only if told to."""

    def __init__(self) -> None:
        self.got: list[bytearray] = []
        self.ends: list[str] = []  # how connections ended
        self.writers: list[asyncio.StreamWriter] = []
        self.echoes = True
        self.reads = asyncio.Event()
        self.reads.set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1024)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        for writer in self.writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got = bytearray()
        self.got.append(got)
        self.writers.append(writer)
        try:
            while True:
                await self.reads.wait()
                if not (data := await reader.read(65536)):
                    break
                got += data
                if self.echoes:
                    writer.write(data)
                    await writer.drain()
            self.ends.append("end")
        except ConnectionResetError:
            self.ends.append("reset")
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hear(self, count: int) -> bytes:
        async with asyncio.timeout(LONG):
            return await self.reader.readexactly(count)

    async def ask(self, data: bytes) -> bytes:
        await self.say(data)
        return await self.hear(len(data))

    async def is_reset(self) -> bool:
        async with asyncio.timeout(LONG):
            with suppress(ConnectionResetError):
                while await self.reader.read(65536):
                    pass
                return False
            return True

    def abort(self) -> None:
        self.writer.transport.abort()


class Bed:
    """A peer, its proxy, and clients that go through it."""

    def __init__(self, peer: Peer, proxy: Proxy) -> None:
        self.peer, self.proxy = peer, proxy
        self.clients: list[Client] = []

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.proxy.port))
        self.clients.append(client)
        return client


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not true():  # noqa: ASYNC110 - counters have no event
            await asyncio.sleep(0.005)


def until_blocking(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest_asyncio.fixture
async def bed() -> AsyncIterator[Bed]:
    peer = Peer()
    await peer.start()
    proxy = await Proxy("127.0.0.1", peer.port).start()
    bed = Bed(peer, proxy)
    yield bed
    await proxy.close()
    assert proxy.open_connections == 0
    for client in bed.clients:
        client.abort()
    await peer.close()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


@pytest.fixture
def thread() -> Iterator[ProxyThread]:
    threads = threading.active_count()
    with ProxyThread() as thread:
        yield thread
    assert threading.active_count() <= threads


@pytest.mark.asyncio
class TestPass:
    async def test_large_transfers_are_exact_both_ways_on_many_connections(self, bed: Bed) -> None:
        async def transfer(number: int) -> None:
            data = random.Random(number).randbytes(300_000)
            client = await bed.client()
            sending = asyncio.create_task(client.say(data))
            assert await client.hear(len(data)) == data
            await sending

        async with asyncio.TaskGroup() as group:
            for number in range(100):
                group.create_task(transfer(number))
        assert bed.proxy.counts.connections == 100
        assert bed.proxy.counts.passed == {"to_server": 30_000_000, "to_client": 30_000_000}
        assert bed.proxy.counts.resets == 0

    async def test_an_end_passes_and_leaves_the_other_direction_open(self, bed: Bed) -> None:
        client = await bed.client()
        data = random.Random(1).randbytes(2_000_000)
        bed.peer.reads.clear()
        sending = asyncio.create_task(client.say(data))
        bed.peer.reads.set()
        answer = asyncio.create_task(client.hear(len(data)))
        await sending
        client.writer.write_eof()
        assert hashlib.sha256(await answer).digest() == hashlib.sha256(data).digest()
        assert await client.reader.read() == b""
        assert bed.peer.ends == ["end"]
        await until(lambda: bed.proxy.open_connections == 0)
        assert bed.proxy.counts.resets == 0

    async def test_a_reader_that_stops_also_stops_the_writer(self, bed: Bed) -> None:
        bed.peer.reads.clear()
        client = await bed.client()
        client.writer.transport.set_write_buffer_limits(high=0)
        total, size = 0, 1 << 20
        with suppress(TimeoutError):
            async with asyncio.timeout(LONG):
                while total < 100 * size:
                    client.writer.write(bytes(size))
                    total += size
                    async with asyncio.timeout(1):
                        await client.writer.drain()
        # The system's buffers on both sides of the proxy, a few MB each, and 64 KiB of its own.
        assert total < 50 * size
        bed.peer.echoes = False
        bed.peer.reads.set()
        await until(lambda: bed.proxy.counts.passed["to_server"] == total)

    async def test_a_reset_of_one_end_reaches_the_other(self, bed: Bed) -> None:
        client = await bed.client()
        await client.ask(b"x")
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.abort()
        await until(lambda: bed.peer.ends == ["reset"])

    async def test_a_server_that_is_down_resets_its_clients(self, bed: Bed) -> None:
        await bed.peer.close()
        assert await (await bed.client()).is_reset()


@pytest.mark.asyncio
class TestFaults:
    async def test_reset_reaches_both_ends_of_all_connections(self, bed: Bed) -> None:
        clients = [await bed.client() for _ in range(20)]
        for client in clients:
            await client.ask(b"x")
        await bed.proxy.reset()
        assert all([await client.is_reset() for client in clients])
        await until(lambda: bed.peer.ends == ["reset"] * 20)
        assert bed.proxy.counts.resets == 20
        assert await (await bed.client()).ask(b"again") == b"again"

    async def test_refuse_lets_old_connections_go_on(self, bed: Bed) -> None:
        old = await bed.client()
        await old.ask(b"x")
        await bed.proxy.refuse()
        for _ in range(50):
            with pytest.raises(ConnectionRefusedError):
                await bed.client()
        assert await old.ask(b"still here") == b"still here"
        await bed.proxy.refuse(reset=True)
        assert await old.is_reset()
        await bed.proxy.heal()
        assert await (await bed.client()).ask(b"again") == b"again"

    async def test_swallowed_replies(self, bed: Bed) -> None:
        asks, rests = await bed.client(), await bed.client()
        await asks.ask(b"x")
        await rests.ask(b"y")
        await bed.proxy.swallow_replies()
        await asks.say(b"commit")
        await until(lambda: bed.proxy.counts.lost["to_client"] == len(b"commit"))
        assert bed.peer.got[0] == b"xcommit"
        await bed.proxy.heal()
        assert await asks.is_reset()
        assert await rests.ask(b"nothing was lost here") == b"nothing was lost here"

    async def test_a_new_connection_s_request_arrives_and_its_reply_does_not(self, bed: Bed) -> None:
        await bed.proxy.swallow_replies()
        client = await bed.client()
        await client.say(b"post")
        await until(lambda: bed.proxy.counts.lost["to_client"] == len(b"post"))
        assert bed.peer.got == [b"post"]
        await bed.proxy.heal()
        assert await client.is_reset()

    async def test_replies_are_swallowed_after_a_certain_request(self, bed: Bed) -> None:
        client, other = await bed.client(), await bed.client()
        await bed.proxy.swallow_replies(after=b"COMMIT")
        assert await client.ask(b"BEGIN; INSERT; COM") == b"BEGIN; INSERT; COM"
        await client.say(b"MIT")
        await until(lambda: bed.proxy.counts.lost["to_client"] == len(b"MIT"))
        assert await other.ask(b"BEGIN") == b"BEGIN"
        await bed.proxy.swallow_replies(after=b"COMMIT")
        assert await client.is_reset()
        assert await other.ask(b"ROLLBACK") == b"ROLLBACK"

    async def test_drop_hides_bytes_ends_and_resets(self, bed: Bed) -> None:
        dies, new = await bed.client(), None
        await dies.ask(b"x")
        await bed.proxy.drop()
        await dies.say(b"unheard")
        dies.abort()
        new = await bed.client()
        await new.say(b"unheard too")
        await until(lambda: bed.proxy.counts.lost["to_server"] == len(b"unheard" + b"unheard too"))
        bed.peer.writers[0].write(b"anyone?")
        await until(lambda: bed.proxy.counts.lost["to_client"] == len(b"anyone?"))
        assert bed.peer.got == [b"x"]
        assert bed.peer.ends == []
        await bed.proxy.heal()
        assert await new.is_reset()
        await until(lambda: bed.peer.ends == ["reset"])

    async def test_a_drop_towards_the_server_hides_the_end_of_its_client(self, bed: Bed) -> None:
        client = await bed.client()
        await client.ask(b"x")
        await bed.proxy.drop("to_server")
        bed.peer.writers[0].write(b"heard")
        assert await client.hear(5) == b"heard"
        client.abort()
        for _ in range(20):
            bed.peer.writers[0].write(b"to nobody")
            await asyncio.sleep(0.01)
        assert bed.peer.ends == []
        await until(lambda: bed.proxy.counts.lost["to_client"] > 0)
        await bed.proxy.heal()
        await until(lambda: bed.peer.ends == ["reset"])

    async def test_the_end_of_a_drop_resets_connections_with_a_gap(self, bed: Bed) -> None:
        client = await bed.client()
        await client.ask(b"x")
        await bed.proxy.swallow_replies()
        await client.say(b"lost")
        await until(lambda: bed.proxy.counts.lost["to_client"] == 4)
        await bed.proxy.drop()
        assert bed.proxy.open_connections == 1
        await bed.proxy.delay(0.001)
        assert await client.is_reset()

    @pytest.mark.parametrize("steps", range(5))
    async def test_nothing_passes_after_a_gap(self, bed: Bed, steps: int) -> None:
        client = await bed.client()
        await client.ask(b"x")
        await bed.proxy.drop("to_server")
        await client.say(b"lost")
        await until(lambda: bed.proxy.counts.lost["to_server"] == 4)
        # Bytes that the proxy has read, and not yet passed on, when the drop ends
        client.writer.write(b"late")
        for _ in range(steps):
            await asyncio.sleep(0)
        await bed.proxy.heal()
        assert await client.is_reset()
        assert bed.proxy.counts.passed["to_server"] == 1

    async def test_cut_after(self, bed: Bed) -> None:
        client = await bed.client()
        await client.ask(b"before")
        await bed.proxy.cut_after(1000, "to_server")
        await client.say(bytes(5000))
        assert await client.is_reset()
        await until(lambda: bed.peer.ends == ["reset"])
        assert bed.peer.got == [b"before" + bytes(1000)]
        await bed.proxy.cut_after(3, "to_client")
        client = await bed.client()
        assert await client.ask(b"ab") == b"ab"
        await client.say(b"cdef")
        assert await client.is_reset()
        await bed.proxy.cut_after(0, "to_server")
        client = await bed.client()
        await client.say(b"nothing of this arrives")
        assert await client.is_reset()
        assert bed.proxy.counts.resets == 3
        assert bed.proxy.counts.passed["to_server"] == len(b"before") + 1000 + 6

    async def test_delay_and_its_end(self, bed: Bed) -> None:
        client = await bed.client()
        await bed.proxy.delay(0.1, jitter=0.05)
        began = time.monotonic()
        assert await client.ask(b"slow") == b"slow"
        assert time.monotonic() - began >= 0.2
        await bed.proxy.delay(3600)
        await client.say(b"held")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.reader.readexactly(1)
        await bed.proxy.heal()
        assert await client.hear(4) == b"held"
        assert bed.proxy.counts.resets == 0

    async def test_a_drop_swallows_delayed_bytes(self, bed: Bed) -> None:
        client = await bed.client()
        await client.ask(b"x")
        await bed.proxy.delay(3600)
        await client.say(b"held")
        await bed.proxy.drop()
        await until(lambda: bed.proxy.counts.lost["to_server"] == 4)
        await bed.proxy.heal()
        assert await client.is_reset()
        assert bed.peer.got == [b"x"]

    async def test_throttle_shares_the_line_and_stays_exact(self, bed: Bed) -> None:
        bed.peer.echoes = False
        clients = [await bed.client() for _ in range(4)]
        await bed.proxy.throttle(100_000)
        began = time.monotonic()
        for number, client in enumerate(clients):
            await client.say(bytes([number]) * 10_000)
        await until(lambda: bed.proxy.counts.passed["to_server"] == 40_000)
        assert time.monotonic() - began >= 0.39
        clients[0].writer.write(bytes(5_000_000))
        await bed.proxy.heal()
        await until(lambda: sum(map(len, bed.peer.got)) == 5_040_000)

    async def test_close_in_the_middle_of_everything(self, bed: Bed) -> None:
        clients = [await bed.client() for _ in range(20)]
        await bed.proxy.delay(3600)
        for client in clients:
            await client.say(b"held")
        late = await bed.client()
        await bed.proxy.close()
        assert all([await client.is_reset() for client in [*clients, late]])
        await bed.proxy.close()
        with pytest.raises(RuntimeError):
            await bed.proxy.heal()


class TestOnServers:
    def test_a_commit_whose_reply_is_swallowed_in_postgresql(self, postgres: Postgres, thread: ProxyThread) -> None:
        proxy = thread.open("127.0.0.1", postgres.port)
        table = f"t_{uuid.uuid4().hex}"
        with psycopg.connect(postgres.url, autocommit=True) as direct:
            direct.execute(f"CREATE TABLE {table} (n int)".encode())
            url = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres"
            client = psycopg.connect(url)
            thread.run(proxy.swallow_replies(after=b"COMMIT"))
            client.execute(f"INSERT INTO {table} VALUES (1)".encode())
            with pytest.raises(psycopg.OperationalError), _meanwhile(lambda: _heal_after_loss(thread, proxy)):
                client.commit()
            client.close()
            assert direct.execute(f"SELECT n FROM {table}".encode()).fetchall() == [(1,)]
            direct.execute(f"DROP TABLE {table}".encode())

    def test_a_commit_whose_reply_is_swallowed_in_mysql(self, mysql: MySQL, thread: ProxyThread) -> None:
        proxy = thread.open("127.0.0.1", mysql.port)
        table = f"t_{uuid.uuid4().hex}"
        settings: dict[str, Any] = {"host": "127.0.0.1", "user": "root", "database": "test"}
        with pymysql.connect(port=mysql.port, autocommit=True, **settings) as direct, direct.cursor() as cursor:
            cursor.execute(f"CREATE TABLE {table} (n int)")
            client = pymysql.connect(port=proxy.port, **settings)
            with client.cursor() as through:
                through.execute(f"INSERT INTO {table} VALUES (1)")
            thread.run(proxy.swallow_replies())
            with pytest.raises(pymysql.err.OperationalError), _meanwhile(lambda: _heal_after_loss(thread, proxy)):
                client.commit()
            cursor.execute(f"SELECT n FROM {table}")
            assert cursor.fetchall() == ((1,),)
            cursor.execute(f"DROP TABLE {table}")

    def test_a_commit_whose_reply_is_swallowed_in_mongodb(self, mongo: Mongo, thread: ProxyThread) -> None:
        proxy = thread.open("127.0.0.1", mongo.port)
        name = f"d_{uuid.uuid4().hex}"
        # Without directConnection the driver learns the node's own address and leaves the proxy.
        url = f"mongodb://127.0.0.1:{proxy.port}/?directConnection=true&replicaSet=rs0"
        with (
            MongoClient[dict[str, Any]](mongo.url) as direct,
            MongoClient[dict[str, Any]](url, socketTimeoutMS=1000, serverSelectionTimeoutMS=1000) as client,
        ):
            direct[name]["c"].insert_one({"n": 0})
            with client.start_session() as session:
                session.start_transaction()
                client[name]["c"].insert_one({"n": 1}, session=session)
                thread.run(proxy.swallow_replies())
                with pytest.raises(PyMongoError) as caught:
                    session.commit_transaction()
                assert caught.value.has_error_label("UnknownTransactionCommitResult")
                assert [each["n"] for each in direct[name]["c"].find()] == [0, 1]
                thread.run(proxy.heal())
                _when_back(session.commit_transaction)
            assert direct[name]["c"].count_documents({}) == 2
            assert all(host == ("127.0.0.1", proxy.port) for host in client.nodes)
            direct.drop_database(name)

    def test_kafka_through_a_proxy(self, own_server: OwnServer, thread: ProxyThread) -> None:
        kafka = own_server(Kafka, proxies=2)
        mine, other = (thread.open("127.0.0.1", each.target, port=each.listen) for each in kafka.proxies)
        topic = f"t-{uuid.uuid4().hex[:12]}"
        admin = kafka_admin.AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.create_topics([kafka_admin.NewTopic(topic, 1, 1)])[topic].result()
        confirmed: list[bytes | None] = []

        def on_delivery(error: object, message: Message) -> None:
            assert error is None
            confirmed.append(message.value())

        def send(*values: bytes) -> None:
            for value in values:
                producer.produce(topic, value, on_delivery=on_delivery)
            producer.poll(0)

        reader = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "reader"})
        partition = TopicPartition(topic, 0, 0)

        def written() -> int:
            return int(reader.get_watermark_offsets(partition, timeout=LONG)[1])

        producer = Producer(
            {
                "bootstrap.servers": f"127.0.0.1:{mine.port}",
                "enable.idempotence": True,
                "linger.ms": 0,
                "log_level": 0,
            }
        )
        send(b"1")
        assert producer.flush(LONG) == 0
        nodes = producer.list_topics(timeout=LONG).brokers.values()
        assert [(node.host, node.port) for node in nodes] == [("127.0.0.1", mine.port)]

        # Acknowledgements are swallowed: the records have arrived, and retries make no copies.
        thread.run(mine.swallow_replies())
        send(b"2", b"3")
        until_blocking(lambda: written() == 3)
        producer.poll(0)
        assert confirmed == [b"1"]
        thread.run(mine.heal())
        assert producer.flush(LONG) == 0
        assert (confirmed, written()) == ([b"1", b"2", b"3"], 3)

        # Half-open: nothing arrives until the proxy heals, then everything once.
        thread.run(mine.drop())
        lost = mine.counts.lost["to_server"]
        send(b"4", b"5")
        until_blocking(lambda: mine.counts.lost["to_server"] > lost)
        assert written() == 3
        thread.run(mine.heal())
        assert producer.flush(LONG) == 0

        reader.assign([partition])
        records = [reader.poll(LONG) for _ in range(written())]
        reader.close()
        assert [each and each.value() for each in records] == [b"1", b"2", b"3", b"4", b"5"]
        assert other.counts.connections == 0


class _meanwhile:  # noqa: N801 - reads as a word
    """Runs a function in a thread while the body blocks."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._thread.join()


def _heal_after_loss(thread: ProxyThread, proxy: Proxy) -> None:
    until_blocking(lambda: proxy.counts.lost["to_client"] > 0)
    thread.run(proxy.heal())


def _when_back(work: Callable[[], None]) -> None:
    """Try until the driver has noticed the reset; that may take several uses."""
    deadline = time.monotonic() + LONG
    while True:
        try:
            return work()
        except AutoReconnect:
            if time.monotonic() > deadline:
                raise
