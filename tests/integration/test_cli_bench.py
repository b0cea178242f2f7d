"""``pillarbox bench`` on real databases, as a user runs it. What it measures is never asserted."""

import asyncio
import itertools
import json
import os
import pty
import signal
import sqlite3
import subprocess
from typing import Any

import confluent_kafka.admin as confluent_admin
import psycopg
import pytest
from confluent_kafka import Consumer

from pillarbox.urls import store_from_url
from servers import Kafka
from tests.integration.commands import COMMAND, Command
from tests.integration.relays import until

pytestmark = pytest.mark.timeout(120)
kafka_admin: Any = confluent_admin  # its types leave out what it exports
_numbers = itertools.count(1)
SMALL = ("bench", "--events", "200", "--rounds", "1", "--duration", "500ms")
LONG = ("bench", "--events", "1000000")


def made(command: Command) -> set[str]:
    """What the database's catalog has of names that a bench gives."""
    url = command.variables["PILLARBOX_STORE"]
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)
        names = connection.execute("SELECT name FROM sqlite_master").fetchall()
        connection.close()
    else:
        with psycopg.connect(url) as server:
            names = server.execute("SELECT relname FROM pg_class UNION SELECT proname FROM pg_proc").fetchall()
    return {name for (name,) in names if name.startswith("bench_")}


def test_a_table_and_nothing_left(pillarbox: Command) -> None:
    pillarbox("events", "add", "order.created", "{}")
    ended = pillarbox(*SMALL, "--rounds", "2")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0].startswith("store ")
    assert lines[1].startswith("destination  memory (")
    assert "pillarbox " in lines[2]
    assert lines[3].endswith("200 events of 250 bytes, 2 rounds")
    cells = {line.split("  ")[0]: line.split() for line in lines}
    for name in ("write, each in a transaction", "write, 500 in a transaction", "drain by the relay"):
        assert cells[name][-2:] == ["-", "-"], "there is no destination to compare with"
    assert "this process" in ended.out.lower()
    assert lines[-1].startswith("On a busy machine")
    assert made(pillarbox) == set()
    (stream,) = pillarbox("status", "--json").json
    assert stream["pending"] == 1, "the user's own outbox is not touched"


def test_events_arrive_at_the_destination(pillarbox: Command) -> None:
    out = pillarbox.folder / "out.jsonl"
    found = pillarbox(*SMALL, "--bytes", "100", "--to", f"file://{out}", "--json").json
    assert found["destination"] == f"file {out}"
    assert (found["events"], found["rounds"], found["bytes"]) == (200, 1, 100)
    assert found["versions"]["pillarbox"]
    assert len(found["drain"]["rounds"]) == len(found["drain"]["ratio"]["rounds"]) == 1
    assert found["drain"]["low"] <= found["drain"]["median"] <= found["drain"]["high"]
    latency = found["latency"]
    assert latency["events"] > 0
    for each in ("write_ms", "commit_to_acknowledgement_ms", "floor_ms"):
        assert 0 <= latency[each]["p50"] <= latency[each]["p95"] <= latency[each]["p99"]
    assert found["peak_memory_mb"] > 1
    events = [json.loads(line) for line in out.read_text().splitlines()]
    assert {event["type"] for event in events} == {"pillarbox.bench"}
    assert len({event["id"] for event in events}) == len(events) > 400
    assert made(pillarbox) == set()
    table = pillarbox(*SMALL, "--mode", "queue", "--to", f"file://{out}")
    assert "floor: straight to the destination" in table.out


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_leaves_nothing(pillarbox: Command, number: signal.Signals) -> None:
    with pillarbox.start(*LONG) as process:
        await until(lambda: made(pillarbox))
        process.send_signal(number)
        out, err = await asyncio.to_thread(process.communicate, timeout=60)
        assert (process.returncode, out, err) == (130, b"", b"")
    assert made(pillarbox) == set()


@pytest.mark.asyncio
async def test_what_a_killed_run_left_is_cleaned(pillarbox: Command) -> None:
    assert pillarbox("init", "--prefix", "bench_mine").code == 0
    mine = made(pillarbox)
    with pillarbox.start(*LONG) as process:
        await until(lambda: made(pillarbox) - mine)
        process.kill()
    prefixes = {name[: len("bench_01234567")] for name in made(pillarbox) - mine}
    (prefix,) = prefixes
    told = pillarbox(*SMALL)
    assert told.code == 0
    assert f"other runs of the bench have left {prefix}" in told.err
    assert "--clean" in told.err
    cleaned = pillarbox("bench", "--clean")
    assert (cleaned.code, cleaned.err) == (0, "")
    first, last = cleaned.out.splitlines()
    assert (first, last.partition(" from ")[0]) == (prefix, "removed 1 outbox")
    assert made(pillarbox) == mine, "a name that only starts so is somebody's own"
    assert pillarbox("bench", "--clean").out.startswith("no bench run has left an outbox in ")
    assert pillarbox("bench", "--clean", "--json").json["removed"] == []
    own: Any = store_from_url(pillarbox.variables["PILLARBOX_STORE"], prefix="bench_mine")
    assert await own.remove()
    await own.close()


