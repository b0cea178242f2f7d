"""Adding events, on every driver and its real database."""

import asyncio
import inspect
import json
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from traceback import format_exception
from typing import Any
from uuid import UUID, uuid4

import aiosqlite
import pytest

from pillarbox import Event, InvalidEvent, Outbox, Status
from pillarbox.conformance.driver import AWKWARD
from pillarbox.conformance.driver_setup import Application, done
from pillarbox.drivers import driver_of
from pillarbox.errors import ConfigError, DuplicateEvent, NotInTransaction, SchemaError
from pillarbox.ids import uuid7
from pillarbox.outbox import Transaction
from tests.drivers.applications import AioSqlite, AsyncMy, Asyncpg, SqlAlchemyAsync
from tests.drivers.conftest import Shop

AWAITED: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: kind.is_awaited)
UNBUFFERED: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: not kind.is_buffered)
POOLED: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: kind.has_pool and not kind.is_buffered)
NESTED: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda _, kind: kind.has_savepoints and not kind.is_buffered
)
# SQLite has one writer at a time, MongoDB ends the later one; a driver that is not awaited would wait in this thread.
CONCURRENT: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda database, kind: database not in ("sqlite", "mongo") and kind.is_awaited
)
ASYNCMY: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: kind is AsyncMy)
ASYNCPG: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: kind is Asyncpg)


class Both:
    """Two tasks wait here for each other."""

    def __init__(self) -> None:
        self._arrived = 0
        self._are_here = asyncio.Event()

    async def wait(self) -> None:
        self._arrived += 1
        if self._arrived == 2:
            self._are_here.set()
        await self._are_here.wait()


async def added_and_flushed(shop: Shop, **fields: Any) -> None:
    """Add an event; where that waits for a flush, flush."""
    await shop.add(**fields)
    if shop.app.is_buffered:
        await shop.app.commit()


@asynccontextmanager
async def entered(shop: Shop, handle: Any) -> AsyncIterator[Transaction]:
    """A block of ``outbox.transaction``, in the way that the driver wants."""
    if shop.app.is_awaited:
        async with shop.outbox.transaction(handle) as tx:
            yield tx
    else:
        with shop.outbox.transaction(handle) as tx:
            yield tx


async def block(shop: Shop, handle: Any, events: Sequence[Event], *, fail: bool = False, order: bool = True) -> None:
    async with entered(shop, handle) as tx:
        if order:
            await shop.order()
        tx.add_all(events)
        if fail:
            raise ZeroDivisionError


