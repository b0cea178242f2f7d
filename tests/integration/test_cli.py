"""The command line on real databases, as a user runs it."""

import asyncio
import itertools
import json
import os
import pty
import signal
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import confluent_kafka.admin as confluent_admin
import psycopg
import pytest
import pytest_asyncio
from confluent_kafka import Consumer

from pillarbox import operations
from pillarbox.conformance.events import make_event
from pillarbox.conformance.store_setup import read, settle
from pillarbox.event import Event, Mode, Status
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Relay, Stream
from pillarbox.store import Failure, Filter, Hold, HoldMode, Ref, Settlement, Store
from pillarbox.urls import store_from_url
from servers import Kafka, Postgres
from servers.fixtures import OwnServer
from tests.integration.commands import COMMAND, Command
from tests.integration.relays import counts, eventually, settled, until

pytestmark = pytest.mark.timeout(120)
kafka_admin: Any = confluent_admin  # its types leave out what it exports
_numbers = itertools.count(1)
UNKNOWN = "0192f0c1-7b3a-7c11-8000-5f0e3a2b1c4d"


@pytest_asyncio.fixture
async def store(pillarbox: Command) -> AsyncIterator[Store]:
    """The test's own connection to the outbox of the command."""
    variables = pillarbox.variables
    made = store_from_url(variables["PILLARBOX_STORE"], prefix=variables["PILLARBOX_PREFIX"])
    await made.open()
    yield made
    await made.close()


async def kill(store: Store, mode: HoldMode | None, count: int, stream: str = "default") -> list[Event]:
    """Dead letters of one key, the key blocked or parked behind the first, or not at all."""
    key = "7"
    await store.add([make_event(key=key, type=f"n.{n}", stream=stream) for n in range(count)])
    await store.announce(stream, Mode.ORDERED, "memory")
    await store.join(stream, "ann", 60)
    events: list[Event] = []
    grants = await store.take(stream, "ann", 64, 60)
    for grant in grants:
        events = [event for event in await read(store, grant, 5000, 10_000_000) if event.key == key]
        if events:
            dead = [Failure(event, "refused: \x1b[31m", 5) for event in (events if mode is None else events[:1])]
            held = {} if mode is None else {key: Hold(mode, None, events[0].id)}
            await settle(store, Settlement(grant, dead=dead, hold_keys=held))
            if mode is not None and events[1:]:
                await settle(store, Settlement(grant, held=events[1:]))
            break
    await store.give(grants)
    await store.leave(stream, "ann")
    return events


def test_an_outbox_is_made_filled_published_and_pruned(pillarbox: Command) -> None:
    assert "is up to date" in pillarbox("init").out
    assert pillarbox("migrate", "--json").json["steps"] == []
    assert pillarbox("status", "--json").json == []
    made = pillarbox("events", "add", "order.created", '{"id": 7}', "--key", "7", "--header", "a=b")
    identity = UUID(made.out.strip())
    later = pillarbox("events", "add", "order.late", "-", "--available-at", "1h", "--json", stdin=b"[1]").json
    (stream,) = pillarbox("status", "--json").json
    assert (stream["waiting"], stream["pending"], stream["scheduled"], stream["unserved"]) == (1, 1, 1, True)
    assert stream["oldest_seconds"] < 60
    assert "0 (unserved)" in pillarbox("status").out
    assert [row["id"] for row in pillarbox("events", "list", "--json").json] == [later["id"], str(identity)]
    assert [row["type"] for row in pillarbox("events", "list", "--status", "pending", "--json").json] == [
        "order.created"
    ]
    shown = pillarbox("events", "show", str(identity), "--json").json
    assert (shown["key"], shown["headers"], "payload" in shown) == ("7", {"a": "b"}, False)
    assert pillarbox("events", "show", str(identity), "--payload", "--json").json["payload"] == '{"id": 7}'
    drained = pillarbox("relay", "--to", "stdout:", "--drain")
    assert drained.code == 0, drained.err
    assert [json.loads(line)["id"] for line in drained.out.splitlines()] == [str(identity)]
    assert pillarbox("events", "show", str(identity), "--json").json["status"] == "published"
    pruned = {"published": 1, "dead": 0, "inbox": 0, "keys": 0}
    assert pillarbox("prune", "--keep-published", "0", "--json").json == pruned
    nothing = "pruned 0 published events, 0 dead letters, 0 rows of the inbox and 0 idempotency keys\n"
    assert pillarbox("prune", "--keep-inbox", "0", "--keep-keys", "0").out == nothing
    pillarbox("events", "show", str(identity)).failed(3, "there is no event")
    assert "nothing to rescue" in pillarbox("rescue").out


