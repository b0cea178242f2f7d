"""The benchmarks of everyday rates and of small pieces of work: small rounds, and what the servers count."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import asyncpg
import pymysql
import pytest
from confluent_kafka.admin import AdminClient
from pymongo import MongoClient
from sqlalchemy import StaticPool, create_engine

from benchmarks import endpoint, everyday, idempotent, inbox, sessions
from benchmarks.bed import Bed
from benchmarks.costs import OnMongo, OnMysql, OnPostgres
from benchmarks.trees import Tree
from servers import Kafka, Mongo, MySQL, Postgres
from tests.mongo_outbox import database_url


class SmallBed(Bed):
    """Has the server of the tests only."""

    def __init__(self, kafka: Kafka, folder: Path) -> None:
        super().__init__()
        self.kafka = kafka
        self.folder = folder
        self._admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 2})


def test_a_round_on_sqlite_publishes_every_event(kafka: Kafka, tmp_path: Path) -> None:
    found = everyday.measure(SmallBed(kafka, tmp_path), Tree(), "sqlite", 50, 0.3)
    assert len(found.latencies) == 15
    assert found.per_second > 0
    assert found.alone_per_second > 0
    assert found.server_cpu_us is None
    assert found.statements is None
    assert not list(tmp_path.glob("*.db*"))


@pytest.mark.parametrize(
    ("kind", "driver"), [(name, driver) for name, kind in inbox.KINDS.items() for driver in kind.drivers]
)
@pytest.mark.asyncio
async def test_a_round_of_the_inbox_applies_every_event(
    kind: str, driver: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    database = inbox.DRIVERS[driver][0]
    url = f"sqlite:///{tmp_path}/a.db" if database == "sqlite" else request.getfixturevalue(database).url
    url = database_url(url) if database == "mongo" else url
    found = await inbox.measure(kind, driver, url, rounds=1, turns=2)
    assert found.name == f"inbox-{kind}-{driver}"
    assert len(found.ratios) == 1


@pytest.mark.parametrize("driver", idempotent.FORMS)
@pytest.mark.asyncio
async def test_a_round_of_idempotent_functions_writes_every_order(driver: str, postgres: Postgres) -> None:
    found = await idempotent.measure(driver, postgres.url, rounds=1, turns=2)
    assert found.name == f"idempotent-run-{driver}"
    assert len(found.ratios) == 1


@pytest.mark.asyncio
async def test_a_round_of_the_endpoint_writes_every_order(postgres: Postgres) -> None:
    found = await endpoint.measure(postgres.url, rounds=1, turns=2)
    assert found.name == "idempotent-endpoint"
    assert len(found.ratios) == 1


def test_a_round_of_sessions_sets_the_hooks_again() -> None:
    before = sessions.hooks()
    found = sessions.measure("memory", create_engine("sqlite://", poolclass=StaticPool), rounds=1, blocks=1)
    assert len(found.ratios) == 1
    assert sessions.hooks() == before


@pytest.fixture
def counting() -> Iterator[Postgres]:
    with Postgres(settings={"shared_preload_libraries": "pg_stat_statements"}) as server:
        yield server


def test_statements_on_postgresql(counting: Postgres) -> None:
    on = OnPostgres(counting)

    async def ask(url: str) -> None:
        connection = await asyncpg.connect(url)
        for _ in range(3):
            async with connection.transaction():
                await connection.fetchval("SELECT $1::int", 7)
        await connection.close()

    with on.new() as url:
        before = on.statements()
        asyncio.run(ask(url))
        found = on.statements() - before
        assert {kind: found[kind] for kind in ("BEGIN", "SELECT", "COMMIT")} == {"BEGIN": 3, "SELECT": 3, "COMMIT": 3}
    assert on.cpu_seconds() > 0


def test_statements_on_mysql(mysql: MySQL) -> None:
    on = OnMysql(mysql)
    before = on.statements()
    with pymysql.connect(host="127.0.0.1", port=mysql.port, user="root") as connection:
        for _ in range(3):
            connection.cursor().execute("SELECT 7")
    assert (on.statements() - before)["select"] == 3
    assert on.cpu_seconds() > 0


def test_commands_on_mongodb(mongo: Mongo) -> None:
    on = OnMongo(cast(Any, mongo))
    before = on.statements()
    with MongoClient[dict[str, Any]](mongo.url) as client:
        for _ in range(3):
            client.shop.orders.distinct("state")  # a command that the server does not send to itself
    assert (on.statements() - before)["distinct"] == 3
    assert on.cpu_seconds() > 0
