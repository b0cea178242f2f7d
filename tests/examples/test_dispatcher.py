"""The dispatcher of examples/: payments on PostgreSQL and MySQL, published by relays that are killed."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from threading import Event as Signal
from threading import Thread
from uuid import UUID, uuid4

import psycopg
import pymysql
import pytest
from sqlalchemy import text

from examples.dispatcher import dispatcher
from examples.dispatcher.dispatcher import PAYMENTS, RECEIPTS, REFUNDS, Bank, count, make_topics, read, spend
from servers import Kafka, MySQL, Postgres
from servers.fixtures import OwnServer
from tests.examples.shops import until

PROGRAM = Path(__file__).parents[2] / "examples" / "dispatcher" / "dispatcher.py"
DATABASES = [pytest.param("postgres"), pytest.param("mysql", marks=pytest.mark.long)]


def id_of(value: UUID | bytes) -> str:
    """MySQL has no type for it."""
    return str(UUID(bytes=value) if isinstance(value, bytes) else value)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A new database."""
    name = f"dispatcher_{uuid4().hex[:12]}"
    if request.param == "postgres":
        postgres: Postgres = request.getfixturevalue("postgres")
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"{postgres.url.rpartition('/')[0]}/{name}"
    mysql: MySQL = request.getfixturevalue("mysql")
    with pymysql.connect(host="127.0.0.1", port=mysql.port, user="root") as other, other.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
    return f"{mysql.url.rpartition('/')[0]}/{name}"


@pytest.fixture
def bank(url: str, kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bank]:
    monkeypatch.setenv("DISPATCHER_URL", url)
    monkeypatch.setenv("DISPATCHER_KAFKA", kafka.bootstrap_servers)
    monkeypatch.setattr(dispatcher, "URL", url)
    monkeypatch.setattr(dispatcher, "SERVERS", kafka.bootstrap_servers)
    dispatcher.pillarbox("init")
    make_topics()
    bank = Bank(url)
    bank.make_tables()
    yield bank
    bank.engine.dispose()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("url", DATABASES, indirect=True)
def test_killed_relays_lose_nothing_and_keep_the_order(bank: Bank) -> None:
    # Given accounts, of which one has no address for its receipts
    branch = f"b{uuid4().hex[:8]}"
    accounts = [f"{branch}-{number}" for number in range(4)]
    for account in accounts:
        bank.open_account(account, f"{account}@example.com", 1_000_000)
    bank.open_account(accounts[0], "unknown", 499)
    closed = Signal()

    def pay_on() -> None:
        while not closed.is_set():
            spend(bank, accounts)
            while count(bank, "status <> 'published'") > 50 and not closed.is_set():
                closed.wait(0.05)

    # When relays are killed while the accounts pay
    paying = Thread(target=pay_on)
    paying.start()
    relays = [dispatcher.start_relay() for _ in range(2)]
    try:
        for _ in range(3):
            goal = count(bank, "status = 'published'") + 30
            until(lambda goal=goal: count(bank, "status = 'published'") >= goal, "the relays to be at work")  # type: ignore[misc]
            relays[0].kill()
            relays[0].wait()
            relays = [*relays[1:], dispatcher.start_relay()]
        closed.set()
        paying.join()
        until(lambda: not count(bank, "status <> 'published'"), "every event to be published or dead")
    finally:
        closed.set()
        paying.join()
        for each in relays:
            each.terminate()
        for each in relays:
            each.wait()
    # Then each topic has every event that was committed for it, and nothing else
    with bank.engine.connect() as connection:
        rows = connection.execute(text("SELECT id, stream, topic FROM outbox_event")).all()
        dead = connection.execute(text("SELECT id, stream FROM outbox_dead_letter")).all()
        moves = connection.execute(text("SELECT sum(moves) FROM account")).scalar_one()
    kept = {(id_of(id), stream, topic) for id, stream, topic in rows}
    found = {}
    for topic in (PAYMENTS, REFUNDS, RECEIPTS):
        found[topic] = [each for each in read(topic) if branch.encode() in each[1]]
    ids = {topic: {headers["event_id"].decode() for headers, _ in each} for topic, each in found.items()}
    assert ids[PAYMENTS] == {id for id, stream, topic in kept if stream == "default" and not topic}
    assert ids[REFUNDS] == {id for id, _, topic in kept if topic == REFUNDS}
    assert ids[RECEIPTS] == {id for id, stream, _ in kept if stream == RECEIPTS}
    assert len(ids[PAYMENTS]) + len(ids[REFUNDS]) == moves
    # the payment without an address is dead in one stream, and published in the other
    without = {id_of(id) for id, stream in dead if stream == RECEIPTS}
    assert len(dead) == len(without) >= 1
    assert without <= ids[PAYMENTS]
    assert ids[PAYMENTS] == ids[RECEIPTS] | without
    # and the first copies of an account's events have the order of its changes
    for topic in (PAYMENTS, REFUNDS):
        numbers: dict[str, dict[int, None]] = defaultdict(dict)
        for headers, value in found[topic]:
            moved = json.loads(value)
            assert headers["branch"].decode() == branch
            numbers[moved["account"]][moved["number"]] = None
        assert all(list(each) == sorted(each) for each in numbers.values())


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("url", ["postgres", "mysql"], indirect=True)
def test_the_story_ends_well(url: str, own_server: OwnServer) -> None:
    settings = {"DISPATCHER_URL": url, "DISPATCHER_KAFKA": own_server(Kafka).bootstrap_servers}
    command = [sys.executable, str(PROGRAM)]
    told = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    for line in (
        "396 payments, 144 refused and rolled back, 45 refunds",
        "in the topic payments: 396 events",
        "in the topic refunds: 45 events",
        "in the topic receipts: 395 events",
        "the account has no mail address",
        "pruned 836 published events",
    ):
        assert line in told.stdout
