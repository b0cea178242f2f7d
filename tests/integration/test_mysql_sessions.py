"""MySQL and MariaDB: plans, sessions with odd defaults, sessions that are cut, and errors in one sentence."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.conformance.probes import probe_of
from pillarbox.errors import ConfigError, SchemaError, StoreDown, StoreError
from pillarbox.event import Mode, Status
from pillarbox.publisher import Outcome
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.sql.statements import SqlText
from pillarbox.store import Grant
from pillarbox.stores.mysql import MysqlStore
from pillarbox.stores.mysql.database import MysqlDatabase
from pillarbox.stores.mysql.url import connect_settings
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.sql.turns import fence, joint_fence
from pillarbox.urls import store_from_url
from servers import MariaDB, MySQL
from servers.fixtures import OwnServer
from tests.integration.relays import (
    STREAM,
    SqlOutbox,
    by_key,
    copies,
    execute,
    first_deliveries,
    in_order,
    in_the_midst,
    key_of,
    mixed,
    move,
    mysql_outbox,
    numbered,
    query,
    refused,
    relay,
    settled,
    stream,
)

pytestmark = pytest.mark.asyncio

KEYS = [key_of(shard) for shard in range(4) for _ in range(2)]
EVENTS = 4000
BATCH = 50
ODD = {
    "sql-mode": "ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES",
    "default-time-zone": "+05:30",
    "transaction-isolation": "REPEATABLE-READ",
    "collation-server": "utf8mb4_general_ci",
    "character-set-server": "utf8mb4",
}


@pytest_asyncio.fixture
async def grants(store: SqlStore) -> Sequence[Grant]:
    """The shards of a table of which nine tenths are settled, without statistics."""
    await store.add([make_event(stream=STREAM, key=f"k{n % 40}", payload=b"p") for n in range(EVENTS)])
    await execute(
        store,
        "UPDATE {event} SET status = 'published', published_at = created_at ORDER BY seq LIMIT :count",
        count=EVENTS * 9 // 10,
    )
    await store.announce(STREAM, Mode.ORDERED, "memory")
    await store.join(STREAM, "ann", 60)
    return sorted(await store.take(STREAM, "ann", 4, 60), key=lambda grant: grant.shard)


@pytest.fixture
def grant(grants: Sequence[Grant]) -> Grant:
    return grants[0]


async def touched(store: SqlStore, statement: SqlText, **values: Any) -> int:
    """How many rows of any table and index the server looked at."""
    assert isinstance(store.database, MysqlDatabase)
    is_mariadb = "nopad" in store.database.collation
    table = "information_schema.session_status" if is_mariadb else "performance_schema.session_status"
    counters = store.statements.make(
        f"SELECT sum(variable_value) FROM {table} WHERE variable_name LIKE 'Handler_read%'"
    )
    async with store.database.alone() as one:
        before = (await one.fetch(counters))[0][0]
        between = (await one.fetch(counters))[0][0]
        await one.fetch(statement, **values)
        after = (await one.fetch(counters))[0][0]
    return int(after - between - (between - before))


async def plan(store: SqlStore, name: str, **values: Any) -> dict[str, str | None]:
    """The index by which each table is reached."""
    rows = await query(store, f"EXPLAIN {store.statements.texts[name]}", **values)
    is_mariadb = len(rows[0]) == 10
    table, key = (2, 5) if is_mariadb else (2, 6)
    return {str(row[table]): row[key] for row in rows if row[table]}


async def test_a_read_walks_the_ready_index_from_its_head(my: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    values = {**fence(grant), "limit": BATCH, "inline": 10**6}
    found = await plan(store, "read", **values)
    assert found[probe_of(store).tables["event"]] == probe_of(store).tables["ready_index"]
    assert await touched(store, store.statements["read"], **values) <= 3 * BATCH


async def test_a_joint_read_ends_at_its_limit(my: SqlOutbox, store: SqlStore, grants: Sequence[Grant]) -> None:
    statement, tables = store.statements["read_joint"], probe_of(store).tables
    values = {**joint_fence(grants), "inline": 10**6}
    for backlog in (0, 10_000):
        await execute(
            store,
            """INSERT INTO {event} (id, stream, tenant, topic, type, key_hash, payload, content_type, status)
            WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 100)
            SELECT unhex(md5(a.n * 100 + b.n)), :stream, 't', '', 'x', 1, 'p', 'c', 'pending'
            FROM number AS a, number AS b LIMIT :backlog""",
            stream=STREAM,
            backlog=backlog,
        )
        assert (await plan(store, "read_joint", **values, limit=BATCH))["e"] == tables["ready_index"]
        for limit in (BATCH, 3 * BATCH):
            assert len(await store.database.fetch(statement, **values, limit=limit)) == limit
            assert await touched(store, statement, **values, limit=limit) <= 3 * limit
    empty = {**values, "stream": "empty"}
    assert await touched(store, statement, **empty, limit=BATCH) <= 2 * len(grants)


async def test_a_poll_touches_a_few_rows_for_each_shard(my: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    poll, shards = store.statements["poll"], list(range(4))
    assert await touched(store, poll, stream=STREAM, worker="ann", shards=shards) <= 80
    assert await touched(store, poll, stream="empty", worker="ann", shards=shards) <= 80


async def test_a_due_key_is_read_by_its_own_index(my: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    await execute(store, "UPDATE {event} SET status = 'held' WHERE status = 'pending'")
    ((key, shard),) = await query(store, "SELECT `key`, shard FROM {event} WHERE status = 'held' LIMIT 1")
    values = {**fence(grant), "shard": shard, "key": key, "limit": 5, "inline": 10**6}
    values |= {"token": (await query(store, "SELECT token FROM {lease} WHERE shard = :shard", shard=shard))[0][0]}
    found = await plan(store, "read_key", **values)
    assert found[probe_of(store).tables["event"]] == probe_of(store).tables["held_index"]
    assert len(await store.database.fetch(store.statements["read_key"], **values)) == 5
    assert await touched(store, store.statements["read_key"], **values) <= 30


async def test_instants_that_have_come_are_found_by_their_index(my: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    await execute(store, "UPDATE {event} SET status = 'scheduled' WHERE status = 'pending'")
    await move(store, "event", "next_attempt_at", 3600.0, status="scheduled")
    due = store.statements["due"]
    found = await plan(store, "due", stream=STREAM, limit=BATCH)
    assert found == {probe_of(store).tables["event"]: probe_of(store).tables["due_index"]}
    assert await touched(store, due, stream=STREAM, limit=BATCH) <= 5


async def test_a_settle_and_a_prune_touch_what_they_change(my: SqlOutbox, store: SqlStore, grant: Grant) -> None:
    rows = await query(store, "SELECT id FROM {event} WHERE status = 'pending' AND shard = 0 LIMIT 20")
    assert await touched(store, store.statements["publish"], stream=STREAM, ids=[row[0] for row in rows]) <= 60
    assert await touched(store, store.statements["prune_page"], keep=3600.0, limit=BATCH, after=0) <= 2 * BATCH
    rows = await query(store, "SELECT seq FROM {event} WHERE status = 'published' LIMIT 20")
    assert await touched(store, store.statements["prune"], seqs=[row[0] for row in rows], keep=-3600.0) <= 60


async def test_streams_that_wait_are_found_without_counting_their_events(
    my: SqlOutbox, store: SqlStore, grant: Grant
) -> None:
    await store.add(mixed(KEYS, 50, stream="another"))
    assert await touched(store, store.statements["next_waiting"], after="") <= 100
    assert await store.unserved() == ["another"]


@pytest.mark.parametrize("kind", [MySQL, MariaDB])
async def test_a_server_with_odd_defaults_changes_nothing(
    own_server: OwnServer, kind: type[MySQL] | type[MariaDB]
) -> None:
    server = own_server(kind, settings=ODD)
    outbox = mysql_outbox(server.url)
    store = outbox()
    await store.migrate()
    await store.open()
    odd = ["a", "a ", "A", "ä", "back\\slash'\""]
    await store.add(mixed(odd, 3))
    to = MemoryPublisher()
    async with relay(outbox(), stream(to)):
        await to.wait_for(15)
        await settled(store, {Status.PUBLISHED: 15})
    assert by_key(to.deliveries) == in_order(odd, 3)
    ((seconds,),) = await query(store, "SELECT max(abs(timestampdiff(SECOND, created_at, published_at))) FROM {event}")
    assert seconds < 60, "instants of writers and of the relay are of one zone"
    await store.close()


class Cutting(MemoryPublisher):
    """Ends every other session of the database after it has published."""

    def __init__(self, cut: Callable[[], Any]) -> None:
        super().__init__()
        self._cut = cut

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        outcomes = await super().publish(batch)
        await self._cut()
        return outcomes


@pytest.mark.parametrize("kind", [MySQL, MariaDB])
async def test_sessions_that_are_cut_between_publish_and_settle_make_no_copy(
    own_server: OwnServer, kind: type[MySQL] | type[MariaDB]
) -> None:
    server = own_server(kind)
    outbox = mysql_outbox(server.url)
    store = outbox(pool_size=1)  # so that it never ends a session of its own
    await store.migrate()
    await store.open()

    async def cut() -> None:
        others = "SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND user = 'root'"
        for (number,) in await query(store, others):
            with suppress(StoreError):  # it may have ended by itself
                await probe_of(store).run(f"KILL {number}")

    to = Cutting(cut)
    await store.add(mixed(KEYS, 10))
    async with relay(outbox(), stream(to, batch=5)):
        await to.wait_for(80)
        await settled(store, {Status.PUBLISHED: 80})
    await store.close()
    assert by_key(to.deliveries) == in_order(KEYS, 10)


@pytest.mark.parametrize("kind", [MySQL, MariaDB])
async def test_a_server_that_is_killed_under_load_loses_nothing(
    own_server: OwnServer, kind: type[MySQL] | type[MariaDB]
) -> None:
    server = own_server(kind)
    outbox = mysql_outbox(server.url)
    store = outbox()
    await store.migrate()
    await store.open()
    to = MemoryPublisher()
    await store.add(mixed(KEYS, 200))
    async with relay(outbox(), stream(to, batch=20)):
        await to.wait_for(100)
        async with in_the_midst(to):
            await asyncio.to_thread(server.kill)
        assert len(to.deliveries) < 1600
        await asyncio.to_thread(server.start)
        await settled(store, {Status.PUBLISHED: 1600}, seconds=60)
    await store.close()
    assert first_deliveries(to.deliveries) == in_order(KEYS, 200)
    assert copies(to.deliveries) == 0, "what was published waits until it can be settled"


async def test_what_is_wrong_is_told_in_one_sentence(my: SqlOutbox, store: SqlStore) -> None:
    url = probe_of(store).url
    said = await refused(MysqlStore(url.replace("root@", "nobody:se%20cret@")))
    assert "user or password refused; correct the URL" in said
    assert "cret" not in said
    said = await refused(MysqlStore(url.replace("/test", "/not_there")))
    assert "there is no such database; create it, or correct the URL" in said
    with pytest.raises(SchemaError, match="migrate"):
        async with relay(MysqlStore(url, prefix="missing"), stream(MemoryPublisher())) as running:
            await running.ready()
    with pytest.raises(StoreDown):
        await MysqlStore("mysql://root@127.0.0.1:1/none").open()


async def test_an_event_that_no_packet_holds_is_refused_with_the_remedy(my: SqlOutbox, store: SqlStore) -> None:
    ((most,),) = await query(store, "SELECT @@max_allowed_packet")
    (large,) = numbered("k", 1)
    with pytest.raises(StoreError, match="max_allowed_packet"):
        await store.add([large._replace(payload=bytes(most))])
    await store.add(numbered("k", 1))


async def test_a_text_that_does_not_fit_is_refused(my: SqlOutbox, store: SqlStore) -> None:
    with pytest.raises(StoreError):
        await store.add(numbered("k" * 300, 1))


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("mysql://root@host", "names no database"),
        ("mysql://root@host:port/db", "port that is no number"),
        ("mysql://root@host/db?sll=true", "use ssl=true"),
        ("mysqll://root@host/db", "did you mean 'mysql'"),
        ("mysql://root@host/db?ssl_ca=/not/there.pem", "ssl_ca of the store URL names the file /not/there.pem, which"),
        (f"mysql://root@host/db?ssl_key={__file__}", "ssl_key without ssl_cert"),
    ],
)
async def test_a_wrong_url_names_the_remedy(url: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        store_from_url(url)


async def test_a_user_who_needs_a_certificate_connects_with_one(mysql: MySQL) -> None:
    root = MysqlStore(mysql.url)
    await probe_of(root).run("CREATE USER IF NOT EXISTS certified@'127.0.0.1' REQUIRE X509")
    await probe_of(root).run("GRANT ALL ON test.* TO certified@'127.0.0.1'")
    url = mysql.url.replace("root@", "certified@")
    with pytest.raises(StoreError, match="user or password refused"):
        await MysqlStore(url).database.open()
    data = mysql.folder / "data"
    store = MysqlStore(f"{url}?ssl_cert={data / 'client-cert.pem'}&ssl_key={data / 'client-key.pem'}")
    assert (await probe_of(store).query("SHOW STATUS LIKE 'Ssl_cipher'"))[0][1]
    await store.close()
    await root.close()


async def test_a_url_may_hold_any_password() -> None:
    found = connect_settings("mariadb://an%40n:p%2Fw%3A%25@db.example:3307/shop")
    assert (found["user"], found["password"], found["port"], found["database"]) == ("an@n", "p/w:%", 3307, "shop")
