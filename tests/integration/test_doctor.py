"""``pillarbox doctor`` on set-ups that are broken on purpose, each with its remedy, and on one that is well."""

import asyncio
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
from confluent_kafka import admin

from pillarbox.cli.doctor import encryption
from pillarbox.cli.settings import Settings
from pillarbox.conformance.probes import probe_of
from pillarbox.finding import State
from pillarbox.stores.mysql import MysqlStore
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.postgres.examined import durability
from servers import (
    Kafka,
    KafkaCluster,
    MariaDB,
    Mongo,
    MongoStandalone,
    MySQL,
    Nats,
    Postgres,
    Pulsar,
    RabbitMQ,
    Valkey,
)
from servers.fixtures import OwnServer
from tests.integration.commands import Command, Ended
from tests.integration.jetstream import desk as nats_desk
from tests.integration.rabbit import desk

pytestmark = pytest.mark.timeout(120)

_numbers = itertools.count(1)


def found(ended: Ended, state: str) -> dict[str, Any]:
    """The findings of this state by their check."""
    return {each["check"]: each for each in json.loads(ended.out) if each["state"] == state}


def doctor(command: Command, *words: str, **how: Any) -> Ended:
    return command("doctor", "--json", *words, **how)


def on(folder: Path, url: str) -> Command:
    command = Command(folder, url, f"doctor_{os.getpid()}_{next(_numbers)}")
    assert command("init").code == 0
    return command


def test_an_outbox_that_is_well(on_sqlite: Command) -> None:
    told = doctor(on_sqlite, "--to", "stdout:")
    assert told.code == 0
    assert not found(told, "failed")
    assert not found(told, "warning")
    assert {"version", "store", "clock", "rights", "destination", "secrets", "encryption"} <= set(found(told, "ok"))
    shown = on_sqlite("doctor", "--to", "stdout:")
    assert shown.code == 0
    assert shown.out.startswith("ok       version      pillarbox ")
    assert "kafka, mongo, mysql" in shown.out.splitlines()[0]


