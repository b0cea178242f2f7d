"""Stores on what the application has already: pools and engines stay the application's."""

import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox.conformance.probes import probe_of
from pillarbox.errors import ConfigError
from pillarbox.event import Status
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.stores.mysql import MysqlStore
from pillarbox.stores.postgres import PostgresStore, connections
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.sqlite import SqliteStore
from pillarbox.urls import store_of
from servers import MariaDB, MySQL, Postgres
from tests.integration.relays import eventually, numbered, relay, settled, stream

pytestmark = pytest.mark.asyncio

PREFIX = f"handles_{os.getpid()}"


def engine_url(server: Postgres | MySQL | MariaDB, driver: str) -> str:
    return str(server.url).replace("postgresql:", f"{driver}:").replace("mysql:", f"{driver}:")


async def works(store: Any) -> None:
    """Make the outbox, publish something from it, and remove it."""
    assert isinstance(store, SqlStore)
    await store.migrate()
    await store.open()
    to = MemoryPublisher()
    async with relay(store, stream(to)):
        await store.add(numbered("k", 5))
        await settled(store, {Status.PUBLISHED: 5})
    assert len(to.deliveries) == 5
    assert await store.remove()
    await store.close()


@pytest_asyncio.fixture
async def pool(postgres: Postgres) -> AsyncIterator[Any]:
    async with asyncpg.create_pool(postgres.url, min_size=1, max_size=3) as pool:
        yield pool


async def test_a_pool_of_asyncpg_is_shared_and_left_open(pool: Any) -> None:
    store = store_of(pool, prefix=PREFIX)
    assert isinstance(store, PostgresStore)
    assert store.features.wake_up
    assert "postgresql 127.0.0.1" in store.description
    await works(store)
    assert await pool.fetchval("SELECT 1") == 1
    assert pool.get_idle_size() == pool.get_size(), "nothing of it is kept"


async def test_a_pool_that_does_not_say_how_to_connect_is_polled(
    pool: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_pool_connector", lambda pool: None)
    with caplog.at_level(logging.WARNING):
        store = PostgresStore.of(pool, prefix=PREFIX)
    assert not store.features.wake_up
    assert "so the relay polls; pass listen_url" in caplog.text
    await works(store)


async def test_listening_needs_a_connection_of_its_own(pool: Any, postgres: Postgres) -> None:
    name = f"listens_{os.getpid()}"
    store = PostgresStore.of(pool, prefix=PREFIX, listen_url=f"{postgres.url}?application_name={name}")
    await store.migrate()
    listening = f"SELECT query FROM pg_stat_activity WHERE application_name = '{name}'"
    async with relay(store, stream(MemoryPublisher())):
        await eventually(lambda: probe_of(store).query(listening), lambda rows: any("LISTEN" in row[0] for row in rows))
    assert await store.remove()
    await store.close()


async def test_an_engine_on_asyncpg_shares_its_connections(postgres: Postgres) -> None:
    name = f"engine_{os.getpid()}"
    engine = create_async_engine(
        engine_url(postgres, "postgresql+asyncpg"),
        connect_args={"server_settings": {"application_name": name}},
        pool_size=2,
        max_overflow=0,
    )
    store = store_of(engine, prefix=PREFIX)
    assert isinstance(store, PostgresStore)
    assert await probe_of(store).query("SELECT current_setting('application_name')") == [(name,)]
    await works(store)
    async with engine.connect() as connection:
        assert await connection.scalar(sqlalchemy.text("SELECT 1")) == 1
    await engine.dispose()


async def test_a_connection_of_an_engine_that_was_cut_is_replaced(postgres: Postgres) -> None:
    engine = create_async_engine(engine_url(postgres, "postgresql+asyncpg"), pool_size=1, max_overflow=0)
    store = PostgresStore.of(engine, prefix=PREFIX)
    probe = probe_of(store)
    ((pid,),) = await probe.query("SELECT pg_backend_pid()")
    killer = await asyncpg.connect(postgres.url)
    await killer.execute(f"SELECT pg_terminate_backend({pid})")
    await killer.close()

    async def another() -> bool:
        try:
            return await probe.query("SELECT pg_backend_pid()") != [(pid,)]
        except Exception:
            return False

    await eventually(another)
    await engine.dispose()


async def test_an_engine_on_another_driver_gives_its_url(postgres: Postgres) -> None:
    engine = sqlalchemy.create_engine(engine_url(postgres, "postgresql+psycopg"))
    store = store_of(engine, prefix=PREFIX)
    assert probe_of(store).url == postgres.url
    await works(store)


@pytest.mark.parametrize("make", [sqlalchemy.create_engine, create_async_engine])
async def test_mysql_takes_the_url_of_an_engine(mysql: MySQL, make: Callable[[str], Any]) -> None:
    driver = "mysql+pymysql" if make is sqlalchemy.create_engine else "mysql+asyncmy"
    store = store_of(make(f"{engine_url(mysql, driver)}?charset=utf8mb4"), prefix=PREFIX)
    assert isinstance(store, MysqlStore)
    await works(store)


async def test_mariadb_takes_the_url_of_an_engine(mariadb: MariaDB) -> None:
    store = store_of(sqlalchemy.create_engine(engine_url(mariadb, "mariadb+pymysql")), prefix=PREFIX)
    assert isinstance(store, MysqlStore)
    assert store.description.startswith("mariadb ")
    await works(store)


async def test_tls_options_of_an_engine_are_not_dropped_silently() -> None:
    engine = sqlalchemy.create_engine("mysql+pymysql://u:p@host/db?ssl_verify_cert=true&charset=utf8mb4")
    with pytest.raises(ConfigError, match="ssl_verify_cert"):
        store_of(engine)


@pytest.mark.parametrize("make", [sqlalchemy.create_engine, create_async_engine])
async def test_sqlite_takes_the_file_of_an_engine(tmp_path: Path, make: Callable[[str], Any]) -> None:
    driver = "sqlite" if make is sqlalchemy.create_engine else "sqlite+aiosqlite"
    store = store_of(make(f"{driver}:///{tmp_path}/shop.db"), prefix=PREFIX)
    assert isinstance(store, SqliteStore)
    await works(store)


async def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="give the engine a file"):
        store_of(sqlalchemy.create_engine("sqlite://"))
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(ConfigError, match="is no store"):
        store_of(connection)
    engine.dispose()