def test_the_printed_sql_makes_an_outbox(bare: Command) -> None:
    script = bare("migrate", "--print", "--shards", "8")
    assert script.code == 0
    assert bare("status").code == 1, "printing touches nothing"
    url = bare.variables["PILLARBOX_STORE"]
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.executescript(script.out)
        connection.close()
    else:
        with psycopg.connect(url, autocommit=True) as server:
            server.execute(script.out.encode())
    assert bare("status", "--json").json == []
    assert "is up to date" in bare("migrate").out


def test_missing_tables_name_the_remedy(bare: Command) -> None:
    bare("status").failed(1, "`pillarbox init`")
    bare("migrate").failed(1, "`pillarbox init`")
    bare("relay", "--to", "stdout:", "--log-level", "error").failed(1, "`pillarbox init`")
    assert not list(bare.folder.glob("*.db")), "looking must not make a database"


def test_a_payload_is_kept_byte_for_byte(on_sqlite: Command) -> None:
    for words, stdin, kind, wanted in (
        (["-"], b'"text"', "application/json", {"payload": '"text"'}),
        (["-", "--content-type", "text/plain"], "é".encode(), "text/plain", {"payload": "é"}),
        (["-", "--content-type", "image/png"], b"\x89P", "image/png", {"payload_base64": "iVA="}),
    ):
        identity = on_sqlite("events", "add", "a", *words, stdin=stdin).out.strip()
        shown = on_sqlite("events", "show", identity, "--payload", "--json").json
        assert shown["content_type"] == kind
        assert wanted.items() <= shown.items()
    on_sqlite("events", "add", "a", "[NaN]").failed(2, "NaN")


def test_streams_are_paused_and_resumed_and_the_audit_says_by_whom(pillarbox: Command) -> None:
    pillarbox("events", "add", "a", "1")
    pillarbox("streams", "pause", "defualt").failed(3, "did you mean 'default'?", "--force")
    assert pillarbox("streams", "pause", "default", "--by", "olga").out == "paused stream 'default'\n"
    assert pillarbox("streams", "pause", "default", "--json").json["changed"] is False
    assert pillarbox("streams", "list", "--json").json[0]["paused"] is True
    assert pillarbox("streams", "resume", "default", "--by", "igor").code == 0
    assert pillarbox("streams", "pause", "new", "--force", "--by", "olga").code == 0
    told = [(row["by"], row["action"], row["stream"]) for row in pillarbox("audit", "--json").json]
    assert told == [("olga", "pause", "new"), ("igor", "resume", "default"), ("olga", "pause", "default")]


@pytest.mark.asyncio
async def test_dead_letters_are_listed_shown_replayed_and_discarded(pillarbox: Command, store: Store) -> None:
    one, two, three = await kill(store, None, 3)
    listed = pillarbox("dead", "list", "--json").json
    assert [row["id"] for row in listed] == [str(each.id) for each in (one, two, three)]
    assert "\x1b" not in pillarbox("dead", "list").out
    shown = pillarbox("dead", "show", str(one.id), "--json").json
    assert shown["errors"][0]["error"].startswith("refused")
    pillarbox("dead", "show", UNKNOWN).failed(3, "there is no event")
    pillarbox("dead", "replay").failed(2, "give ids, filters or --all")
    pillarbox("dead", "replay", str(one.id), "--all").failed(2, "give one of them")
    pillarbox("dead", "discard", "--all").failed(2, "3 dead letters would be lost", "--yes")
    assert len(pillarbox("dead", "replay", "--all", "--dry-run", "--json").json) == 3
    assert pillarbox("status", "--fail-if-dead").code == 1
    assert pillarbox("dead", "replay", "--type", "n.1", "--json").json == {"replayed": 1}
    some = pillarbox("dead", "discard", str(one.id), UNKNOWN, "--yes")
    assert (some.code, some.out) == (3, "discarded 1 dead letter\n")
    assert some.err == f"pillarbox: {UNKNOWN} is not a dead letter of a relay; for one of a consumer add --consumer\n"
    pillarbox("dead", "show", str(two.id)).failed(3, "is pending, not dead")
    assert [row["id"] for row in pillarbox("dead", "list", "--json").json] == [str(three.id)]
    assert pillarbox("status", "--fail-if-older", "1h").code == 0
    late = pillarbox("status", "--fail-if-older", "0", "--json")
    assert late.code == 1
    assert "has waited for" in late.err