@pytest.mark.asyncio
async def test_data_and_event_commit_together(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    await shop.order()
    await shop.add(key=7)
    assert not await shop.count()
    await shop.app.commit()
    assert await shop.data() == 1
    assert [(event.type, event.key, event.payload) for event in await shop.events()] == [
        ("order.created", "7", b'{"id":1}')
    ]


@pytest.mark.asyncio
async def test_data_and_event_roll_back_together(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    await shop.order()
    await shop.add()
    await shop.app.rollback()
    assert await shop.data() == 0
    assert await shop.events() == []


@pytest.mark.asyncio
async def test_every_field_arrives_as_it_was_given(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    occurred_at = datetime(2024, 2, 29, 23, 59, 59, 123000, tzinfo=UTC)
    full = await shop.add(
        AWKWARD[:100],
        bytes(range(256)) * 3,
        key=AWKWARD,
        topic="orders",
        tenant="acme",
        id=uuid4(),
        aggregate_type="order",
        aggregate_id=AWKWARD,
        aggregate_version=2**62,
        routing_key="eu.orders",
        content_type="application/x-own",
        headers={"a": AWKWARD, "b": ""},
        schema_id="17",
        schema_version="1.2",
        occurred_at=occurred_at,
        max_attempts=3,
    )
    plain = await shop.add(payload=AWKWARD)
    await shop.add(key="later", available_at=datetime.now(UTC) + timedelta(days=1))
    await shop.app.commit()
    found = {event.id: event for event in await shop.events()}
    assert found.keys() == {full.id, plain.id}
    back = found[full.id]
    assert back == full._replace(seq=back.seq, created_at=back.created_at)
    assert found[plain.id].payload == AWKWARD.encode()
    assert (await shop.count())[Status.SCHEDULED] == 1


@pytest.mark.asyncio
async def test_many_are_written_in_their_order(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    events = [shop.outbox.event("counted", {"n": n}, key=n % 7) for n in range(1203)]
    await shop.outbox.add_all(shop.app.handle, events)
    await shop.outbox.add_all(shop.app.handle, [])
    await shop.app.commit()
    assert [json.loads(event.payload)["n"] for event in await shop.events()] == list(range(1203))


@pytest.mark.asyncio
async def test_it_refuses_where_every_statement_commits_by_itself(shop: Shop) -> None:
    await shop.app.open(autocommit=True)
    with pytest.raises(NotInTransaction, match="would not commit together"):
        await added_and_flushed(shop)
    assert await shop.events() == []


@pytest.mark.asyncio
async def test_an_id_is_written_once(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    first = await shop.add(payload={"n": 1})
    await shop.app.commit()
    await shop.app.begin()
    with pytest.raises(DuplicateEvent, match=str(first.id)):
        await added_and_flushed(shop, payload={"n": 2}, id=first.id)
    await shop.app.rollback()
    await shop.app.begin()
    await shop.order()
    await shop.add(payload={"n": 3}, id=first.id, on_duplicate="ignore")
    other = await shop.add(payload={"n": 4}, on_duplicate="ignore")
    await shop.app.commit()
    assert await shop.data() == 1
    assert [(event.id, event.payload) for event in await shop.events()] == [
        (first.id, b'{"n":1}'),
        (other.id, b'{"n":4}'),
    ]


@pytest.mark.asyncio
async def test_exists_knows_the_open_transaction_and_the_dead(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    assert not await shop.outbox.exists(shop.app.handle, uuid7())
    event = await shop.add()
    assert await shop.outbox.exists(shop.app.handle, event.id)
    assert not await shop.outbox.exists(shop.app.handle, event.id, stream="other")
    assert await shop.outbox.exists(shop.app.handle, event.id, stream="default")
    await shop.app.commit()
    await shop.kill_all()
    assert await shop.events() == []
    await shop.app.begin()
    assert await shop.outbox.exists(shop.app.handle, event.id)
    assert await shop.outbox.exists(shop.app.handle, event.id, stream="default")
    assert not await shop.outbox.exists(shop.app.handle, event.id, stream="other")
    await shop.app.rollback()


@pytest.mark.asyncio
async def test_an_event_is_written_once_for_each_of_its_streams(shop: Shop) -> None:
    shop.outbox = Outbox(prefix=shop.outbox._names.prefix, routes={"order.*": ["default", "search", "audit"]})
    await shop.app.open()

    async def streams(id: UUID) -> list[str]:
        await shop.app.begin()
        names = ("default", "search", "audit", "mail")
        found = [name for name in names if await shop.outbox.exists(shop.app.handle, id, stream=name)]
        await shop.app.rollback()
        return found

    await shop.app.begin()
    event = await shop.add()
    assert await shop.outbox.exists(shop.app.handle, event.id, stream="audit"), "in the open transaction too"
    mail = await shop.add(stream="mail")
    await shop.app.commit()
    assert await streams(event.id) == ["default", "search", "audit"]
    assert await streams(mail.id) == ["mail"]
    await shop.app.begin()
    made = [shop.outbox.event("order.paid", {"n": n}, key=7) for n in range(3)]
    await shop.outbox.add_all(shop.app.handle, [*made, shop.outbox.event("user.paid", {"n": 3}, key=7)])
    await shop.app.commit()
    waiting = [event.payload for event in await shop.events() if event.stream == "default"]
    assert waiting[1:] == [b'{"n":0}', b'{"n":1}', b'{"n":2}', b'{"n":3}']
    # A stream that is new in the routes gets the events that are written again; the others ignore them.
    shop.outbox = Outbox(prefix=shop.outbox._names.prefix, routes={"order.*": ["default", "new"]})
    await shop.app.begin()
    await shop.add(id=event.id, on_duplicate="ignore")
    assert await shop.outbox.exists(shop.app.handle, event.id, stream="new")
    await shop.app.rollback()
    await shop.app.begin()
    with pytest.raises(DuplicateEvent):
        await added_and_flushed(shop, id=event.id)
    await shop.app.rollback()
    assert await streams(event.id) == ["default", "search", "audit"]


@pytest.mark.asyncio
async def test_exists_cannot_be_taken_for_an_answer_without_await(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    answer = shop.outbox.exists(shop.app.handle, uuid7())
    if shop.app.is_awaited:
        with pytest.raises(TypeError, match="await"):
            bool(answer)
    assert not await answer
    assert not answer


@pytest.mark.asyncio
async def test_bad_input_leaves_the_transaction_usable(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    await shop.order()
    for payload in ({"n": float("nan")}, {"n": "\0"}, {"n": "\ud800"}, {"n": object()}, "x" * 1_000_001):
        with pytest.raises(InvalidEvent):
            await shop.add(payload=payload)
    await shop.app.commit()
    assert await shop.data() == 1
    assert await shop.events() == []


@pytest.mark.asyncio
async def test_without_tables_it_says_how_to_make_them(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    shop.outbox = Outbox(prefix="nowhere")
    with pytest.raises(SchemaError, match=r"pillarbox init|manage\.py migrate"):
        await added_and_flushed(shop)
    await shop.app.rollback()
    with pytest.raises(SchemaError, match=r"pillarbox init|manage\.py migrate"):
        await shop.outbox.exists(shop.app.handle, uuid7())


@pytest.mark.asyncio
@AWAITED
async def test_a_forgotten_await_leaves_no_data_without_its_event(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    await shop.app.open()
    await shop.app.begin()
    await shop.order()
    with caplog.at_level(logging.ERROR):
        shop.outbox.add(shop.app.handle, "order.created", {"secret": 1})
    (record,) = [record for record in caplog.records if record.name == "pillarbox.outbox"]
    assert "order.created" in record.getMessage()
    assert "secret" not in record.getMessage()
    with pytest.raises(Exception, match=r"(?i)clos|connect|gone away|not awaited"):  # in each driver's own words
        await shop.app.commit()
    assert await shop.data() == 0
    assert await shop.events() == []


@pytest.mark.asyncio
@AWAITED
async def test_an_event_that_is_kept_and_never_awaited_is_told_of(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    await shop.app.open()
    await shop.app.begin()
    await shop.order()
    added = shop.outbox.add(shop.app.handle, "order.created", {})
    await shop.app.commit()
    assert not caplog.records
    del added
    assert "THE EVENT IS LOST" in caplog.text


@pytest.mark.asyncio
@ASYNCPG
async def test_an_event_that_is_awaited_after_the_commit_is_refused(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    added = shop.outbox.add(shop.app.handle, "order.created", {})
    await shop.app.commit()
    with pytest.raises(NotInTransaction):
        await added
    assert await shop.events() == []


@pytest.mark.asyncio
@UNBUFFERED
async def test_a_block_writes_its_events_before_it_commits(shop: Shop) -> None:
    await shop.app.open()
    async with entered(shop, shop.app.handle) as tx:
        await shop.order()
        tx.add("first", {"n": 1})
        shop.outbox.add(tx, "second", {"n": 2})
        tx.add_all([shop.outbox.event("third", {"n": 3}), shop.outbox.event("fourth", {"n": 4})])
        assert not await shop.outbox.exists(tx, uuid7())
    assert [event.type for event in await shop.events()] == ["first", "second", "third", "fourth"]
    assert await shop.data() == 1
    with pytest.raises(NotInTransaction, match="has ended"):
        tx.add("late", {})


@pytest.mark.asyncio
@UNBUFFERED
async def test_a_block_that_fails_writes_nothing(shop: Shop) -> None:
    await shop.app.open()
    first = shop.outbox.event("first", {})
    with pytest.raises(ZeroDivisionError):
        await block(shop, shop.app.handle, [first], fail=True)
    with pytest.raises(DuplicateEvent):
        await block(shop, shop.app.handle, [first, first])
    assert await shop.events() == []
    assert await shop.data() == 0


@pytest.mark.asyncio
@NESTED
async def test_a_block_in_an_open_transaction_is_a_savepoint(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    await shop.order()
    async with entered(shop, shop.app.handle) as tx:
        tx.add("kept", {})
    with pytest.raises(ZeroDivisionError):
        await block(shop, shop.app.handle, [shop.outbox.event("gone", {})], fail=True)
    assert not await shop.count()
    await shop.app.commit()
    assert [event.type for event in await shop.events()] == ["kept"]
    assert await shop.data() == 1


@pytest.mark.asyncio
@ASYNCMY
async def test_a_block_that_is_cancelled_in_a_statement_says_so(shop: Shop) -> None:
    async def order_slowly() -> None:
        async with shop.outbox.transaction(shop.app.handle) as tx:
            await shop.order()
            tx.add("gone", {})
            await shop.app.execute("SELECT sleep(30)")

    await shop.app.open()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(order_slowly(), 0.2)
    assert await shop.data() == 0
    assert await shop.events() == []


@pytest.mark.asyncio
@ASYNCMY
async def test_a_deadlock_in_a_savepoint_is_not_hidden_by_its_rollback(shop: Shop) -> None:
    async def lock(app: Application, first: int, second: int) -> None:
        await app.execute(f"UPDATE {shop.table} SET id = id WHERE id = {first}")
        await both.wait()
        async with shop.outbox.transaction(app.handle) as tx:
            tx.add("locked", {})
            await app.execute(f"UPDATE {shop.table} SET id = id WHERE id = {second}")
        await app.commit()

    both = Both()
    other = type(shop.app)(shop.app.url)
    await shop.app.open()
    await other.open()
    await shop.order()
    await shop.order()
    await shop.app.commit()
    ended = await asyncio.gather(lock(shop.app, 1, 2), lock(other, 2, 1), return_exceptions=True)
    await other.close()
    (error,) = [each for each in ended if each is not None]
    assert "Deadlock" in str(error)
    assert [event.type for event in await shop.events()] == ["locked"]


@pytest.mark.asyncio
@POOLED
async def test_a_block_on_a_pool(shop: Shop) -> None:
    pool = await shop.app.pool()
    with pytest.raises(ConfigError):
        shop.outbox.add(pool, "order.created", {})
    async with entered(shop, pool) as tx:
        tx.add("order.created", {})
    with pytest.raises(ZeroDivisionError):
        await block(shop, pool, [shop.outbox.event("gone", {})], fail=True, order=False)
    await shop.app.close_pool(pool)
    assert [event.type for event in await shop.events()] == ["order.created"]


@pytest.mark.asyncio
@CONCURRENT
async def test_writers_of_one_key_can_wait_for_each_other(shop: Shop) -> None:
    outbox = Outbox(prefix=shop.outbox._names.prefix, lock_keys=True)
    other = type(shop.app)(shop.app.url)
    await shop.app.open()
    await other.open()
    await shop.app.begin()
    await other.begin()
    await outbox.add(shop.app.handle, "first", {}, key="k")
    second = asyncio.ensure_future(done(outbox.add(other.handle, "second", {}, key="k")))
    await outbox.add(shop.app.handle, "first, too", {}, key="another")
    assert not second.done()
    await shop.app.commit()
    await second
    await other.commit()
    await other.close()
    assert [event.type for event in await shop.events()] == ["first", "first, too", "second"]


@pytest.mark.asyncio
async def test_what_is_captured_and_not_written(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    with shop.outbox.capture() as events:
        await shop.add("seen")
    await shop.add("not captured")
    with shop.outbox.capture(write=False) as unwritten:
        await shop.add("not written")
    await shop.app.commit()
    assert [event.type for event in events] == ["seen"]
    assert [event.type for event in unwritten] == ["not written"]
    assert [event.type for event in await shop.events()] == ["seen", "not captured"]


@pytest.mark.asyncio
@AWAITED
async def test_a_connection_that_was_ended_can_be_closed(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    await shop.order()
    shop.outbox.add(shop.app.handle, "order.created", {})
    closing = asyncio.ensure_future(shop.app.close())
    ended, _ = await asyncio.wait([closing], timeout=5)
    assert ended
    closing.exception()  # closed already, in each driver's own words
    assert await shop.data() == 0


@pytest.mark.parametrize("kind", [AioSqlite, SqlAlchemyAsync])
def test_a_connection_that_was_ended_may_answer_when_the_event_loop_is_closed(
    kind: type[Application], tmp_path: Path
) -> None:
    may_answer = threading.Event()

    async def forget() -> threading.Thread:
        app = kind(f"sqlite:///{tmp_path}/shop.db")
        await app.open()
        await app.begin()
        await app.execute("CREATE TABLE orders (id integer)")
        connection = app.handle
        if kind is SqlAlchemyAsync:
            connection = (await app.handle.get_raw_connection()).driver_connection
        connection._tx.put_nowait((None, may_answer.wait))
        Outbox().add(app.handle, "order.created", {})
        thread: threading.Thread = connection._thread
        return thread

    thread = asyncio.run(forget())
    may_answer.set()
    thread.join(10)  # pytest looks for errors in threads
    assert not thread.is_alive()


class ClosedButNotKnown(sqlite3.Connection):
    """Its close returns when somebody has asked for its transaction afterwards."""

    closed: threading.Event | None = None

    @property
    def in_transaction(self) -> bool:
        if self.closed is not None:
            self.closed.set()
        return super().in_transaction

    def close(self) -> None:
        super().close()
        self.closed = threading.Event()
        self.closed.wait(10)


@pytest.mark.asyncio
async def test_a_connection_can_be_closed_however_its_thread_is_slow_to_end(tmp_path: Path) -> None:
    connection = await aiosqlite.connect(tmp_path / "shop.db", factory=ClosedButNotKnown)
    await connection.execute("BEGIN")
    driver_of(connection).abandon()
    await asyncio.wait_for(connection.close(), 10)


@pytest.mark.asyncio
async def test_no_error_shows_a_payload(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    card = "4111" * 4  # a traceback shows these lines too
    event = await shop.add(payload={"card": card})
    with pytest.raises(DuplicateEvent) as caught:
        await added_and_flushed(shop, payload={"card": card}, id=event.id)
    assert card not in "".join(format_exception(caught.value))


@pytest.mark.asyncio
async def test_what_was_awaited_is_a_plain_event(shop: Shop) -> None:
    await shop.app.open()
    await shop.app.begin()
    assert not inspect.isawaitable(await shop.add())
