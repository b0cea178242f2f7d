"""Units of work, on every driver and its real database."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import OperationFailure

from pillarbox import (
    Aggregate,
    EventSink,
    InvalidEvent,
    Outbox,
    StaleAggregate,
    UnitOfWork,
    check_saved,
    current_tenant,
)
from pillarbox.conformance.driver_setup import done
from pillarbox.drivers import driver_of
from pillarbox.drivers.contract import Statement
from pillarbox.errors import ConfigError, NotInTransaction
from tests.drivers.applications import (
    AioSqlite,
    AsyncMy,
    Asyncpg,
    Psycopg,
    PyMongo,
    PyMongoAsync,
    PyMysql,
    SqlAlchemyAsyncSession,
    SqlAlchemySession,
    Sqlite3,
)
from tests.drivers.conftest import Shop

# Each kind of handle once: that drivers begin alike on all databases is tested by their contract.
_KINDS = {
    *(("sqlite", Sqlite3), ("sqlite", AioSqlite), ("sqlite", SqlAlchemySession)),
    *(("postgres", Psycopg), ("postgres", Asyncpg), ("postgres", SqlAlchemyAsyncSession)),
    *(("mysql", PyMysql), ("mysql", AsyncMy), ("mongo", PyMongo), ("mongo", PyMongoAsync)),
}
EACH: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda database, kind: (database, kind) in _KINDS)
POOLED: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda database, kind: (database, kind) in _KINDS and kind.has_pool
)
AWAITED: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda database, kind: (database, kind) in _KINDS and kind.is_awaited
)
SQLITE: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: kind is Sqlite3)
SESSIONS_AND_RAW: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda database, kind: database == "sqlite" and (database, kind) in _KINDS
)
MONGO: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda database, _: database == "mongo")
AIOSQLITE: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: kind is AioSqlite)
RAW_SQL: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda database, kind: (database, kind) in _KINDS and database != "mongo" and not kind.is_buffered
)


@dataclass
class Order(Aggregate):
    aggregate_type = "order"

    id: int | None
    version: int = 1
    state: str = "new"

    def pay(self) -> None:
        self.state = "paid"
        self.add_event("order.paid", {"state": self.state})


@asynccontextmanager
async def unit(shop: Shop, handle: Any = None, **options: Any) -> AsyncIterator[UnitOfWork]:
    """A unit of work, entered in the way that the handle needs."""
    handle = shop.app.handle if handle is None else handle
    uow = UnitOfWork(shop.outbox, handle, **options)
    if driver_of(handle).is_awaited:
        async with uow:
            yield uow
    else:
        with uow:
            yield uow


async def types(shop: Shop) -> Sequence[str]:
    return [event.type for event in await shop.events()]


@pytest.mark.asyncio
@EACH
async def test_events_are_written_with_the_data_in_the_order_of_their_recording(shop: Shop) -> None:
    await shop.app.open()
    first, second = Order(7, version=3), Order(8)
    first.add_event("order.opened", {}, key="own", topic="orders")
    async with unit(shop, tenant="acme") as uow:
        assert uow.track(first) is first
        await shop.order()
        uow.track(second).pay()
        uow.add("cart.emptied", {}, key=1)
        first.pay()
        first.version = 4
        assert await shop.count() == {}
    assert await shop.data() == 1
    found = [
        (event.type, event.aggregate_type, event.aggregate_id, event.aggregate_version, event.key, event.tenant)
        for event in await shop.events()
    ]
    assert found == [
        ("order.opened", "order", "7", 4, "own", "acme"),
        ("order.paid", "order", "8", 1, "8", "acme"),
        ("cart.emptied", None, None, None, "1", "acme"),
        ("order.paid", "order", "7", 4, "7", "acme"),
    ]


@pytest.mark.asyncio
@EACH
async def test_a_failure_rolls_everything_back_and_resurrects_nothing(shop: Shop) -> None:
    await shop.app.open()
    order = Order(7)

    async def fail() -> None:
        async with unit(shop) as uow:
            await shop.order()
            uow.track(order).pay()
            check_saved(0, order)

    with pytest.raises(StaleAggregate, match="this Order was changed or deleted by another transaction"):
        await fail()
    assert (await shop.data(), await types(shop)) == (0, [])
    async with unit(shop) as uow:
        uow.track(order).add_event("order.reopened", {})
        await shop.order()
    assert (await shop.data(), await types(shop)) == (1, ["order.reopened"])


@pytest.mark.asyncio
@EACH
async def test_commit_and_rollback_by_hand(shop: Shop) -> None:
    await shop.app.open()
    order = Order(7)
    async with unit(shop) as uow:
        uow.track(order).pay()
        await shop.order()
        await done(uow.rollback())
    assert (await shop.data(), await types(shop)) == (0, [])
    with suppress(ZeroDivisionError):
        async with unit(shop) as uow:
            uow.track(order).pay()
            await shop.order()
            await done(uow.commit())
            with pytest.raises(NotInTransaction, match="not open"):
                uow.track(order)
            raise ZeroDivisionError
    assert (await shop.data(), await types(shop)) == (1, ["order.paid"])


@pytest.mark.asyncio
@POOLED
async def test_a_unit_of_work_begins_on_a_pool(shop: Shop) -> None:
    pool = await shop.app.pool()
    try:
        for number in range(3):  # one more than a pool of tests has connections
            async with unit(shop, pool) as uow:
                uow.track(Order(number)).pay()
        with pytest.raises(InvalidEvent, match=r"Order has no id for its event order\.paid; set it"):
            async with unit(shop, pool) as uow:
                uow.track(Order(None)).pay()
    finally:
        await shop.app.close_pool(pool)
    assert [event.aggregate_id for event in await shop.events()] == ["0", "1", "2"]


@pytest.mark.asyncio
@POOLED
async def test_work_is_repeated_with_fresh_state(shop: Shop) -> None:
    pool = await shop.app.pool()
    seen: list[Any] = []

    def work(uow: UnitOfWork) -> str:
        order = uow.track(Order(7, version=len(seen) + 1))
        order.pay()
        uow.add("cart.emptied", {})
        seen.append(uow.tx)
        check_saved(0 if len(seen) < 3 else 1, order)
        return order.state

    async def awaited_work(uow: UnitOfWork) -> str:
        return work(uow)

    try:
        runs = awaited_work if driver_of(pool).is_awaited else work
        assert await done(UnitOfWork.run(shop.outbox, pool, runs)) == "paid"
        seen.clear()
        with pytest.raises(StaleAggregate):
            await done(UnitOfWork.run(shop.outbox, pool, runs, attempts=2))
        with pytest.raises(TypeError):
            await done(UnitOfWork.run(shop.outbox, pool, lambda uow: len(seen.append(uow))))  # type: ignore[arg-type, func-returns-value]
    finally:
        await shop.app.close_pool(pool)
    assert [(event.type, event.aggregate_version) for event in await shop.events()] == [
        ("order.paid", 3),
        ("cart.emptied", None),
    ]
    assert len(seen) == 3, "an error that is no conflict must not be repeated"


async def ask(uow: UnitOfWork, text: str, *, has_rows: bool = False) -> Any:
    return await done(driver_of(uow.tx).ask(Statement(text, has_rows=has_rows)))


@pytest.mark.asyncio
@RAW_SQL
async def test_of_two_writers_the_stale_one_loses_everything(shop: Shop) -> None:
    await shop.app.open()
    async with unit(shop) as uow:
        await ask(uow, f"ALTER TABLE {shop.table} ADD COLUMN version integer")
    async with unit(shop) as uow:
        await ask(uow, f"INSERT INTO {shop.table} VALUES (7, 1)")

    async def save(uow: UnitOfWork, order: Order) -> None:
        text = f"UPDATE {shop.table} SET version = version + 1 WHERE id = {order.id} AND version = {order.version}"
        check_saved((await ask(uow, text)).affected, order)
        order.version += 1

    stale = Order(7)
    async with unit(shop) as uow:
        order = uow.track(Order(7))
        order.pay()
        await save(uow, order)

    async def lose() -> None:
        async with unit(shop) as uow:
            uow.track(stale).pay()
            await ask(uow, f"INSERT INTO {shop.table} VALUES (8, 1)")
            await save(uow, stale)

    with pytest.raises(StaleAggregate):
        await lose()
    assert await shop.data() == 1
    assert [(event.type, event.aggregate_version) for event in await shop.events()] == [("order.paid", 2)]


@pytest.mark.asyncio
@AWAITED
@pytest.mark.filterwarnings("ignore:coroutine 'UnitOfWork._exit' was never awaited:RuntimeWarning")
async def test_a_rollback_that_is_not_awaited_happens_at_the_end(shop: Shop) -> None:
    await shop.app.open()
    async with unit(shop) as uow:
        uow.track(Order(7)).pay()
        await shop.order()
        uow.rollback()
    assert (await shop.data(), await types(shop)) == (0, [])


@pytest.mark.asyncio
@AWAITED
async def test_a_cancelled_block_rolls_back(shop: Shop) -> None:
    await shop.app.open()

    async def work() -> None:
        async with unit(shop) as uow:
            uow.track(Order(7)).pay()
            await shop.order()
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
    assert (await shop.data(), await types(shop)) == (0, [])


@pytest.mark.asyncio
@MONGO
async def test_a_conflict_on_mongodb_is_repeated(shop: Shop) -> None:
    pool = await shop.app.pool()
    outside: MongoClient[Any] = MongoClient(shop.app.url)
    orders = outside.get_default_database()[shop.table]
    orders.insert_one({"_id": 7, "version": 1})
    mine = pool.get_default_database()[shop.table]
    seen: list[int] = []

    async def steps(uow: UnitOfWork) -> None:
        document = await done(mine.find_one({"_id": 7}, session=uow.tx))
        order = uow.track(Order(7, document["version"]))
        seen.append(order.version)
        order.pay()
        if len(seen) == 1:
            orders.update_one({"_id": 7}, {"$inc": {"version": 1}})
        wanted = {"_id": 7, "version": order.version}
        result = await done(mine.update_one(wanted, {"$inc": {"version": 1}}, session=uow.tx))
        check_saved(result.matched_count, order)
        order.version += 1

    def plain_steps(uow: UnitOfWork) -> None:
        with pytest.raises(StopIteration):
            steps(uow).send(None)

    is_awaited = isinstance(pool, AsyncMongoClient)
    try:
        if is_awaited:
            with pytest.raises(OperationFailure, match=r"(?i)write ?conflict"):
                async with UnitOfWork(shop.outbox, pool) as uow:
                    await steps(uow)
            seen.clear()
            await UnitOfWork.run(shop.outbox, pool, steps)
        else:
            with pytest.raises(OperationFailure, match=r"(?i)write ?conflict"), UnitOfWork(shop.outbox, pool) as uow:
                steps(uow).send(None)
            seen.clear()
            UnitOfWork.run(shop.outbox, pool, plain_steps)
    finally:
        await shop.app.close_pool(pool)
        outside.close()
    assert seen == [2, 3]
    assert [(event.type, event.aggregate_version) for event in await shop.events()] == [("order.paid", 4)]


class Customer(Aggregate):
    """No ``__init__`` of its own, and its id has another name."""

    aggregate_type = "customer"
    number: UUID

    @property
    def aggregate_id(self) -> UUID:
        return self.number


@pytest.mark.asyncio
@SQLITE
async def test_bad_input_is_refused_in_one_sentence(shop: Shop) -> None:
    await shop.app.open()

    class Nameless(Aggregate):
        id = 7

    with pytest.raises(ConfigError, match="Nameless has no aggregate_type; set it on the class: aggregate_type = 'na"):
        Nameless().add_event("it.happened", {})
    uow = UnitOfWork(shop.outbox, shop.app.handle)
    with pytest.raises(NotInTransaction, match="this unit of work is not open; use it inside its `with` block"):
        uow.track(Order(7))
    with pytest.raises(ConfigError, match="not awaited; write `with UnitOfWork"):
        await uow.__aenter__()
    with uow:
        order = uow.track(Order(7))
        with pytest.raises(InvalidEvent, match="the payload contains NaN"):
            order.add_event("order.weighed", {"kg": float("nan")})
        with pytest.raises(ConfigError, match="no repository of Order is known; pass repositories="):
            uow.repository(Order)
        with pytest.raises(ConfigError, match="open already; make another one"):
            uow.__enter__()
        with (
            pytest.raises(ConfigError, match="another unit of work tracks this Order; load it again"),
            UnitOfWork(shop.outbox, shop.app.handle) as inner,
        ):
            inner.track(order)
    with pytest.raises(ConfigError, match="attempts is 0"):
        UnitOfWork.run(shop.outbox, shop.app.handle, len, attempts=0)  # type: ignore[arg-type]
    assert await types(shop) == []


@pytest.mark.asyncio
@AIOSQLITE
async def test_an_awaited_handle_needs_async_with(shop: Shop) -> None:
    with pytest.raises(ConfigError, match="has to be awaited; write `async with UnitOfWork"):
        UnitOfWork(shop.outbox, await shop.app.open()).__enter__()


@pytest.mark.asyncio
@SQLITE
async def test_a_block_in_an_open_unit_of_work_is_a_savepoint(shop: Shop) -> None:
    handle = await shop.app.open()
    with UnitOfWork(shop.outbox, handle) as outer:
        outer.track(Order(1)).pay()
        with UnitOfWork(shop.outbox, handle) as inner:
            inner.track(Order(2)).pay()
            inner.rollback()
        with UnitOfWork(shop.outbox, handle) as inner:
            inner.track(Order(3)).pay()
    assert [event.aggregate_id for event in await shop.events()] == ["3", "1"]


@pytest.mark.asyncio
@SQLITE
async def test_repositories_are_made_once_in_each_unit_of_work(shop: Shop) -> None:
    handle = await shop.app.open()

    class Orders:
        def __init__(self, uow: UnitOfWork) -> None:
            self.uow = uow

        def load(self, number: int) -> Order:
            return self.uow.track(Order(number))

    uow = UnitOfWork(shop.outbox, handle, repositories={Order: Orders})
    with uow:
        orders = uow.repository(Order)
        assert uow.repository(Order) is orders
        orders.load(7).pay()
    with uow:
        assert uow.repository(Order) is not orders
    assert await types(shop) == ["order.paid"]


@pytest.mark.asyncio
@SQLITE
async def test_the_tenant_is_the_events_own_then_the_units_then_the_contexts(shop: Shop) -> None:
    handle = await shop.app.open()
    token = current_tenant.set("context")
    try:
        for tenant in ("unit", None):
            with UnitOfWork(shop.outbox, handle, tenant=tenant) as uow:
                order = uow.track(Order(7))
                order.add_event("a", {}, tenant="own")
                order.add_event("b", {})
                uow.add("c", {}, tenant="own")
                uow.add("d", {})
    finally:
        current_tenant.reset(token)
    assert [event.tenant for event in await shop.events()] == [
        *("own", "unit", "own", "unit"),
        *("own", "context", "own", "context"),
    ]


@pytest.mark.asyncio
@SQLITE
async def test_drafts_of_an_aggregate_that_nobody_tracks_wait_for_the_next_unit(shop: Shop) -> None:
    handle = await shop.app.open()
    order = Order(7)
    with UnitOfWork(shop.outbox, handle) as uow:
        uow.track(order).add_event("first", {})
    order.add_event("second", {})
    with UnitOfWork(shop.outbox, handle):
        pass
    assert await types(shop) == ["first"]
    with UnitOfWork(shop.outbox, handle) as uow:
        uow.track(order)
    assert await types(shop) == ["first", "second"]


@pytest.mark.asyncio
@SQLITE
async def test_captured_events_are_complete(shop: Shop) -> None:
    handle = await shop.app.open()
    for write in (True, False):
        with shop.outbox.capture(write=write) as events, UnitOfWork(shop.outbox, handle) as uow:
            order = uow.track(Order(None))
            order.pay()
            order.id = 7
            assert events == []
        assert [(event.type, event.aggregate_id) for event in events] == [("order.paid", "7")]
    assert await types(shop) == ["order.paid"]


def test_any_class_can_be_an_aggregate() -> None:
    @dataclass(frozen=True, slots=True)
    class Slotted(Aggregate):
        aggregate_type = "slotted"
        id: int

    class HasSlots(Aggregate):
        __slots__ = ("id",)
        id: int
        aggregate_type = "slots"

    outbox = Outbox()
    number = UUID(int=7)
    customer = Customer()
    customer.number = number
    has_slots = HasSlots()
    has_slots.id = 7
    assert Slotted(7) == Slotted(7)
    with outbox.capture(write=False) as events, UnitOfWork(outbox, _no_database) as uow:
        for each in (Slotted(7), has_slots, customer):
            uow.track(each).add_event("it.happened", {})
    assert [event.aggregate_id for event in events] == ["7", "7", str(number)]


def _no_database() -> Any:
    return sqlite3.connect(":memory:")


@pytest.mark.parametrize(
    ("affected", "is_saved"), [(1, True), (2, True), (0, False), ("UPDATE 1", True), ("DELETE 0", False)]
)
def test_check_saved_reads_the_answers_of_drivers(affected: int | str, is_saved: bool) -> None:
    if is_saved:
        check_saved(affected, Order(7))
    else:
        with pytest.raises(StaleAggregate):
            check_saved(affected, Order(7))


class Checkout:
    """A service that knows of no driver."""

    def __init__(self, events: EventSink) -> None:
        self.events = events

    def buy(self, number: int) -> None:
        assert self.events.add("order.bought", {}, key=number).type == "order.bought"


@pytest.mark.asyncio
@SESSIONS_AND_RAW
async def test_a_service_takes_any_sink_of_events(shop: Shop) -> None:
    handle = await shop.app.open()
    if driver_of(handle).is_awaited and not shop.app.is_buffered:
        with pytest.raises(ConfigError, match="has to be awaited; use `async with outbox"):
            shop.outbox.sink(handle)
        async with shop.outbox.transaction(handle) as tx:
            Checkout(tx).buy(1)
    else:
        await shop.app.begin()
        Checkout(shop.outbox.sink(handle)).buy(1)
        await shop.app.commit()
    async with unit(shop) as uow:
        Checkout(uow).buy(2)
    assert [event.key for event in await shop.events()] == ["1", "2"]