@pytest.mark.asyncio
async def test_an_id_in_several_streams_is_listed_and_refused_until_one_is_named(
    pillarbox: Command, store: Store
) -> None:
    (event,) = await kill(store, None, 1)
    id = str(event.id)
    assert pillarbox("events", "add", "a", "{}", "--id", id, "--stream", "mail", "--key", "7").code == 0
    pillarbox("events", "show", id).failed(2, f"{id} is in the streams 'default', 'mail'; choose one with --stream")
    assert pillarbox("events", "show", id, "--stream", "mail", "--json").json["status"] == "pending"
    pillarbox("events", "show", id, "--stream", "other").failed(3, f"no event {id} in stream 'other'")
    pillarbox("dead", "show", id, "--stream", "mail").failed(3, "is pending, not dead")
    assert pillarbox("dead", "show", id, "--json").json["stream"] == "default", "the other one is not dead"
    await kill(store, None, 0, stream="mail")
    for words in (["show"], ["replay"], ["replay", "--dry-run"], ["discard"], ["discard", "--yes"]):
        pillarbox("dead", *words, id).failed(2, f"{id} is in the streams 'default', 'mail'")
    assert pillarbox("dead", "replay", id, "--stream", "mail", "--json").json == {"replayed": 1}
    assert (
        pillarbox("dead", "discard", id, "--stream", "mail", "--yes").err
        == f"pillarbox: {id} is not a dead letter of a relay; for one of a consumer add --consumer\n"
    )
    assert pillarbox("dead", "discard", id, "--yes", "--json").json == {"discarded": 1}
    assert pillarbox("events", "show", id, "--json").json["stream"] == "mail"


def test_events_are_listed_by_topic_and_aggregate(pillarbox: Command) -> None:
    for topic, kind, number in (("orders", "order", "7"), ("orders", "cart", "7"), ("mail", "order", "8")):
        about = ["--topic", topic, "--aggregate-type", kind, "--aggregate-id", number]
        assert pillarbox("events", "add", f"{topic}.{kind}", "{}", *about).code == 0
    for words, types in (
        (["--topic", "orders"], ["orders.cart", "orders.order"]),
        (["--aggregate-type", "order"], ["mail.order", "orders.order"]),
        (["--aggregate-id", "7", "--aggregate-type", "cart"], ["orders.cart"]),
    ):
        assert [row["type"] for row in pillarbox("events", "list", *words, "--json").json] == types
    for command in ("list", "replay", "discard"):
        assert pillarbox("dead", command, "--topic", "orders", "--aggregate-type", "cart").code == 0


def test_the_status_shows_mode_and_destination_without_a_file(pillarbox: Command) -> None:
    file = pillarbox.folder / "pillarbox.toml"
    file.write_text("[streams.mail]\nto = 'file:///planned.jsonl'\nmode = 'queue'\n")
    (planned,) = pillarbox("status", "--json").json
    assert (planned["stream"], planned["mode"], planned["destination"]) == ("mail", "queue", "file /planned.jsonl")
    file.unlink()
    out = f"file://{pillarbox.folder}/out.jsonl"
    assert pillarbox("relay", "--drain", "--stream", "mail", "--mode", "queue", "--to", out).code == 0
    (served,) = pillarbox("status", "--json").json
    assert (served["mode"], served["destination"]) == ("queue", f"file {pillarbox.folder}/out.jsonl")
    file.write_text("[streams.mail]\nto = 'file:///planned.jsonl'\n")
    assert pillarbox("status", "--json").json == [served], "the file says what is planned, the row what is"