def test_a_destination_that_is_away(pillarbox: Command) -> None:
    ended = pillarbox(*SMALL, "--to", "kafka://127.0.0.1:1?topic=bench")
    ended.failed(1, "kafka 127.0.0.1:1 cannot be reached")
    assert "tries again" not in ended.err
    assert made(pillarbox) == set()


def test_a_database_that_is_away_is_told(on_sqlite: Command) -> None:
    away = "postgresql://ann:hunter22@127.0.0.1:1/shop"
    ended = on_sqlite(*SMALL, variables={"PILLARBOX_STORE": away})
    ended.failed(1, "postgresql 127.0.0.1:1/shop cannot be used now")
    assert "hunter22" not in ended.err


def test_kafka(on_sqlite: Command, kafka: Kafka) -> None:
    servers = kafka.bootstrap_servers
    topic = f"bench-{os.getpid()}-{next(_numbers)}"
    client = kafka_admin.AdminClient({"bootstrap.servers": servers})
    client.create_topics([kafka_admin.NewTopic(topic, 1, 1, config={"max.message.bytes": "2000"})])[topic].result()
    found = on_sqlite(*SMALL, "--to", f"kafka://{servers}?topic={topic}", "--json").json
    assert found["destination"] == f"kafka {servers}"
    assert found["drain"]["floor"]["median"] > 0
    assert "confluent-kafka" in found["versions"]
    consumer = Consumer({"bootstrap.servers": servers, "group.id": topic, "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([topic])
        message = consumer.poll(30)
        assert message is not None
        assert len(message.value() or b"") == 250
        assert dict(message.headers() or [])["event_type"] == b"pillarbox.bench"
    finally:
        consumer.close()
    on_sqlite(*SMALL, "--to", f"kafka://{servers}?topic={topic}", "--bytes", "4000").failed(
        1, f"kafka {servers} did not take an event of the bench", "max.message.bytes"
    )
    on_sqlite(*SMALL, "--to", f"kafka://{servers}").failed(2, "no Kafka topic is given")
    assert made(on_sqlite) == set()


def test_one_stream_of_several_is_named(on_sqlite: Command) -> None:
    (on_sqlite.folder / "pillarbox.toml").write_text(
        f"retry = 'fixed:1'\n[streams.a]\nto = 'file://{on_sqlite.folder}/a.jsonl'\n"
        f"[streams.b]\nto = 'file://{on_sqlite.folder}/b.jsonl'\nslots = 2\n"
    )
    on_sqlite(*SMALL).failed(2, "has 2 streams; choose one with --stream: a, b")
    assert on_sqlite(*SMALL, "--stream", "b", "--json").json["destination"].endswith("b.jsonl")
    assert not (on_sqlite.folder / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--events", "9"], 2, "--events is 9; use 10 to 10,000,000"),
        (["--rounds", "0"], 2, "--rounds is 0; use 1 to 100"),
        (["--bytes", "2000000"], 2, "--bytes is 2e+06; use 16 to 1,000,000"),
        (["--rate", "nan"], 2, "--rate is nan"),
        (["--duration", "0s"], 2, "--duration is '0s'; use 100ms to 1h"),
        (["--events", "many"], 2, "--events"),
        (["--evnets", "9"], 2, "did you mean '--events'?"),
        (["--prefix", "outbox"], 2, "has no option --prefix"),
        (["--to", "stdout:"], 2, "standard output shows the figures"),
        (["--to", "kafak://localhost"], 2, "did you mean 'kafka'?"),
        (["--to", "file:///nowhere/out.jsonl"], 2, "correct the path"),
        (["--store", "memory:"], 2, "a store in memory cannot be measured"),
        (["--store", "sqlite:///none.db"], 1, "none.db does not exist"),
        (["--clean", "--store", "sqlite:///none.db"], 1, "none.db does not exist"),
    ],
)
def test_a_wrong_call_is_one_sentence(on_sqlite: Command, words: list[str], code: int, said: str) -> None:
    on_sqlite("bench", *words).failed(code, said)
    assert made(on_sqlite) == set()
    assert not (on_sqlite.folder / "none.db").exists()


def test_a_terminal_sees_how_far_it_is(on_sqlite: Command) -> None:
    ours, theirs = pty.openpty()
    subprocess.run(
        [*COMMAND, *SMALL, "--json"],
        cwd=on_sqlite.folder,
        env=on_sqlite.environment(),
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        check=True,
        timeout=60,
    )
    os.close(theirs)
    shown = os.read(ours, 100_000)
    os.close(ours)
    assert b"round 1 of 1, " in shown
    assert shown.endswith(b"\r\x1b[K")


def test_help_and_completion_know_it(on_sqlite: Command) -> None:
    told = on_sqlite("bench", "--help").out
    assert "DO arrive at the destination" in told
    assert "pillarbox.bench" in told
    assert "bench" in on_sqlite("completion", "bash").out
