"""The servers themselves: each starts, keeps its word through a crash, stands still, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aio_pika
import confluent_kafka
import confluent_kafka.admin
import confluent_kafka.cimpl
import nats
import psycopg
import pulsar
import pymongo
import pymysql
import pytest
import redis

from servers import (
    REGISTRY,
    Kafka,
    KafkaCluster,
    Mongo,
    MongoSet,
    Nats,
    Postgres,
    Postgres15,
    Pulsar,
    Server,
    ServerError,
    Valkey,
    apt,
    start_all,
)
from servers.fixtures import OwnServer
from servers.process import memory_folder, wait_until
from servers.sweeper import processes_in

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).parent.parent
VALUE = "value"


@dataclass(frozen=True)
class Client:
    """Writes one value that the server acknowledges; reads it over a connection of its own."""

    write: Callable[[Any], None]
    read: Callable[[Any], str]


def postgres_write(server: Server) -> None:
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE kept (value text)")
        connection.execute("INSERT INTO kept VALUES (%s)", [VALUE])


def postgres_read(server: Server) -> str:
    with psycopg.connect(server.url) as connection:
        row = connection.execute("SELECT value FROM kept").fetchone()
        assert row is not None
        return str(row[0])


def mysql_connection(server: Server) -> closing[pymysql.Connection[Any]]:
    return closing(pymysql.connect(host="127.0.0.1", port=server.port, user="root", database="test"))


def mysql_write(server: Server) -> None:
    with mysql_connection(server) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE kept (value text)")
        cursor.execute("INSERT INTO kept VALUES (%s)", [VALUE])
        connection.commit()


def mysql_read(server: Server) -> str:
    with mysql_connection(server) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT value FROM kept")
        (value,) = cursor.fetchone() or ("",)
        return str(value)


def mongo_write(server: Server) -> None:
    with pymongo.MongoClient[dict[str, Any]](server.url, w="majority", journal=True) as client:
        client.test.kept.insert_one({"value": VALUE})


def mongo_read(server: Server) -> str:
    with pymongo.MongoClient[dict[str, Any]](server.url) as client:
        document = client.test.kept.find_one()
        assert document is not None
        return str(document["value"])


def kafka_write(server: Kafka | KafkaCluster, value: str = VALUE) -> None:
    where: dict[str, str | int | float | bool] = {"bootstrap.servers": server.bootstrap_servers}
    admin = confluent_kafka.admin.AdminClient(where)
    if "kept" not in admin.list_topics(timeout=30).topics:
        for created in admin.create_topics([confluent_kafka.cimpl.NewTopic("kept", 1)]).values():
            created.result()
    producer = confluent_kafka.Producer({**where, "acks": "all"})
    errors: list[object] = []
    producer.produce("kept", value, on_delivery=lambda error, message: errors.append(error))
    producer.flush(30)
    assert errors == [None]


def kafka_read(server: Kafka | KafkaCluster) -> str:
    settings = {
        "bootstrap.servers": server.bootstrap_servers,
        "group.id": "reader",
        "enable.auto.commit": False,
    }
    consumer = confluent_kafka.Consumer(settings)
    try:
        consumer.assign([confluent_kafka.TopicPartition("kept", 0, 0)])
        message = consumer.poll(30)
        assert message is not None
        assert message.error() is None, message.error()
        return (message.value() or b"").decode()
    finally:
        consumer.close()


@contextmanager
def pulsar_client(server: Pulsar) -> Iterator[pulsar.Client]:
    client = pulsar.Client(server.url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        yield client
    finally:
        client.close()


def pulsar_write(server: Pulsar) -> None:
    with pulsar_client(server) as client:
        client.create_producer("kept").send(VALUE.encode())


def pulsar_read(server: Pulsar) -> str:
    with pulsar_client(server) as client:
        message = client.create_reader("kept", pulsar.MessageId.earliest).read_next(30_000)
        return bytes(message.data()).decode()


def rabbitmq_write(server: Server) -> None:
    async def write() -> None:
        async with await aio_pika.connect(server.url) as connection:
            channel = await connection.channel(publisher_confirms=True)
            await channel.declare_queue("kept", durable=True)
            message = aio_pika.Message(VALUE.encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, "kept")

    asyncio.run(write())


def rabbitmq_read(server: Server) -> str:
    async def read() -> str:
        async with await aio_pika.connect(server.url) as connection:
            queue = await (await connection.channel()).get_queue("kept")
            message = await queue.get()
            assert message is not None
            await message.nack(requeue=True)
            return message.body.decode()

    return asyncio.run(read())


def receiver_write(server: Server) -> None:
    urllib.request.urlopen(server.url, data=VALUE.encode(), timeout=30).close()


def receiver_read(server: Server) -> str:
    with urllib.request.urlopen(server.url, timeout=30) as answer:
        return bytes(answer.read()).decode()


def nats_write(server: Server) -> None:
    async def write() -> None:
        client = await nats.connect(server.url, allow_reconnect=False)
        await client.jetstream().add_stream(name="kept", subjects=["kept"])
        await client.jetstream().publish("kept", VALUE.encode())
        await client.close()

    asyncio.run(write())


def nats_read(server: Server) -> str:
    async def read() -> str:
        client = await nats.connect(server.url, allow_reconnect=False, connect_timeout=30)
        message = await client.jetstream().get_last_msg("kept", "kept")
        await client.close()
        return (message.data or b"").decode()

    return asyncio.run(read())


def valkey_write(server: Server) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.set("kept", VALUE)


def valkey_read(server: Server) -> str:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        return str(client.get("kept"))


CLIENTS = {
    "postgres": Client(postgres_write, postgres_read),
    "postgres15": Client(postgres_write, postgres_read),
    "mariadb": Client(mysql_write, mysql_read),
    "mysql": Client(mysql_write, mysql_read),
    "mongo": Client(mongo_write, mongo_read),
    "mongo_set": Client(mongo_write, mongo_read),
    "mongo_standalone": Client(mongo_write, mongo_read),
    "kafka": Client(kafka_write, kafka_read),
    "kafka_cluster": Client(kafka_write, kafka_read),
    "pulsar": Client(pulsar_write, pulsar_read),
    "rabbitmq": Client(rabbitmq_write, rabbitmq_read),
    "receiver": Client(receiver_write, receiver_read),
    "nats": Client(nats_write, nats_read),
    "valkey": Client(valkey_write, valkey_read),
    "redis": Client(valkey_write, valkey_read),
}


def test_every_server_is_tested() -> None:
    assert CLIENTS.keys() == REGISTRY.keys()


# The system's own Redis is fetched by nobody: it is there or it is not.
PRESENT = [name for name, kind in REGISTRY.items() if name != "redis" or kind().missing() is None]


# Those that few tests need, or none.
RARE = ("kafka_cluster", "mongo_set", "pulsar", "rabbitmq")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in RARE else []) for name in PRESENT]
)
def test_keeps_what_it_acknowledged_and_leaves_nothing(name: str, own_server: OwnServer) -> None:
    client = CLIENTS[name]
    server = own_server(REGISTRY[name])
    members = list(getattr(server, "nodes", [server]))
    folders = [member.folder for member in members]
    url = server.url
    client.write(server)

    server.kill()
    assert not any(processes_in(folder) for folder in folders)
    server.restart()
    assert server.url == url
    assert client.read(server) == VALUE

    server.pause()
    with ThreadPoolExecutor() as pool:
        blocked = pool.submit(client.read, server)
        try:
            assert_blocked(blocked)
        finally:
            server.resume()
        assert blocked.result(timeout=60) == VALUE

    server.stop()
    assert not any(processes_in(folder) for folder in folders)
    server.close()
    assert not any(folder.exists() for folder in folders)
    server.close()


def assert_blocked(answer: Future[str]) -> None:
    assert wait([answer], timeout=0.3).not_done == {answer}


def test_listens_on_this_machine_only(own_server: OwnServer) -> None:
    import psutil

    servers = [own_server(each) for each in (Postgres, Postgres15, Mongo, Nats, Valkey)]
    for server in servers:
        sockets = [s for p in processes_in(server.folder) for s in psutil.Process(p.pid).net_connections("inet")]
        listening = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}, server.name


@pytest.mark.long
def test_a_replica_set_elects_a_new_primary(own_server: OwnServer) -> None:
    servers = own_server(MongoSet)
    mongo_write(servers)
    dead = servers.primary()

    dead.kill()

    assert servers.primary() is not dead
    assert mongo_read(servers) == VALUE
    dead.restart()
    assert servers.running


@pytest.mark.long
def test_a_cluster_takes_writes_without_one_broker(own_server: OwnServer) -> None:
    cluster = own_server(KafkaCluster)
    kafka_write(cluster)

    cluster.nodes[0].kill()

    kafka_write(cluster, "later")
    assert kafka_read(cluster) == VALUE


def test_settings_reach_the_server(own_server: OwnServer) -> None:
    postgres = own_server(Postgres, settings={"wal_level": "logical"})
    with psycopg.connect(postgres.url) as connection:
        shown = connection.execute("SELECT current_setting('wal_level'), current_setting('fsync')").fetchone()
        assert shown == ("logical", "on")
    standalone = own_server(Mongo, replica_set=False)
    with pymongo.MongoClient[dict[str, Any]](standalone.url) as client:
        assert "setName" not in client.admin.command("hello")


def test_a_failed_start_shows_the_log_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    servers = [Valkey(), Postgres(settings={"wal_level": "nonsense"})]

    with pytest.raises(ServerError, match=r"(?s)postgres did not start.*its log ends.*wal_level.*nonsense"):
        start_all(servers)

    assert list(tmp_path.iterdir()) == []
    assert processes_in(tmp_path) == []
    assert "nonsense" in servers[1].log()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda sent: sent.name)
def test_nothing_outlives_the_process_that_started_it(sent: signal.Signals, tmp_path: Path) -> None:
    with command("up", "valkey", "nats", TMPDIR=str(tmp_path)) as up:
        assert up.stdout is not None
        lines = [up.stdout.readline().split() for _ in range(2)]
        assert [name for name, url in lines] == ["valkey", "nats"]
        assert len(processes_in(tmp_path)) == 2

        up.send_signal(sent)

        assert up.wait(timeout=30) == (-sent if sent is signal.SIGKILL else 0)
        wait_until(lambda: not list(tmp_path.iterdir()), seconds=30, what="the folders to be deleted")
        assert processes_in(tmp_path) == []


def test_an_interrupted_start_leaves_nothing(tmp_path: Path) -> None:
    with command("up", "postgres", "rabbitmq", TMPDIR=str(tmp_path)) as up:
        made = "pillarbox-postgres-*"
        wait_until(lambda: any(tmp_path.glob(made)), seconds=30, what="the folder that is then filled")

        up.send_signal(signal.SIGINT)

        assert up.wait(timeout=30) == 0
        assert list(tmp_path.iterdir()) == []
        assert processes_in(tmp_path) == []


def test_an_unknown_name_gets_a_suggestion() -> None:
    assert failure(2, "up", "postgre") == "pillarbox: unknown server 'postgre', did you mean 'postgres'?\n"


def test_list_names_every_server() -> None:
    with command("list") as listed:
        output, _ = listed.communicate(timeout=30)
    assert [line.split()[0] for line in output.splitlines()] == list(REGISTRY)
    assert all(re.match(r"\w+ +(present|missing: \w)", line) for line in output.splitlines())


def test_fetch_without_java_or_maven_says_so(tmp_path: Path) -> None:
    empty = {"PILLARBOX_CACHE": str(tmp_path), "JAVA_HOME": "", "PATH": str(tmp_path)}
    assert_one_sentence(failure(1, "fetch", "kafka", **empty), "Java", "apt-get install")
    program(tmp_path / "java", "exit 0")
    assert_one_sentence(failure(1, "fetch", "kafka", **empty), "`mvn`", "apt-get install")


def test_fetch_without_network_says_so(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs / "java", "exit 0")
    program(programs / "mvn", "echo '[ERROR] Unknown host'; exit 1")
    cache = tmp_path / "cache"
    said = failure(1, "fetch", "pulsar", PILLARBOX_CACHE=str(cache), JAVA_HOME="", PATH=str(programs))
    announced, sentence = said.splitlines()
    assert "fetching Pulsar" in announced
    assert_one_sentence(sentence, "Unknown host", "check the network")
    assert not [each for each in cache.iterdir() if each.is_dir()]


def test_fetch_into_an_unwritable_cache_says_so(tmp_path: Path) -> None:
    # A file where a folder should be: root, who may write everywhere, cannot write here either.
    blocked = tmp_path / "file"
    blocked.touch()
    said = failure(1, "fetch", "postgres", PILLARBOX_CACHE=str(blocked / "cache"))
    assert_one_sentence(said, "cannot be written", "PILLARBOX_CACHE")


def test_a_failed_test_shows_the_logs_of_its_servers(tmp_path: Path) -> None:
    said = run_tests(tmp_path, "def test_it(valkey, own_server): assert 0")
    assert "log of the server valkey" in said
    assert "Ready to accept connections" in said


def test_only_the_needed_servers_start(tmp_path: Path) -> None:
    none = "def test_none(request): assert not request.config.stash[SHARED].started"
    two = "def test_two(request, valkey, nats): assert len(request.config.stash[SHARED].started) == 2"
    assert "2 passed" in run_tests(tmp_path, f"{none}\n{two}", TMPDIR=str(tmp_path))
    assert not list(tmp_path.glob("pillarbox-*"))


def test_files_of_tests_live_in_memory_unless_somebody_names_another_place(tmp_path: Path) -> None:
    source = """
