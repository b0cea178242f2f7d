"""A database that refuses to settle what was published."""

import logging
import os
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from pillarbox.conformance.probes import probe_of
from pillarbox.event import Status
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.sql import SqlStore
from servers import Postgres
from tests.integration.relays import (
    SqlOutbox,
    copies,
    counts,
    eventually,
    key_of,
    mixed,
    query,
    relay,
    settled,
    stream,
    until,
)

pytestmark = pytest.mark.asyncio

KEYS = [key_of(shard) for shard in range(4)]
ALL = {Status.PUBLISHED: 40}


class Clerk(NamedTuple):
    """A role for a relay, whose rights come and go."""

    store: PostgresStore
    owner: SqlStore
    role: str

    async def let(self, verb: str, *tables: str) -> None:
        names = probe_of(self.owner).tables
        for table in tables or ("event", "lease", "worker", "held_key"):
            way = "TO" if verb == "GRANT" else "FROM"
            await probe_of(self.owner).run(f"{verb} UPDATE ON {names[table]} {way} {self.role}")


@pytest_asyncio.fixture
async def clerk(pg: SqlOutbox, store: SqlStore, postgres: Postgres) -> AsyncIterator[Clerk]:
    probe, role = probe_of(store), f"clerk_{os.getpid()}"
    await probe.run(f"CREATE ROLE {role} LOGIN")
    await probe.run(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}")
    await probe.run(f"GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public TO {role}")
    url = postgres.url.replace("postgres@", f"{role}@")
    yield Clerk(PostgresStore(url, prefix=probe.prefix), store, role)
    await probe.run(f"DROP OWNED BY {role}")
    await probe.run(f"DROP ROLE {role}")


def told(caplog: pytest.LogCaptureFixture, action: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "action", None) == action]


@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_what_was_published_is_settled_when_the_right_is_back_and_nothing_twice(
    pg: SqlOutbox,
    store: SqlStore,
    clerk: Clerk,
    mode: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    to = MemoryPublisher()
    name, tried = "settle_claims" if mode == "queue" else "settle", 0
    settle = getattr(clerk.store, name)

    async def counted(*arguments: Any) -> Any:
        nonlocal tried
        tried += 1
        return await settle(*arguments)

    monkeypatch.setattr(clerk.store, name, counted)
    await store.add(mixed(KEYS, 2))
    to.hold()
    async with relay(clerk.store, stream(to, mode=mode, batch=2, slots=2, concurrency=8)) as running:
        # All are under way, so that a queue has nothing to claim, which would be refused first.
        await to.wait_until_held(8 if mode == "queue" else 2)
        await clerk.let("REVOKE", "event")
        to.release()
        await until(lambda: told(caplog, "settle_failed"))
        (line,) = told(caplog, "settle_failed")
        assert line.levelno == logging.ERROR
        assert "grant it to the user of the relay" in line.getMessage()
        await store.add(mixed(KEYS, 8, first=3))
        seen = tried
        await until(lambda: tried > seen)
        assert len(to.deliveries) <= 8, "nothing more is published"
        await clerk.let("GRANT", "event")
        await settled(store, ALL)
        await running.drain()
    assert copies(to.deliveries) == 0
    assert len(to.deliveries) == 40
    assert len(told(caplog, "settle_works")) == 1
    assert not told(caplog, "restarting")


async def test_it_is_settled_though_the_leases_could_not_be_renewed_meanwhile(
    pg: SqlOutbox, store: SqlStore, clerk: Clerk, caplog: pytest.LogCaptureFixture
) -> None:
    to = MemoryPublisher()
    await store.add(mixed(KEYS, 10))
    to.hold()
    async with relay(clerk.store, stream(to, batch=2, slots=2, lease=1.0)):
        await to.wait_until_held()
        await clerk.let("REVOKE")
        to.release()
        await until(lambda: told(caplog, "settle_failed"))
        await eventually(
            lambda: query(store, "SELECT count(*) FROM {lease} WHERE lease_until < now()"), lambda rows: rows == [(4,)]
        )
        await clerk.let("GRANT")
        await settled(store, ALL)
    assert copies(to.deliveries) == 0
    assert len(to.deliveries) == 40


async def test_a_relay_that_stops_meanwhile_gives_up_after_its_grace(
    pg: SqlOutbox, store: SqlStore, clerk: Clerk, caplog: pytest.LogCaptureFixture
) -> None:
    to = MemoryPublisher()
    await store.add(mixed(KEYS, 2))
    to.hold()
    async with relay(clerk.store, stream(to, mode="queue", concurrency=8), grace=0.1):
        await to.wait_until_held(8)
        await clerk.let("REVOKE", "event")
        to.release()
        await until(lambda: told(caplog, "settle_failed"))
    assert (await counts(store))[Status.PROCESSING] == len(to.deliveries)