def test_the_index_on_aggregates_is_made_on_request(bare: Command) -> None:
    def indexes() -> list[str]:
        url = bare.variables["PILLARBOX_STORE"]
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
                rows = database.execute("SELECT sql FROM sqlite_master WHERE type = 'index'").fetchall()
        else:
            with psycopg.connect(url) as server:
                prefix = bare.variables["PILLARBOX_PREFIX"]
                rows = server.execute(
                    "SELECT indexdef FROM pg_indexes WHERE tablename = %s", [f"{prefix}_event"]
                ).fetchall()
        return [text for (text,) in rows if text and "aggregate_id" in text]

    assert "(aggregate_id, aggregate_version)" not in bare("migrate", "--print").out
    assert bare("init").code == 0
    assert indexes() == []
    assert bare("migrate", "--aggregate-index").code == 0
    (index,) = indexes()
    assert index.endswith("(aggregate_id, aggregate_version)")
    assert bare("init", "--aggregate-index").code == 0, "again"
    script = bare("migrate", "--print", "--aggregate-index").out
    assert "(aggregate_id, aggregate_version)" in script


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", [HoldMode.PARKED, HoldMode.BLOCKED])
async def test_a_key_is_replayed_in_order_whatever_arrives_meanwhile(
    store: Store, mode: HoldMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More letters than a chunk has; between two chunks an event is written and the relay does all it can."""
    await kill(store, mode, 1200)
    published = MemoryPublisher()
    stream = Stream("default", to=published, on_dead="park", poll=0.01, poll_limit=0.02)
    async with Relay(store, [stream]) as relay:
        replay = store.replay

        async def replay_slowly(refs: Sequence[Ref], by: str) -> int:
            done = await replay(refs, by)
            await store.add([make_event(key="7", type="late")])
            await relay.drain()
            return done

        monkeypatch.setattr(store, "replay", replay_slowly)
        await operations.replay(store, Filter(stream="default"), "olga")
        monkeypatch.undo()
        await eventually(lambda: counts(store, "default"), lambda found: found.keys() == {Status.PUBLISHED})
    seqs = [event.seq for event in published.deliveries]
    assert len(seqs) > 1200
    assert seqs == sorted(seqs)


@pytest.mark.asyncio
async def test_many_are_replayed_while_a_relay_works(pillarbox: Command, store: Store) -> None:
    events = await kill(store, HoldMode.PARKED, 1200)
    published = MemoryPublisher()
    stream = Stream("default", to=published, on_dead="park", poll=0.01, poll_limit=0.02)
    async with Relay(store, [stream]):
        ended = await asyncio.to_thread(pillarbox, "dead", "replay", "--stream", "default", "--json")
        assert ended.json == {"replayed": 1200}
        await settled(store, {Status.PUBLISHED: 1200}, "default")
    assert [event.id for event in published.deliveries] == [event.id for event in events]


@pytest.mark.asyncio
async def test_a_relay_serves_the_file_until_sigterm(pillarbox: Command) -> None:
    out = pillarbox.folder / "out.jsonl"
    (pillarbox.folder / "pillarbox.toml").write_text(
        f"log_format = 'json'\n[streams.default]\nto = 'file://{out}'\npoll_limit = '100ms'\n"
    )
    with pillarbox.start("relay") as process:
        assert process.stderr is not None
        started = json.loads(process.stderr.readline())
        assert started["action"] == "started"
        pillarbox("events", "add", "order.created", "{}")
        await until(lambda: out.exists() and out.read_text())
        (stream,) = pillarbox("status", "--json").json
        assert (stream["workers"], stream["mode"]) == (1, "ordered")
        assert stream["destination"] == f"file {out}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert json.loads(process.stderr.read().splitlines()[-1])["action"] == "stopped"


def test_a_relay_of_ones_own_code_is_found_in_this_folder(on_sqlite: Command) -> None:
    (on_sqlite.folder / "shop.py").write_text(
        "import os\nfrom pillarbox import Relay, Stream\n"
        "def make():\n    return Relay(os.environ['PILLARBOX_STORE'], [Stream('default', to='stdout:')])\n"
        "class app:\n    relay = make()\n"
    )
    on_sqlite("events", "add", "order.created", "{}")
    for target in ("shop:make", "shop:app.relay"):
        assert on_sqlite("relay", target, "--drain").code == 0
    on_sqlite("relay", "shop:mkae").failed(2, "did you mean 'make'?")
    on_sqlite("relay", "shpo:make").failed(2, "there is no module 'shpo'")
    on_sqlite("relay", "shop:make", "--batch", "5").failed(2, "--batch does not apply to shop:make")


def test_kafka_gets_what_the_relay_drains(on_sqlite: Command, kafka: Kafka) -> None:
    topic = f"cli-{os.getpid()}-{next(_numbers)}"
    client = kafka_admin.AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    client.create_topics([kafka_admin.NewTopic(topic, 1, 1)])[topic].result()
    on_sqlite("events", "add", "order.created", '{"id": 7}', "--key", "7")
    drained = on_sqlite("relay", "--to", f"kafka://{kafka.bootstrap_servers}?topic={topic}", "--drain")
    assert drained.code == 0, drained.err
    consumer = Consumer(
        {"bootstrap.servers": kafka.bootstrap_servers, "group.id": topic, "auto.offset.reset": "earliest"}
    )
    try:
        consumer.subscribe([topic])
        message = consumer.poll(30)
        assert message is not None
        assert (message.key(), message.value()) == (b"7", b'{"id": 7}')
    finally:
        consumer.close()


def test_a_wrong_password_is_told_and_never_shown(tmp_path: Path, own_server: OwnServer) -> None:
    server = own_server(Postgres)
    server.folder.joinpath("data", "pg_hba.conf").write_text("host all all 127.0.0.1/32 scram-sha-256\n")
    server.restart()
    command = Command(tmp_path, server.url.replace("postgres@", "postgres:hunter22@"))
    for words in (["status"], ["init"], ["relay", "--to", "stdout:", "--log-level", "error"], ["status", "--json"]):
        ended = command(*words)
        ended.failed(1, "user or password refused")
        assert "hunter22" not in ended.err


def test_a_database_that_is_away_is_told(tmp_path: Path) -> None:
    command = Command(tmp_path, "postgresql://ann:hunter22@127.0.0.1:1/shop")
    ended = command("status")
    ended.failed(1, "postgresql 127.0.0.1:1/shop cannot be used now")
    assert "hunter22" not in ended.err
    with command.start("relay", "--to", "stdout:") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert b"trying again every few seconds" in line
        assert b"hunter22" not in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_reader_that_has_gone_is_no_error(on_sqlite: Command) -> None:
    on_sqlite("events", "add", "order.created", "{}")
    reader, writer = os.pipe()
    os.close(reader)
    with on_sqlite.start("events", "list", stdout=writer) as process:
        os.close(writer)
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.asyncio
async def test_ctrl_c_ends_without_a_traceback(on_sqlite: Command) -> None:
    # It waits for standard input when it is interrupted.
    with on_sqlite.start("events", "add", "a", "-", stdin=subprocess.PIPE) as process:
        await until(lambda: "pipe" in Path(f"/proc/{process.pid}/wchan").read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_a_narrow_terminal_gets_records_and_a_pipe_gets_all(on_sqlite: Command) -> None:
    on_sqlite("events", "add", "order.created", "{}", "--key", "k" * 200)
    narrow = on_sqlite("events", "list", variables={"COLUMNS": "40"}).out
    assert "\ntype: order.created\n" in narrow
    assert all(len(line) <= 120 for line in on_sqlite("events", "list", variables={"COLUMNS": "120"}).out.splitlines())
    assert "k" * 200 in on_sqlite("events", "list").out


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_colours_are_for_terminals_that_want_them(on_sqlite: Command, no_colour: str) -> None:
    on_sqlite("events", "add", "order.created", "{}")
    ours, theirs = pty.openpty()
    environment = on_sqlite.environment({"NO_COLOR": no_colour, "COLUMNS": "150"})
    subprocess.run([*COMMAND, "status"], env=environment, cwd=on_sqlite.folder, stdout=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 10_000)
    os.close(ours)
    assert (b"\x1b[31m" in shown) is not bool(no_colour)
    assert "\x1b" not in on_sqlite("status").out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_commands(on_sqlite: Command, shell: str) -> None:
    ended = on_sqlite("completion", shell)
    assert ended.code == 0, ended.err
    assert "replay" in ended.out


def test_version_and_help_import_no_driver() -> None:
    code = (
        "import sys, pillarbox.cli\ntry:\n    pillarbox.cli.main(['--version'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('asyncpg', 'confluent_kafka', 'shtab') if name in sys.modules])"
    )
    ended = subprocess.run([COMMAND[0], "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["statsu"], "there is no command 'statsu'; did you mean 'status'?"),
        (["--store", "memory:", "status"], "options come after the command, as in `pillarbox status --store ...`"),
        (["events", "lsit"], "did you mean 'list'?"),
        (["status", "--jsno"], "has no option --jsno; did you mean '--json'?"),
        (["status", "more"], "takes no argument 'more'"),
        (["events", "show", "7"], "'7' is not an event's id"),
        (["events", "list", "--limit", "0"], "--limit is 0"),
        (["events", "list", "--status", "daed"], "did you mean 'dead'?"),
        (["events", "add", "a", "{"], "the payload is not JSON"),
        (["events", "add", "", "{}"], "type is empty"),
        (["events", "add", "a", "{}", "--header", "x"], "write NAME=VALUE"),
        (["migrate", "--after", "1"], "give --print too"),
        (["migrate", "--print", "--after", "7"], "--after is 7"),
        (["migrate", "--print", "--after", "-1"], "--after is -1"),
        (["events", "list", "--limit", "9" * 30], "--limit is 999"),
        (["events", "list", "--since", "99999999999d"], "--since is '99999999999d'"),
        (["events", "list", "--key", "\udcff"], "key is '\\udcff', which is not UTF-8 text"),
        (["events", "add", "a", "{}", "--available-at", "9999999d"], "--available-at is '9999999d'"),
        (["events", "add", "a", "{}", "--available-at", "9999-12-31T23:59:59-10:00"], "--available-at is"),
        (["dead", "discard", "--all", "--by", "\udcff"], "by is"),
        (["streams", "pause", "", "--force"], "STREAM is empty"),
        (["streams", "pause", "\udcff", "--force"], "stream is"),
        (["relay", "--to", "kafak://x"], "did you mean 'kafka'?"),
        (["relay"], "no destination is given"),
    ],
)
def test_a_wrong_call_is_one_sentence(on_sqlite: Command, words: list[str], said: str) -> None:
    on_sqlite(*words).failed(2, said)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_output_cannot_encode_is_escaped(on_sqlite: Command, encoding: str) -> None:
    key = "\u043a\U0001f600"
    assert on_sqlite("events", "add", "a", "{}", "--key", key).code == 0
    narrow = {"PYTHONIOENCODING": encoding}
    ended = on_sqlite("events", "list", variables=narrow)
    assert ended.code == 0, ended.err
    assert "\\u043a" in ended.out
    assert on_sqlite("events", "list", "--json", variables=narrow).json[0]["key"] == key


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("status >&-", 0, "", ""),
        ("status --json >&-", 0, "", ""),
        ("events add a - <&-", 2, "", "the payload is not JSON"),
        ("events show 7 2>&-", 2, "", ""),
        ("status > /dev/full", 1, "", "the output cannot be written"),
        ("relay --to stdout: --drain --log-format json >&-", 2, "", "this process has no standard output"),
    ],
)
def test_closed_and_full_streams_are_no_surprise(on_sqlite: Command, line: str, code: int, out: str, err: str) -> None:
    assert on_sqlite("events", "add", "a", "{}").code == 0
    ended = subprocess.run(
        ["sh", "-c", f'"$@" {line}', "sh", *COMMAND],
        cwd=on_sqlite.folder,
        env=os.environ | on_sqlite.variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (code, out), ended.stderr
    assert err in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_drain_to_a_path_that_is_wrong_ends(on_sqlite: Command) -> None:
    ended = on_sqlite("relay", "--drain", "--to", f"file://{on_sqlite.folder}/none/x.jsonl")
    assert ended.code == 2
    assert ended.err.splitlines()[-1].endswith("No such file or directory; correct the path or its rights")


@pytest.mark.parametrize("command", ["init", "migrate"])
def test_an_outbox_of_a_newer_release_is_refused(on_sqlite: Command, command: str) -> None:
    with sqlite3.connect(on_sqlite.folder / "shop.db") as database:
        database.execute("UPDATE outbox_meta SET value = '99' WHERE name = 'schema_version'")
    database.close()
    on_sqlite(command).failed(1, "has schema version 99", "install a newer pillarbox")


def test_a_second_sigterm_cuts_nothing_short(on_sqlite: Command) -> None:
    (on_sqlite.folder / "slow.py").write_text(
        "import asyncio, os\nfrom pillarbox.publishers.handlers import Handlers\n"
        "from pillarbox.relay import Relay, Stream\nhandlers = Handlers()\n"
        "@handlers.on('a')\nasync def work(event):\n    print('begun', flush=True)\n"
        "    while not os.path.exists('may_end'):\n        await asyncio.sleep(0.01)\n"
        "relay = Relay(os.environ['PILLARBOX_STORE'], [Stream('default', to=handlers)])\n"
    )
    assert on_sqlite("events", "add", "a", "{}", "--key", "7").code == 0
    del on_sqlite.variables["PILLARBOX_PREFIX"]
    with on_sqlite.start("relay", "slow:relay") as relay:
        assert relay.stdout is not None
        assert relay.stdout.readline() == b"begun\n"
        relay.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            relay.wait(0.5)
        relay.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            relay.wait(0.5)
        (on_sqlite.folder / "may_end").touch()
        relay.communicate(timeout=20)
    assert relay.returncode == 0
    assert on_sqlite("events", "list", "--json").json[0]["status"] == "published"