@pytest.mark.parametrize("name", ["postgres", "mysql", "mariadb", "mongo"])
def test_servers_that_are_well(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server: Postgres | MySQL | MariaDB | Mongo = request.getfixturevalue(name)
    url = server.url if name != "mongo" else f"{server.url.partition('/?')[0].rstrip('/')}/doctor"
    told = doctor(on(tmp_path, url))
    well = found(told, "ok")
    wanted = {"store", "clock", "rights"} | ({"replica_set"} if name == "mongo" else {"connections"})
    wanted |= {"autovacuum", "indexes", "pooler"} if name == "postgres" else set()
    # The servers of the tests flush nothing.
    assert not set(found(told, "failed")) - {"durability"}, told.out
    assert wanted <= set(well), told.out


def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    told = doctor(Command(tmp_path, "postgresql://nobody@127.0.0.1:1/none"))
    assert told.code == 1
    store = found(told, "failed")["store"]
    assert "cannot be used now" in store["sentence"]
    assert store["remedy"] == "start it, or correct its address"


def test_an_outbox_that_nobody_made(tmp_path: Path) -> None:
    told = doctor(Command(tmp_path, f"sqlite:///{tmp_path}/none.db"))
    assert told.code == 1
    store = found(told, "failed")["store"]
    assert "does not exist" in store["sentence"]
    assert "pillarbox init" in store["remedy"]


def test_a_user_without_rights_and_with_limits(postgres: Postgres, tmp_path: Path) -> None:
    owner = on(tmp_path, postgres.url)
    prefix = owner.variables["PILLARBOX_PREFIX"]
    role = f"{prefix}_relay"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN")
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        connection.execute(f"GRANT INSERT, UPDATE, DELETE ON {prefix}_event TO {role}")
        connection.execute(f"ALTER ROLE {role} SET idle_in_transaction_session_timeout = '2s'")
        try:
            parts = postgres.url.partition("://")[2].rpartition("@")[2]
            user = Command(tmp_path, f"postgresql://{role}@{parts}", prefix)
            told, short, long = doctor(user), doctor(user, "--lease", "2s"), doctor(user, "--lease", "1m")
        finally:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")
    assert told.code == 1
    rights = found(told, "failed")["rights"]
    assert f"INSERT, UPDATE, DELETE on {prefix}_lease" in rights["sentence"]
    assert f"INSERT, UPDATE, DELETE on {prefix}_sleeper" in rights["sentence"]
    assert f"SELECT on {prefix}_event_seq" in rights["sentence"]
    assert re.search(rf"{prefix}_event\b", rights["sentence"]) is None
    assert rights["remedy"] == "grant it to the user of the relay"
    limit = found(told, "warning")["idle_in_transaction_session_timeout"]
    assert "is 2 s, less than a lease of 15 s" in limit["sentence"]
    assert "idle_in_transaction_session_timeout" in found(short, "ok")
    assert "of 60 s" in found(long, "warning")["idle_in_transaction_session_timeout"]["sentence"]


def test_a_right_that_is_missing_hides_no_other_finding(postgres: Postgres, tmp_path: Path) -> None:
    owner = on(tmp_path, postgres.url)
    prefix = owner.variables["PILLARBOX_PREFIX"]
    role = f"{prefix}_blind"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN")
        connection.execute(f"GRANT SELECT ON {prefix}_meta TO {role}")
        try:
            parts = postgres.url.partition("://")[2].rpartition("@")[2]
            told = doctor(Command(tmp_path, f"postgresql://{role}@{parts}", prefix))
        finally:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")
    assert told.code == 1
    broken = found(told, "failed")
    assert f"SELECT, INSERT, UPDATE, DELETE on {prefix}_worker" in broken["rights"]["sentence"]
    assert "the streams cannot be read: " in broken["streams"]["sentence"]
    assert {"clock", "connections", "indexes"} <= set(found(told, "ok"))


@pytest.mark.parametrize(
    ("fsync", "commit", "state"),
    [("on", "on", State.OK), ("on", "local", State.OK), ("on", "off", State.WARNING), ("off", "on", State.FAILED)],
)
def test_commits_that_a_crash_can_lose(fsync: str, commit: str, state: State) -> None:
    assert durability(fsync, commit).state is state


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
@pytest.mark.parametrize("zone", ["+05:00", "-05:00"])
def test_the_age_of_a_transaction_does_not_depend_on_the_time_zone(
    name: str, zone: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server: MySQL | MariaDB = request.getfixturevalue(name)
    url = urlsplit(server.url)
    command = on(tmp_path, server.url)
    store = MysqlStore(server.url, prefix=command.variables["PILLARBOX_PREFIX"])
    statement = probe_of(store).statements.texts["oldest_transaction"]
    with pymysql.connect(
        host=url.hostname, port=url.port or 3306, user=url.username or "root", database=url.path[1:]
    ) as connection:
        cursor = connection.cursor()
        cursor.execute(f"SET time_zone = '{zone}'")
        cursor.execute(f"SELECT * FROM {command.variables['PILLARBOX_PREFIX']}_stream FOR UPDATE")
        cursor.execute(statement)
        ((seconds,),) = cursor.fetchall()
    assert 0 <= seconds < 3600


def test_a_broken_index(postgres: Postgres, tmp_path: Path) -> None:
    command = on(tmp_path, postgres.url)
    prefix = command.variables["PILLARBOX_PREFIX"]
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid IN (SELECT indexrelid FROM pg_index "
            f"WHERE indrelid = '{prefix}_dead_letter'::regclass AND NOT indisprimary)"
        )
    told = doctor(command)
    assert told.code == 1
    assert "REINDEX INDEX CONCURRENTLY" in found(told, "failed")["indexes"]["remedy"]


def test_a_server_that_stands_alone(mongo_standalone: MongoStandalone, tmp_path: Path) -> None:
    url = f"{mongo_standalone.url.partition('/?')[0].rstrip('/')}/doctor"
    told = doctor(on(tmp_path, url))
    assert told.code == 0
    assert found(told, "warning")["replica_set"]["remedy"] == "make it a replica set, even of one node"


def test_a_topic_that_is_missing_and_one_with_a_single_copy(kafka: Kafka, on_sqlite: Command) -> None:
    made: Any = admin  # its types leave out what it exports
    name = f"doctor-{os.getpid()}-{next(_numbers)}"
    told = doctor(on_sqlite, "--to", f"kafka://{kafka.bootstrap_servers}?topic={name}")
    assert told.code == 1
    assert f"topic '{name}' does not exist" in found(told, "failed")["address"]["sentence"]
    client = made.AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    client.create_topics([made.NewTopic(name, 1, 1)])[name].result()
    told = doctor(on_sqlite, "--to", f"kafka://{kafka.bootstrap_servers}?topic={name}")
    assert told.code == 1
    assert set(found(told, "ok")) >= {"address", "limits"}
    durability = found(told, "failed")["durability"]
    assert "has 1 replicas" in durability["sentence"]
    assert durability["remedy"] == "give it 3 replicas and min.insync.replicas=2"


@pytest.mark.asyncio
async def test_addresses_of_rabbitmq(rabbitmq: RabbitMQ, on_sqlite: Command) -> None:
    async with desk(rabbitmq.url) as server:
        addresses = {
            "quorum": f"queue={await server.queue()}",
            "letters": f"queue={await server.queue(dead_letter_exchange='', max_length=1000)}",
            "stream": f"queue={await server.queue('stream')}",
            "classic": f"queue={await server.queue('classic')}",
            "exchange": f"exchange={await server.exchange()}",
            "none": "queue=nobody-made-it",
        }
    told = {
        name: doctor(on_sqlite, variables={"PILLARBOX_TO": f"{rabbitmq.url}?{each}"})
        for name, each in addresses.items()
    }
    assert {name for name, each in told.items() if each.code} == {"classic", "none"}
    for name in ("quorum", "letters", "stream"):
        assert {"address", "limits", "durability"} <= set(found(told[name], "ok"))
    assert "is no quorum queue" in found(told["classic"], "failed")["durability"]["sentence"]
    assert "address" in found(told["exchange"], "ok")
    assert "nobody-made-it" in found(told["none"], "failed")["address"]["sentence"]


def test_topics_of_pulsar(pulsar: Pulsar, on_sqlite: Command) -> None:
    topic = f"doctor-{os.getpid()}-{next(_numbers)}"
    told = doctor(on_sqlite, "--to", f"{pulsar.url}?topic={topic}")
    assert told.code == 0
    assert f"/{topic}' can be written" in found(told, "ok")["address"]["sentence"]
    told = doctor(on_sqlite, "--to", f"{pulsar.url}/public/nobody-made-it?topic=orders")
    assert told.code == 1
    assert "create it, or its namespace" in found(told, "failed")["address"]["sentence"]


def test_how_well_kafka_keeps_what_it_confirms(own_server: OwnServer, on_sqlite: Command) -> None:
    made: Any = admin
    server = own_server(KafkaCluster)
    client = made.AdminClient({"bootstrap.servers": server.bootstrap_servers})
    settings = {
        "safe": {"min.insync.replicas": "2"},
        "alone": {"min.insync.replicas": "1"},
        "stops": {"min.insync.replicas": "3"},
        "unclean": {"min.insync.replicas": "2", "unclean.leader.election.enable": "true"},
    }
    for done in client.create_topics(
        [made.NewTopic(name, 1, 3, config=each) for name, each in settings.items()]
    ).values():
        done.result()
    told = {name: doctor(on_sqlite, "--to", f"kafka://{server.bootstrap_servers}?topic={name}") for name in settings}
    states = {name: json.loads(each.out) for name, each in told.items()}
    found_by_name = {
        name: next((one["state"], one["sentence"]) for one in each if one["check"] == "durability")
        for name, each in states.items()
    }
    assert found_by_name["safe"] == (
        "ok",
        "stream 'default': acks=all; topic 'safe' has 3 replicas, min.insync.replicas=2",
    )
    assert found_by_name["alone"][0] == "warning"
    assert "confirmed when one broker has it" in found_by_name["alone"][1]
    assert found_by_name["stops"][0] == "warning"
    assert "one broker that is away stops all writes" in found_by_name["stops"][1]
    assert found_by_name["unclean"][0] == "failed"
    assert "a replica that lags behind may lead" in found_by_name["unclean"][1]


def test_a_broker_that_is_away(on_sqlite: Command) -> None:
    told = doctor(on_sqlite, "--to", "kafka://127.0.0.1:1?topic=orders&connect_timeout=500ms")
    assert told.code == 1
    assert "cannot be reached" in found(told, "failed")["destination"]["sentence"]


def test_a_wrong_destination(on_sqlite: Command) -> None:
    told = doctor(on_sqlite, "--to", "kafka://127.0.0.1:1")
    assert told.code == 1
    assert "no Kafka topic is given" in found(told, "failed")["destination"]["sentence"]


def test_passwords_that_others_can_read(tmp_path: Path) -> None:
    command = Command(tmp_path, "")
    del command.variables["PILLARBOX_STORE"]
    file = tmp_path / "pillarbox.toml"
    file.write_text('store = "postgresql://relay:hidden@127.0.0.1:1/shop"\n')
    file.chmod(0o644)
    told = doctor(command)
    assert "others than its owner can read it" in found(told, "failed")["secrets"]["sentence"]
    assert found(told, "failed")["secrets"]["remedy"] == "chmod 600 pillarbox.toml"
    file.chmod(0o600)
    assert "secrets" in found(doctor(command), "ok")
    typed = doctor(command, "--store", "postgresql://relay:hidden@127.0.0.1:1/shop")
    assert "the password of --store" in found(typed, "failed")["secrets"]["sentence"]
    assert "hidden" not in typed.out + typed.err
    file.write_text(
        'store = "sqlite:///shop.db"\n[consumers.mailer]\nfrom = "kafka://h?topic=x&sasl.password=hidden"\n'
    )
    file.chmod(0o644)
    assert "others than its owner can read it" in found(doctor(command), "failed")["secrets"]["sentence"]


def test_a_private_key_that_others_can_read(on_sqlite: Command, tmp_path: Path) -> None:
    key = tmp_path / "relay.key"
    key.write_text("a key")
    key.chmod(0o600)
    to = f"kafka://127.0.0.1:1?topic=orders&connect_timeout=50ms&security.protocol=ssl&ssl.key.location={key}"
    # The path of a key is no password.
    assert "secrets" in found(doctor(on_sqlite, "--to", to), "ok")
    key.chmod(0o640)
    told = found(doctor(on_sqlite, "--to", to), "failed")["secrets"]
    assert (told["sentence"], told["remedy"]) == (
        f"others than its owner can read the private key {key}",
        f"chmod 600 {key}",
    )
    key.chmod(0o600)
    told = found(doctor(on_sqlite, "--to", f"{to}&ssl.key.password=hidden"), "failed")["secrets"]
    assert "the password of --to" in told["sentence"]


@pytest.mark.parametrize(
    ("url", "is_plain"),
    [
        ("postgresql://db.example.org/shop", True),
        ("postgres://db.example.org/shop", True),
        ("postgresql+asyncpg://db.example.org/shop", True),
        ("postgresql:///shop?host=db.example.org", True),
        ("postgresql:///shop?host=/run/postgresql", False),
        ("postgresql:///shop", False),
        ("postgresql://[::1]/shop", False),
        ("postgresql://a@127.0.0.1,db.example.org/shop", True),
        ("postgresql://db.example.org/shop?sslmode=prefer", True),
        ("postgresql+asyncpg://db.example.org/shop?sslmode=verify-full", False),
        ("mysql+asyncmy://db.example.org/shop", True),
        ("mysql://db.example.org/shop?ssl_ca=/etc/ca.pem", False),
        ("mongodb://db.example.org/shop", True),
        ("mongodb+srv://db.example.org/shop", False),
    ],
)
def test_a_store_in_plain_text(url: str, is_plain: bool) -> None:
    (told,) = encryption(Settings({"store": url}, {}))
    assert (told.state is State.WARNING) is is_plain


def test_connections_in_plain_text(on_sqlite: Command) -> None:
    # The address is one of documentation: nothing answers there.
    away = "kafka://192.0.2.1:9092?topic=orders&connect_timeout=50ms"
    warned = found(doctor(on_sqlite, "--listen-url", "postgresql://192.0.2.1/shop"), "warning")
    assert warned["encryption"]["sentence"] == "listen_url: the connection leaves this machine in plain text"
    assert "stream 'default'" in found(doctor(on_sqlite, "--to", away), "warning")["encryption"]["sentence"]
    told = doctor(on_sqlite, "--to", f"{away}&security.protocol=ssl")
    assert "encryption" in found(told, "ok")


def test_streams_in_trouble(pillarbox: Command) -> None:
    assert pillarbox("events", "add", "order.created", "{}").code == 0
    assert pillarbox("streams", "pause", "mail", "--force").code == 0
    told = doctor(pillarbox)
    assert told.code == 1
    unserved = found(told, "failed")["stream_unserved"]
    assert unserved["remedy"] == "start a relay for it: pillarbox relay --stream default"
    assert found(told, "warning")["stream_paused"]["remedy"] == "pillarbox streams resume mail"
    shown = pillarbox("doctor")
    assert "-> pillarbox streams resume mail" in shown.out


@pytest.mark.asyncio
async def test_relays_of_several_versions(postgres: Postgres, tmp_path: Path) -> None:
    command = on(tmp_path, postgres.url)
    prefix = command.variables["PILLARBOX_PREFIX"]
    store = PostgresStore(postgres.url, prefix=prefix)
    await store.open()
    await store.join("mail", "ann", 60, "no broker")
    await store.join("mail", "bob", 60)
    await probe_of(store).execute("UPDATE {worker} SET version = '9.9' WHERE name = 'bob'")
    await store.close()
    told = doctor(command)
    assert "9.9" in found(told, "warning")["versions"]["sentence"]
    assert "no broker" in found(told, "failed")["stream_circuit"]["sentence"]


@pytest.mark.asyncio
async def test_a_stream_of_nats(nats: Nats, on_sqlite: Command) -> None:
    async with nats_desk(nats.url) as operator:
        stream = await operator.stream(max_msgs=1000)
        told = await asyncio.to_thread(doctor, on_sqlite, "--to", f"{nats.url}?subject={stream}")
        assert found(told, "ok")["address"]["sentence"].endswith(f"stream '{stream}' takes subject '{stream}'")
        assert "sync_interval: always" in found(told, "warning")["durability"]["remedy"]
        assert "drops its oldest messages" in found(told, "warning")["retention"]["sentence"]
        missing = await asyncio.to_thread(doctor, on_sqlite, "--to", f"{nats.url}?subject=missing.subject")
        assert missing.code == 1
        assert "no stream takes" in found(missing, "failed")["address"]["sentence"]


def test_a_stream_of_redis(valkey: Valkey, own_server: OwnServer, on_sqlite: Command) -> None:
    told = found(doctor(on_sqlite, "--to", f"{valkey.url}?stream=new"), "ok")
    assert "does not exist yet" in told["address"]["sentence"]
    assert "on disk when it is confirmed" in told["durability"]["sentence"]
    loses = own_server(Valkey, settings={"appendonly": "no"})
    refused = doctor(on_sqlite, "--to", f"{loses.url}?stream=new")
    assert refused.code == 1
    assert "appendonly is no" in found(refused, "failed")["destination"]["sentence"]
    accepted = doctor(on_sqlite, "--to", f"{loses.url}?stream=new&durable=false")
    assert accepted.code == 1
    assert found(accepted, "failed")["durability"]["remedy"] == "set it to yes"