import os
def test_place(tmp_path, valkey):
    place = os.environ.get("TMPDIR", "/tmp")
    assert str(tmp_path).startswith(place) and str(valkey.folder).startswith(place)
    print(f"in {place}.")
"""
    assert f"in {tmp_path}." in run_tests(tmp_path, source, "-s", TMPDIR=str(tmp_path))
    said = run_tests(tmp_path, source, "-s", TMPDIR=None)
    assert "1 passed" in said
    if memory_folder():
        (folder,) = re.findall(r"in (/dev/shm/\S+)\.", said)
        assert not Path(folder).exists()


@pytest.mark.parametrize("too_small", ["MEMORY_FOR_FILES", "MEMORY_FOR_SERVERS"])
def test_a_machine_with_little_memory_keeps_its_files_on_disk(too_small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"servers.process.{too_small}", 1 << 60)
    assert memory_folder() is None


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 error")])
def test_a_missing_server_skips_locally_and_fails_in_ci(ci: str, outcome: str, tmp_path: Path) -> None:
    missing = {"PILLARBOX_TEST_REDIS": "no-such-program", "CI": ci}
    said = run_tests(tmp_path, "def test_it(valkey): pass", **missing)
    assert outcome in said
    assert "apt-get install" in said


def test_tests_of_servers_that_were_not_asked_for_are_skipped_even_in_ci(tmp_path: Path) -> None:
    shared = "def test_shared(nats): pass"
    own = "from servers import Nats\ndef test_own(own_server): own_server(Nats)"
    kept = "def test_kept(valkey): pass"
    said = run_tests(tmp_path, f"{shared}\n{own}\n{kept}", "--servers=valkey", CI="true")
    assert "1 passed, 2 skipped" in said
    assert "unknown server 'valky'" in run_tests(tmp_path, kept, "--servers=valky")


def test_a_package_that_apt_does_not_have_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal, log = tmp_path / "etc" / "refusal", tmp_path / "log"
    program(tmp_path / "apt-get", f'echo "$*" >>{log}; test -e {refusal} || exit 1; case $* in *fails*) exit 1; esac')
    monkeypatch.setattr(apt, "REFUSALS", {refusal: "no services"})
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    (failure,) = apt.install([("good",), ("fails",), ("better", "best")])

    assert "fails` failed" in failure
    assert [line.split()[-1] for line in log.read_text().splitlines()] == ["update", "good", "fails", "best"]
    assert not refusal.exists()


def program(file: Path, script: str) -> None:
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def command(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "servers", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def failure(code: int, *arguments: str, **environment: str) -> str:
    with command(*arguments, **environment) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    return said


def assert_one_sentence(said: str, *parts: str) -> None:
    assert said.startswith("pillarbox: ")
    assert len(said.splitlines()) == 1
    assert all(part in said for part in parts)


def run_tests(folder: Path, source: str, *more: str, **environment: str | None) -> str:
    """A variable of None is left out."""
    file = folder / "test_inner.py"
    file.write_text(f"from servers.fixtures import SHARED\n{source}\n")
    options = ["-p", "servers.fixtures", "-p", "no:cacheprovider", "-p", "no:randomly", "-ra", *more]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--rootdir={folder}", str(file)],
        cwd=ROOT,
        env={k: v for k, v in {**os.environ, "PYTEST_ADDOPTS": "", **environment}.items() if v is not None},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr
