"""Mapped aggregates whose sessions write their events, on real databases."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from sqlalchemy import Engine, ForeignKey, String, create_engine, delete, event, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from pillarbox import Aggregate, InvalidEvent, Outbox, StaleAggregate, UnitOfWork, current_tenant
from pillarbox.errors import ConfigError
from pillarbox.urls import store_from_url
from tests.drivers.conftest import database_url

PREFIX = f"follow_{os.getpid()}"
OUTBOX = Outbox(prefix=PREFIX)


class Base(DeclarativeBase):
    pass


class Order(Base, Aggregate):
    __tablename__ = f"{PREFIX}_orders"
    aggregate_type = "order"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    state: Mapped[str] = mapped_column(String(50), default="new")
    version: Mapped[int] = mapped_column()
    kind: Mapped[str] = mapped_column(String(50), default="order")
    lines: Mapped[list["Line"]] = relationship(cascade="all, delete-orphan")
    __mapper_args__ = {  # noqa: RUF012
        "version_id_col": version,
        "polymorphic_on": kind,
        "polymorphic_identity": "order",
    }

    def pay(self) -> None:
        self.state = "paid"
        self.add_event("order.paid", {})


class Gift(Order):
    __tablename__ = f"{PREFIX}_gifts"

    id: Mapped[int] = mapped_column(ForeignKey(Order.id), primary_key=True)
    card: Mapped[str] = mapped_column(String(50), default="")
    __mapper_args__ = {"polymorphic_identity": "gift"}  # noqa: RUF012


class Line(Base):
    __tablename__ = f"{PREFIX}_lines"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))
    count: Mapped[int] = mapped_column(default=1)


class Note(Base, Aggregate):
    """Without a version."""

    __tablename__ = f"{PREFIX}_notes"
    aggregate_type = "note"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    body: Mapped[str] = mapped_column(String(50), default="")

    @property
    def aggregate_id(self) -> int:
        return self.number


class Counter(Base, Aggregate):
    """A version and nothing else."""

    __tablename__ = f"{PREFIX}_counters"
    aggregate_type = "counter"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


OUTBOX.follow(Base)
ON_SQLITE: pytest.MarkDecorator = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


class Written(NamedTuple):
    type: str
    id: str | None
    version: int | None


class World:
    """A database, and the application's engine."""

    def __init__(self, database: str, url: str) -> None:
        self.database = database
        self.url = url
        scheme, rest = url.split(":", 1)
        names = {
            "postgresql": ("psycopg", "asyncpg"),
            "mysql": ("pymysql", "asyncmy"),
            "sqlite": ("pysqlite", "aiosqlite"),
        }
        self.plain_url, self.async_url = (f"{scheme}+{name}:{rest}" for name in names[scheme])
        self.engine = create_engine(self.plain_url)
        if database == "sqlite":
            with_savepoints(self.engine)

    def written(self) -> list[Written]:
        columns = "type, aggregate_id, aggregate_version"
        with self.engine.connect() as connection:
            return [
                Written(*row) for row in connection.execute(text(f"SELECT {columns} FROM {PREFIX}_event ORDER BY seq"))
            ]

    def types(self) -> list[str]:
        return [each.type for each in self.written()]

    def order(self, *lines: Line) -> int:
        """A saved order; its events are cleared away."""
        with Session(self.engine) as session, session.begin():
            order = Order(lines=[*lines])
            session.add(order)
            session.flush()
            return order.id

    def clear(self) -> None:
        with self.engine.begin() as connection:
            for table in reversed(Base.metadata.sorted_tables):
                connection.execute(delete(table))
            connection.execute(text(f"DELETE FROM {PREFIX}_event"))


def with_savepoints(engine: Engine) -> None:
    """SQLAlchemy's own recipe for savepoints on SQLite."""

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")


@pytest.fixture(scope="module", params=["sqlite", "postgres", "mysql"])
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    url = database_url(request.param, request, tmp_path_factory.mktemp("follow"))

    async def migrate() -> None:
        store = store_from_url(url, prefix=PREFIX)
        await store.migrate()
        await store.close()

    asyncio.run(migrate())
    world = World(request.param, url)
    Base.metadata.create_all(world.engine)
    yield world
    Base.metadata.drop_all(world.engine)
    world.engine.dispose()


@pytest.fixture
def world(database: World) -> Iterator[World]:
    yield database
    database.clear()


@pytest_asyncio.fixture
async def engine(world: World) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(world.async_url)
    yield engine
    await engine.dispose()


def test_a_new_aggregate_has_its_id_and_version_in_its_events(world: World) -> None:
    order = Order()
    order.add_event("order.created", {})  # in no session yet
    with Session(world.engine, expire_on_commit=False) as session, session.begin():
        OUTBOX.add(session, "before", {})
        session.add(order)
        OUTBOX.add(session, "between", {})
        order.pay()
        OUTBOX.add(session, "after", {})
    number = str(order.id)
    assert world.written() == [
        ("before", None, None),
        ("order.created", number, 1),
        ("between", None, None),
        ("order.paid", number, 1),
        ("after", None, None),
    ]


def test_events_of_one_flush_share_a_version_and_each_flush_has_its_own(world: World) -> None:
    number = world.order()
    with Session(world.engine) as session, session.begin():
        order = session.get_one(Order, number)
        order.add_event("a", {})
        order.pay()
        session.flush()
        order.add_event("b", {})
        session.flush()  # of nothing: b waits
        order.state = "packed"
        order.add_event("c", {})
    assert world.written() == [
        ("a", str(number), 2),
        ("order.paid", str(number), 2),
        ("b", str(number), 3),
        ("c", str(number), 3),
    ]
    with Session(world.engine) as session:
        assert session.get_one(Order, number).version == 3


@pytest.mark.parametrize("change", ["child", "children", "nothing", "expired"])
def test_a_root_without_a_change_of_its_own_gets_a_new_version(world: World, change: str) -> None:
    number = world.order(Line())
    with Session(world.engine) as session, session.begin():
        order = session.get_one(Order, number)
        if change == "child":
            order.lines[0].count = 2
        elif change == "children":
            order.lines.append(Line())
        elif change == "expired":
            session.expire(order)
        order.add_event("order.changed", {})
    assert world.written() == [("order.changed", str(number), 2)]
    with Session(world.engine) as session:
        order = session.get_one(Order, number)
        assert (order.version, order.state) == (2, "new")


def test_an_inherited_aggregate(world: World) -> None:
    with Session(world.engine, expire_on_commit=False) as session, session.begin():
        gift = Gift(card="hello")
        session.add(gift)
        gift.add_event("gift.wrapped", {})
        session.flush()
        gift.card = "goodbye"
        gift.add_event("gift.relabelled", {})
    assert world.written() == [("gift.wrapped", str(gift.id), 1), ("gift.relabelled", str(gift.id), 2)]


def test_a_deleted_aggregate_has_its_last_version(world: World) -> None:
    number = world.order(Line())
    with Session(world.engine) as session, session.begin():
        order = session.get_one(Order, number)
        order.pay()
        session.flush()
        order.add_event("order.deleted", {})
        session.delete(order)
        session.flush()
        order.add_event("order.mourned", {})
    assert world.written() == [(name, str(number), 2) for name in ("order.paid", "order.deleted", "order.mourned")]


def test_a_savepoint_takes_its_drafts_with_it(world: World) -> None:
    number = world.order()
    with Session(world.engine) as session, session.begin():
        order = session.get_one(Order, number)
        order.add_event("kept", {})
        savepoint = session.begin_nested()
        order.pay()
        session.flush()
        order.add_event("gone, too", {})
        savepoint.rollback()
        with session.begin_nested():
            order.add_event("released", {})
        lost = Order()
        savepoint = session.begin_nested()
        lost.add_event("lost", {})
        session.add(lost)
        savepoint.rollback()
    # The first draft was written in the savepoint, and again after its rollback, with the version that it has now.
    versions = {each.type: each.version for each in world.written()}
    assert versions == {"kept": 2, "released": 2}
    with Session(world.engine) as session:
        assert session.get_one(Order, number).version == 2


def test_a_flush_that_fails_in_a_savepoint_leaves_the_outer_drafts_waiting(world: World) -> None:
    number = world.order()
    with Session(world.engine) as session, session.begin():
        session.add(Note(number=7))
        session.flush()
        order = session.get_one(Order, number)
        order.add_event("kept", {})
        with suppress(IntegrityError), session.begin_nested():
            session.expunge(session.get_one(Note, 7))
            session.add(Note(number=7))
            order.add_event("gone", {})
            session.flush()
        assert order.version == 1
    assert world.written() == [("kept", str(number), 2)]


def test_an_aggregate_that_left_its_session_after_it_was_saved(world: World) -> None:
    number = world.order()
    with Session(world.engine) as session, session.begin():
        order = session.get_one(Order, number)
        order.add_event("order.opened", {})
        session.expunge(order)
    assert world.written() == [("order.opened", str(number), 1)]


def test_a_rollback_drops_drafts_and_a_retry_does_not_resurrect_them(world: World) -> None:
    number = world.order()
    with Session(world.engine) as session:
        order = session.get_one(Order, number)
        order.pay()
        session.flush()
        order.add_event("unwritten", {})
        session.rollback()
        order = session.get_one(Order, number)
        order.add_event("second try", {})
        session.commit()
    assert world.written() == [("second try", str(number), 2)]


@ON_SQLITE
def test_merge_copies_no_drafts(world: World) -> None:
    number = world.order()
    outside = Order(id=number, state="paid", version=1)
    outside.add_event("order.paid", {})
    with Session(world.engine) as session, session.begin():
        session.merge(outside)
    assert world.types() == []


def test_of_two_writers_one_is_stale_and_writes_nothing(world: World) -> None:
    number = world.order(Line())
    with Session(world.engine) as winner, Session(world.engine, expire_on_commit=False) as loser:
        late = loser.get_one(Order, number)
        late.lines[0].count = 3
        with loser.no_autoflush:
            if world.database == "sqlite":
                loser.expunge_all()  # its transaction would not let another one write after it has read
                loser.rollback()
                loser.add(late)
            late.add_event("late", {})
        with winner.begin():
            order = winner.get_one(Order, number)
            order.lines[0].count = 2
            order.add_event("early", {})
        with pytest.raises(StaleDataError):
            loser.commit()
    assert world.types() == ["early"]


def test_a_root_without_a_version_is_locked(world: World) -> None:
    with Session(world.engine) as session, session.begin():
        session.add(Note(number=7))
    with Session(world.engine) as session, session.begin():
        note = session.get_one(Note, 7)
        note.add_event("note.read", {})
        note.add_event("note.read", {})
        assert statements(world.engine, session.flush) == []
        seen = statements(world.engine, session.commit)
        assert len([each for each in seen if each.startswith("SELECT")]) == 1
        if world.database != "sqlite":
            assert any("FOR UPDATE" in each for each in seen)
    assert world.written() == [("note.read", "7", None)] * 2
    with Session(world.engine) as session, session.begin():
        note = session.get_one(Note, 7)
        note.body = "changed"
        note.add_event("note.changed", {})
        seen = statements(world.engine, session.flush)
        assert not [each for each in seen if each.startswith("SELECT")], "its UPDATE locks it"
        session.execute(update(Note).values(body="again"))
        with pytest.raises(StaleAggregate, match="this Note was changed or deleted"):
            vanish(session, note)
        session.rollback()


def vanish(session: Session, note: Note) -> None:
    session.execute(delete(Note).execution_options(synchronize_session=False))
    note.add_event("note.read", {})
    session.commit()


def statements(engine: Engine, work: Callable[[], Any]) -> list[str]:
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        seen.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        work()
    finally:
        event.remove(engine, "before_cursor_execute", note)
    return seen


@ON_SQLITE
def test_an_aggregate_without_a_plain_column_is_locked_and_keeps_its_version(world: World) -> None:
    with Session(world.engine) as session, session.begin():
        session.add(Counter(id=7))
    with Session(world.engine) as session, session.begin():
        session.get_one(Counter, 7).add_event("counted", {})
    assert world.written() == [("counted", "7", 1)]


@ON_SQLITE
@pytest.mark.parametrize("hook", ["before_flush", "after_flush", "after_flush_postexec", "before_commit"])
@pytest.mark.parametrize("is_versioned", [True, False])
def test_a_hook_of_the_application_may_record_events(world: World, hook: str, is_versioned: bool) -> None:
    """Hooks of the session's own come after ours."""
    number = world.order()
    with Session(world.engine) as session, session.begin():
        session.add(Note(number=7))
    done: list[str] = []
    with Session(world.engine) as session:
        other = session.get_one(Order, number) if is_versioned else session.get_one(Note, 7)

        def record(session: Session, *_rest: object) -> None:
            if not done:
                done.append(hook)
                other.add_event("by a hook", {})
                OUTBOX.add(session, "after it", {})

        event.listen(session, hook, record)
        session.add(Note(number=8))
        session.commit()
    assert done
    assert world.written() == [
        ("by a hook", str(number if is_versioned else 7), 2 if is_versioned else None),
        ("after it", None, None),
    ]


@ON_SQLITE
def test_captured_events_are_complete_and_captured_once(world: World) -> None:
    number = world.order()
    for write in (True, False):
        with OUTBOX.capture(write=write) as events, Session(world.engine) as session, session.begin():
            order = session.get_one(Order, number)
            order.add_event("order.seen", {})
            savepoint = session.begin_nested()
            order.state = "gone"
            session.flush()
            savepoint.rollback()
        assert [(each.type, each.aggregate_id) for each in events] == [("order.seen", str(number))]
    assert world.types() == ["order.seen"]


@ON_SQLITE
def test_the_tenant_of_a_unit_of_work(world: World) -> None:
    with OUTBOX.capture() as events, UnitOfWork(OUTBOX, sessionmaker(world.engine), tenant="acme") as uow:
        order = Order()
        uow.tx.add(order)
        order.pay()
    assert current_tenant.get() is None
    assert [each.tenant for each in events] == ["acme"]


@ON_SQLITE
def test_the_tenant_of_the_context(world: World) -> None:
    token = current_tenant.set("acme")
    try:
        with OUTBOX.capture() as events, Session(world.engine) as session, session.begin():
            order = Order()
            session.add(order)
            order.pay()
    finally:
        current_tenant.reset(token)
    assert [each.tenant for each in events] == ["acme"]


@ON_SQLITE
def test_an_aggregate_that_leaves_its_session_before_it_is_saved_is_refused(world: World) -> None:
    with Session(world.engine) as session:
        order = Order()
        session.add(order)
        order.pay()
        session.expunge(order)
        with pytest.raises(InvalidEvent, match="Order has left its session before it was saved"):
            session.commit()
    assert world.types() == []


@ON_SQLITE
def test_bad_input_is_refused_where_it_is_recorded(world: World) -> None:
    with Session(world.engine) as session:
        order = Order()
        session.add(order)
        with pytest.raises(InvalidEvent, match="NaN"):
            order.add_event("order.weighed", {"kg": float("nan")})
    with pytest.raises(ConfigError, match="follow was given a str; pass the base class"):
        OUTBOX.follow("Base")  # type: ignore[arg-type]


def test_a_unit_of_work_on_a_sessionmaker(world: World) -> None:
    number = world.order()
    with UnitOfWork(OUTBOX, sessionmaker(world.engine)) as uow:
        order = uow.track(uow.tx.get_one(Order, number))
        uow.add("first", {})
        order.pay()
        uow.track(Basket(5)).add_event("basket.left", {})
    assert world.written() == [("first", None, None), ("order.paid", str(number), 2), ("basket.left", "5", 9)]


def test_run_repeats_work_that_was_stale(world: World) -> None:
    number = world.order()
    seen: list[int] = []

    def work(uow: UnitOfWork) -> None:
        order = uow.tx.get_one(Order, number)
        seen.append(order.version)
        order.pay()
        if len(seen) == 1:
            uow.tx.execute(update(Order).values(version=5).execution_options(synchronize_session=False))

    UnitOfWork.run(OUTBOX, sessionmaker(world.engine, autoflush=False), work)
    assert seen == [1, 1]
    assert world.written() == [("order.paid", str(number), 2)]


class Basket(Aggregate):
    aggregate_type = "basket"
    version = 9

    def __init__(self, id: int) -> None:
        self.id = id


@ON_SQLITE
def test_a_unit_of_work_refuses_mapped_classes_that_nobody_follows(world: World) -> None:
    class Unfollowed(DeclarativeBase):
        pass

    class Stray(Unfollowed, Aggregate):
        __tablename__ = "strays"
        aggregate_type = "stray"
        id: Mapped[int] = mapped_column(primary_key=True)

    with (
        pytest.raises(ConfigError, match=r"Stray is mapped by SQLAlchemy, .*; call outbox\.follow\(Base\) once"),
        UnitOfWork(OUTBOX, sessionmaker(world.engine)) as uow,
    ):
        uow.track(Stray(id=1))


@pytest.mark.asyncio
async def test_an_async_session_writes_them_too(world: World, engine: AsyncEngine) -> None:
    number = world.order(Line())
    async with AsyncSession(engine, expire_on_commit=False) as session, session.begin():
        created = Order()
        created.add_event("order.created", {})
        session.add(created)
        order = await session.get_one(Order, number)
        order.add_event("order.opened", {})
        line = (await session.scalars(select(Line))).one()
        line.count = 2
        order.add_event("order.changed", {})
        OUTBOX.add(session, "plain", {})
    assert world.written() == [
        ("order.created", str(created.id), 1),
        ("order.opened", str(number), 2),
        ("order.changed", str(number), 2),
        ("plain", None, None),
    ]


@pytest.mark.asyncio
async def test_an_async_session_that_rolls_back_drops_them(world: World, engine: AsyncEngine) -> None:
    number = world.order()
    async with AsyncSession(engine, expire_on_commit=False) as session:
        order = await session.get_one(Order, number)
        order.pay()
        await session.rollback()
        await session.refresh(order)
        order.add_event("second try", {})
        await session.commit()
        order.add_event("of a detached value", {})
        await session.commit()
    assert world.written() == [("second try", str(number), 2), ("of a detached value", str(number), 3)]


@pytest.mark.asyncio
async def test_an_async_unit_of_work(world: World, engine: AsyncEngine) -> None:
    number = world.order()

    async def work(uow: UnitOfWork) -> int:
        order = await uow.tx.get_one(Order, number)
        order.pay()
        uow.add("plain", {})
        return int(order.version)

    assert await UnitOfWork.run(OUTBOX, async_sessionmaker(engine), work) == 1
    assert world.written() == [("order.paid", str(number), 2), ("plain", None, None)]
