"""The least rights that a writer and a relay need, tried with a user that has no others."""

import itertools
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import pytest_asyncio
import sqlalchemy
from sqlalchemy.exc import DBAPIError

from pillarbox import Outbox, Relay, Stream
from pillarbox.conformance.probes import probe_of
from pillarbox.errors import DuplicateEvent
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.stores.sql import SqlStore
from pillarbox.urls import store_from_url

pytestmark = pytest.mark.asyncio

_numbers = itertools.count(1)
_TABLES = ("meta", "event", "stream", "worker", "lease", "held_key", "dead_letter", "audit")
_DENIED = "(?i)denied"


class Clerk:
    """An outbox, and a user of its database who has the rights that he was granted and no others."""

    def __init__(self, store: SqlStore, url: str) -> None:
        self.store = store
        self.prefix = probe_of(store).prefix
        self.user = f"clerk_{os.getpid()}_{next(_numbers)}"
        parts = urlsplit(url)
        self.is_mysql = parts.scheme == "mysql"
        self.url = urlunsplit(parts._replace(netloc=f"{self.user}@{parts.hostname}:{parts.port}"))
        driver = "mysql+pymysql" if self.is_mysql else "postgresql+psycopg"
        self.engine = sqlalchemy.create_engine(self.url.replace(parts.scheme, driver, 1))

    @property
    def name(self) -> str:
        return f"'{self.user}'@'127.0.0.1'" if self.is_mysql else self.user

    async def run(self, text: str) -> None:
        """As the owner."""
        async with self.store.transaction() as tx:
            await tx.run(text)

    async def hire(self) -> None:
        await self.run(f"CREATE USER {self.name}")

    async def grant(self, rights: str, *tables: str) -> None:
        for table in tables:
            await self.run(f"GRANT {rights} ON {self.prefix}_{table} TO {self.name}")

    def write(self, count: int = 1, **settings: Any) -> Sequence[Any]:
        """Add so many events in one transaction."""
        on_duplicate = settings.pop("on_duplicate", "raise")
        outbox = Outbox(prefix=self.prefix, **settings)
        events = [outbox.event("order.created", {"n": n}, key=n) for n in range(count)]
        with self.engine.begin() as connection:
            outbox.add_all(connection, events, on_duplicate=on_duplicate)
        return events

    def knows(self, event: Any) -> bool:
        with self.engine.begin() as connection:
            return bool(Outbox(prefix=self.prefix).exists(connection, event.id))

    async def waiting(self) -> int:
        return sum((await self.store.count("default")).values())


# Not for PostgreSQL, where it is the owner who migrates.
MYSQL: pytest.MarkDecorator = pytest.mark.parametrize("clerk", ["mysql", "mariadb"], indirect=True)


@pytest_asyncio.fixture(params=["postgres", "mysql", "mariadb"])
async def clerk(request: pytest.FixtureRequest) -> AsyncIterator[Clerk]:
    url = str(request.getfixturevalue(request.param).url)
    store = store_from_url(url, prefix=f"rights_{os.getpid()}_{next(_numbers)}")
    assert isinstance(store, SqlStore)
    await store.migrate()
    await store.open()
    clerk = Clerk(store, url)
    await clerk.hire()
    yield clerk
    clerk.engine.dispose()
    await store.close()


async def test_add_needs_insert_on_the_events_and_nothing_else(clerk: Clerk) -> None:
    with pytest.raises(DBAPIError, match=_DENIED):
        clerk.write()
    await clerk.grant("INSERT", "event")
    (event,) = clerk.write()
    clerk.write(3)
    assert await clerk.waiting() == 4
    outbox = Outbox(prefix=clerk.prefix)
    with clerk.engine.begin() as connection, pytest.raises(DuplicateEvent):
        outbox.add(connection, "order.created", {}, id=event.id)


async def test_ignoring_duplicates_needs_more_on_mysql(clerk: Clerk) -> None:
    await clerk.grant("INSERT", "event")
    if clerk.is_mysql:
        with pytest.raises(DBAPIError, match=_DENIED):
            clerk.write(on_duplicate="ignore")
        await clerk.grant("SELECT, UPDATE", "event")
    clerk.write(on_duplicate="ignore")
    assert await clerk.waiting() == 1


async def test_exists_needs_select_on_the_events_and_the_dead(clerk: Clerk) -> None:
    await clerk.grant("INSERT", "event")
    (event,) = clerk.write()
    for table in ("event", "dead_letter"):
        with pytest.raises(DBAPIError, match=_DENIED):
            clerk.knows(event)
        await clerk.grant("SELECT", table)
    assert clerk.knows(event)


async def test_locking_keys_needs_the_rows_that_are_locked(clerk: Clerk) -> None:
    await clerk.grant("INSERT", "event")
    if clerk.is_mysql:
        with pytest.raises(DBAPIError, match=_DENIED):
            clerk.write(3, lock_keys=True)
        await clerk.grant("SELECT, UPDATE", "key_lock")
    clerk.write(3, lock_keys=True)
    assert await clerk.waiting() == 3


async def test_a_relay_needs_the_four_rights_on_its_tables(clerk: Clerk) -> None:
    await clerk.grant("INSERT", "event")
    clerk.write(3)
    await clerk.grant("SELECT, INSERT, UPDATE, DELETE", *_TABLES)
    if not clerk.is_mysql:
        await clerk.grant("SELECT, INSERT, UPDATE, DELETE", "sleeper")
        await clerk.grant("SELECT", "event_seq")
    publisher = MemoryPublisher()
    store = store_from_url(clerk.url, prefix=clerk.prefix)
    async with Relay(store, [Stream("default", to=publisher)]) as relay:
        await relay.drain()
    assert len(publisher.deliveries) == 3


@MYSQL
async def test_migrations_need_to_create_and_fill_tables(clerk: Clerk) -> None:
    await clerk.run(f"CREATE DATABASE {clerk.user}")
    await clerk.run(f"GRANT CREATE, SELECT, INSERT, UPDATE ON {clerk.user}.* TO {clerk.name}")
    store = store_from_url(clerk.url.rpartition("/")[0] + "/" + clerk.user)
    assert isinstance(store, SqlStore)
    assert await store.migrate()
    await store.close()
