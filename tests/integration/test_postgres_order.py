"""A transaction has its id before it takes a seq, however its rows are written. The floors of reads rely on it."""

import asyncio
from collections.abc import Awaitable, Callable
from uuid import uuid4

import asyncpg
import psycopg
import pytest

from pillarbox import Outbox
from pillarbox.conformance.probes import SqlProbe, probe_of
from pillarbox.stores.sql import SqlStore
from tests.integration.relays import SqlOutbox, eventually, numbered

pytestmark = pytest.mark.asyncio

Write = Callable[[SqlStore, SqlProbe], Awaitable[object]]
_COLUMNS = "id, stream, tenant, topic, type, key_hash, payload, content_type, status"


def _row() -> str:
    return f"'{uuid4()}', 's', 't', '', 'x', 0, '', 'c', 'pending'"


async def by_store(store: SqlStore, probe: SqlProbe) -> None:
    await store.add(numbered("k", 3))


async def by_asyncpg(store: SqlStore, probe: SqlProbe) -> None:
    connection = await asyncpg.connect(probe.url)
    async with connection.transaction():
        await Outbox(prefix=probe.prefix).add(connection, "order.created", {}, key="k")
    await connection.close()


async def by_asyncpg_in_arrays(store: SqlStore, probe: SqlProbe) -> None:
    connection = await asyncpg.connect(probe.url)
    async with connection.transaction():
        await Outbox(prefix=probe.prefix).add_all(connection, numbered("k", 2))
    await connection.close()


async def by_psycopg(store: SqlStore, probe: SqlProbe) -> None:
    def write() -> None:
        with psycopg.connect(probe.url) as connection:
            Outbox(prefix=probe.prefix).add_all(connection, numbered("k", 2))

    await asyncio.to_thread(write)


async def by_values(store: SqlStore, probe: SqlProbe) -> None:
    rows = f"({_row()}), ({_row()})"
    await probe.run(f"INSERT INTO {probe.tables['event']} ({_COLUMNS}) VALUES {rows}")


async def by_values_that_name_default(store: SqlStore, probe: SqlProbe) -> None:
    rows = f"(DEFAULT, {_row()}), (DEFAULT, {_row()})"
    await probe.run(f"INSERT INTO {probe.tables['event']} (seq, {_COLUMNS}) VALUES {rows}")


async def by_re_entry(store: SqlStore, probe: SqlProbe) -> None:
    await store.reenter_due("s", 10)


@pytest.mark.parametrize(
    "write",
    [
        by_store,
        by_asyncpg,
        by_asyncpg_in_arrays,
        by_psycopg,
        by_values,
        by_values_that_name_default,
        by_re_entry,
    ],
)
async def test_a_transaction_has_its_id_before_its_seq(pg: SqlOutbox, store: SqlStore, write: Write) -> None:
    probe = probe_of(store)
    await probe.run(
        f"INSERT INTO {probe.tables['event']} ({_COLUMNS}, next_attempt_at) "
        f"VALUES ({_row().replace('pending', 'scheduled')}, now())"
    )
    waiting = (
        "SELECT a.backend_xid FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid) "
        "WHERE NOT l.granted AND l.relation = '{event_seq}'::regclass"
    )
    async with store.transaction() as tx:
        # Nobody takes a number until this transaction ends.
        await tx.run(f"ALTER SEQUENCE {probe.tables['event_seq']} INCREMENT 1")
        writing = asyncio.ensure_future(write(store, probe))
        await eventually(lambda: probe.query(waiting), lambda rows: len(rows) == 1)
        # Once more: the first answer may have seen the session before, and the lock after, it began to write.
        found = await probe.query(waiting)
    await writing
    assert found[0][0] is not None
