"""Handlers that run once for each event, on every driver and its real database."""

import asyncio
import random
import socket
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import Event, Handlers, Inbox, InvalidEvent, Outage, Outbox, Reject
from pillarbox.batch import Batch
from pillarbox.conformance.driver_setup import Application, done
from pillarbox.drivers import driver_of
from pillarbox.drivers.contract import Driver, Statement, Steps, finish
from pillarbox.errors import ConfigError
from pillarbox.inbox import once, sql
from pillarbox.publisher import PUBLISHED, outage
from pillarbox.urls import store_from_url
from servers import Mongo
from tests.drivers.applications import PyMongo, SqlAlchemy, SqlAlchemyAsyncSession, Sqlite3, Sqlite3Cursor
from tests.drivers.desk import Desk
from tests.mongo_outbox import MongoOutbox

COPIES = 16
SEED = 10  # fails four times, then succeeds
# A cursor cannot close its connection.
ALL: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: kind is not Sqlite3Cursor)
POOLED: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: kind.has_pool)
ON_SERVERS: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda database, _: database not in ("sqlite", "mongo")
)
# Where the wait for another transaction can be made short.
BUSY: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda database, kind: (database in ("postgres", "mongo") and not issubclass(kind, SqlAlchemy)) or kind is Sqlite3
)
REFUSED: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda database, _: database != "sqlite")


Stock: TypeAlias = tuple[Inbox, Callable[[], sqlite3.Connection]]


class Unlucky(Exception):
    """A handler fails after its work."""


def event_of() -> Event:
    return Outbox().event("order.created", {})


def is_awaited(app: Application) -> bool:
    return app.is_awaited or isinstance(app, SqlAlchemyAsyncSession)


async def handle_of(app: Application) -> Any:
    """A client, an engine or a sessionmaker; on drivers without one a function that opens a connection."""
    if isinstance(app, PyMongo | SqlAlchemy):
        return await app.pool()
    connect = type(app)(app.url).connect
    return (lambda: connect(False)) if app.is_awaited else lambda: finish(connect(False))


async def close(app: Application, handle: Any) -> None:
    if isinstance(app, PyMongo | SqlAlchemy):
        await app.close_pool(handle)


def decorated(desk: Desk, handle: Any, work: Callable[[Any], Any], name: str = "mailer") -> Callable[[Event], Any]:
    """An async or a plain handler that writes the effect of its event and then runs ``work(tx)``."""

    async def awaited(event: Event, tx: Any) -> None:
        await desk.apply(tx, event)
        await done(work(tx))

    def plain(event: Event, tx: Any) -> None:
        desk.apply(tx, event)
        work(tx)

    handler: Any = awaited if is_awaited(desk.app) else plain
    return desk.inbox(name).once(handle)(handler)


def nothing(tx: Any) -> None:
    """No work besides the effect."""


async def called(handler: Callable[[Event], Any], event: Event) -> None:
    """Call a handler as a relay does: a plain one in a thread."""
    if asyncio.iscoroutinefunction(handler):
        await handler(event)
    else:
        await asyncio.to_thread(handler, event)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a pause nor a wait of PostgreSQL is long."""
    monkeypatch.setattr(once, "_LONGEST_PAUSE", 0.001)
    monkeypatch.setattr(sql, "_LOCK_TIMEOUT", "10ms")


@ALL
@pytest.mark.asyncio
async def test_copies_at_the_same_time_have_one_effect(desk: Desk) -> None:
    """Although the handler fails at random after its work, and is then called again."""
    chance, lock, event = random.Random(SEED), threading.Lock(), event_of()
    runs: list[bool] = []

    def fail_at_random(tx: Any) -> None:
        with lock:
            runs.append(chance.random() < 0.7)
        if runs[-1]:
            raise Unlucky

    handle = await handle_of(desk.app)
    handler = decorated(desk, handle, fail_at_random)
    start = threading.Barrier(COPIES)

    async def deliver() -> None:
        while True:
            with suppress(Unlucky):
                await handler(event)
                return

    def deliver_plain() -> None:
        start.wait()
        while True:
            with suppress(Unlucky):
                handler(event)
                return

    if is_awaited(desk.app):
        await asyncio.gather(*(deliver() for _ in range(COPIES)))
    else:
        with ThreadPoolExecutor(COPIES) as threads:
            for delivered in [threads.submit(deliver_plain) for _ in range(COPIES)]:
                delivered.result()
    await close(desk.app, handle)
    assert await desk.effects(event) == 1
    assert runs == [True, True, True, True, False]


@POOLED
@pytest.mark.asyncio
async def test_every_kind_of_pool(desk: Desk) -> None:
    pool, event = await desk.app.pool(), event_of()
    try:
        handler = decorated(desk, pool, nothing)
        for _ in range(3):
            await called(handler, event)
        await called(decorated(desk, lambda: pool, nothing, "later"), event)  # a pool that is opened later
        await called(handler, event_of())  # that one stays open
    finally:
        await desk.app.close_pool(pool)
    assert await desk.effects(event) == 2


def kill(driver: Driver) -> Steps[None]:
    """End the connection, as an administrator does."""
    if driver.dialect.database == "postgresql":
        yield Statement("SELECT pg_terminate_backend(pg_backend_pid())", has_rows=True)
    else:
        with suppress(Exception):  # some servers report the statement as interrupted
            yield Statement("KILL CONNECTION_ID()")
        yield Statement("SELECT 1", has_rows=True)


@ON_SERVERS
@pytest.mark.asyncio
async def test_a_lost_connection_is_an_outage(desk: Desk) -> None:
    handle, event = await handle_of(desk.app), event_of()
    with pytest.raises(Outage, match="the database of the inbox is away"):
        await called(decorated(desk, handle, lambda tx: driver_of(tx).run(kill)), event)
    assert await desk.effects(event) == 0
    await called(decorated(desk, handle, nothing), event)
    await close(desk.app, handle)
    assert await desk.effects(event) == 1


@REFUSED
@pytest.mark.asyncio
async def test_a_database_that_takes_no_connection_is_an_outage(app: Application) -> None:
    with closing(socket.socket()) as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        parts = urlsplit(app.url)
        place = f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{closed.getsockname()[1]}".lstrip("@")
        app.url = urlunsplit(parts._replace(netloc=place))
        if isinstance(app, PyMongo):
            app.url = f"mongodb://{place}/shop?serverSelectionTimeoutMS=50"
        handle = await handle_of(app)
        with pytest.raises(Outage, match="the database of the inbox is away"):
            await called(decorated(Desk(app, "outbox"), handle, nothing), event_of())
        await close(app, handle)


class Counted:
    """A function that opens connections, and says when it has opened enough."""

    def __init__(self, connect: Callable[[], Any], enough: int) -> None:
        self.connect = connect
        self.left = enough
        self.are_enough = threading.Event()

    def open(self) -> Any:
        self.left -= 1
        if not self.left:
            self.are_enough.set()
        return self.connect()


@BUSY
@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.asyncio
@pytest.mark.usefixtures("quick")
async def test_a_copy_waits_for_the_other_one_however_long(desk: Desk, commits: bool) -> None:
    event, app = event_of(), desk.app
    await app.open()
    await app.begin()
    assert await desk.inbox().record(app.handle, event)
    handle = await handle_of(app)
    if isinstance(app, Sqlite3):
        handle = partial(sqlite3.connect, app.url.removeprefix("sqlite:///"), timeout=0.01)
    counted = Counted((lambda: handle) if isinstance(app, PyMongo) else handle, 12)
    waiting = asyncio.create_task(called(decorated(desk, counted.open, nothing), event))
    assert await asyncio.to_thread(counted.are_enough.wait, 60)
    assert not waiting.done()
    await (app.commit() if commits else app.rollback())
    await waiting
    await close(app, handle)
    assert await desk.effects(event) == (0 if commits else 1)


@pytest.fixture
def stock(tmp_path: Path) -> Stock:
    """An inbox on SQLite, and a function that opens a connection to it."""
    url = f"sqlite:///{tmp_path}/stock.db"
    with ThreadPoolExecutor(1) as thread:  # the test may have an event loop of its own
        thread.submit(asyncio.run, migrated(url)).result()
    return Inbox("mailer"), partial(sqlite3.connect, f"{tmp_path}/stock.db")


async def migrated(url: str) -> None:
    store = store_from_url(url)
    await store.migrate()
    await store.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("conflicts", "calls"), [(9, 10), (10, 10)])
def test_a_conflict_of_the_handler_is_tried_ten_times(stock: Stock, conflicts: int, calls: int) -> None:
    inbox, connect = stock
    event, runs = event_of(), []

    @inbox.once(connect)
    def handler(event: Event, tx: Any) -> None:
        runs.append(event)
        if len(runs) <= conflicts:
            raise sqlite3.OperationalError("database is locked")

    if conflicts < calls:
        handler(event)
    else:
        with pytest.raises(sqlite3.OperationalError, match="is locked"):
            handler(event)
    assert runs == [event] * calls
    with closing(connect()) as connection:
        assert bool(inbox.record(connection, event)) is (conflicts >= calls)


@pytest.mark.usefixtures("quick")
def test_a_real_conflict_of_the_handler(mongo: Mongo) -> None:
    made = MongoOutbox(mongo.url)
    orders, event = made.database[f"{made.prefix}_order"], event_of()
    orders.insert_one({"_id": 1, "paid": 0})
    other = made.client.start_session()
    other.start_transaction()
    orders.update_one({"_id": 1}, {"$inc": {"paid": 1}}, session=other)
    runs: list[Event] = []

    @Inbox("mailer", prefix=made.prefix).once(made.client)
    def handler(event: Event, tx: Any) -> None:
        runs.append(event)
        if len(runs) == 3:
            other.commit_transaction()
        orders.update_one({"_id": 1}, {"$inc": {"paid": 1}}, session=tx)

    handler(event)
    handler(event)
    assert len(runs) in (3, 4)  # the third one may have its snapshot from before the commit
    assert orders.find_one() == {"_id": 1, "paid": 2}
    other.end_session()
    made.close()


@pytest.mark.asyncio
async def test_handlers_see_copies_and_outages(stock: Stock, tmp_path: Path) -> None:
    inbox, connect = stock
    handlers, runs = Handlers(), []

    @handlers.on("order.created")
    @inbox.once(connect)
    def create(event: Event, tx: sqlite3.Connection) -> None:
        """Create it."""
        runs.append(event.id)

    @handlers.on("order.paid")
    @Inbox("mailer", prefix="nowhere").once(connect)
    def pay(event: Event, tx: sqlite3.Connection) -> None:
        raise AssertionError("there is no inbox")

    assert (create.__name__, create.__doc__, create.__module__) == ("create", "Create it.", __name__)
    event = event_of()
    await handlers.open()
    for _ in range(2):
        assert await handlers.publish(Batch.of([event])) == [PUBLISHED]
    (outcome,) = await handlers.publish(Batch.of([event._replace(type="order.paid")]))
    await handlers.close()
    assert runs == [event.id]
    assert outcome == outage(str(outcome.error))
    assert "pillarbox init" in str(outcome.error)


def test_errors_of_the_handler_pass(stock: Stock) -> None:
    inbox, connect = stock

    @inbox.once(connect)
    def handler(event: Event, tx: Any) -> None:
        raise Reject("no stock")

    with pytest.raises(Reject, match="no stock"):
        handler(event_of())
    message: Any = "message 7"
    with pytest.raises(InvalidEvent, match="stable_id"):
        handler(message)


def test_work_that_nobody_awaited_is_rolled_back(stock: Stock) -> None:
    inbox, connect = stock
    event = event_of()

    async def work() -> None:
        """Never awaited."""

    handler: Callable[[Event], Any] = inbox.once(connect)(lambda event, tx: work())
    with pytest.raises(TypeError, match="async def"):
        handler(event)
    with closing(connect()) as connection:
        assert inbox.record(connection, event)


async def awaited_handler(event: Event, tx: Any) -> None:
    """An async handler."""


def plain_handler(event: Event, tx: Any) -> None:
    """A plain handler."""


async def connect_later() -> Any:
    """Opens a connection that is awaited."""


@pytest.mark.parametrize(
    ("handle", "handler", "remedy"),
    [
        (create_engine("sqlite://"), awaited_handler, "write `def awaited_handler`"),
        (create_async_engine("sqlite+aiosqlite://"), plain_handler, "write `async def plain_handler`"),
        (connect_later, plain_handler, "write `async def plain_handler`"),
        (create_engine("sqlite://"), lambda event: None, "the event and the transaction"),
    ],
)
def test_a_handle_and_a_handler_that_do_not_fit_are_refused(handle: Any, handler: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        Inbox("mailer").once(handle)(handler)


@pytest.mark.asyncio
async def test_a_function_that_opens_the_wrong_connection_is_refused(tmp_path: Path) -> None:
    plain = Inbox("mailer").once(lambda: connect_later())(plain_handler)
    with pytest.raises(ConfigError, match="write `async def plain_handler`"):
        plain(event_of())
    engine = create_engine("sqlite://")
    awaited = Inbox("mailer").once(lambda: engine)(awaited_handler)
    with pytest.raises(ConfigError, match="write `def awaited_handler`"):
        await awaited(event_of())


def test_a_connection_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "stock.db")
    with closing(connection), pytest.raises(ConfigError, match="pass an engine"):
        Inbox("mailer").once(connection)
    with pytest.raises(ConfigError, match="cannot write with a"):
        Inbox("mailer").once("sqlite:///stock.db")
