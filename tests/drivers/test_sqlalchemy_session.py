"""Sessions of SQLAlchemy: one INSERT at the flush, savepoints, and the other ways to begin and end."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from pillarbox import Outbox, Status
from pillarbox.errors import DuplicateEvent, NotInTransaction
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.sqlite import SqliteStore
from servers import Postgres

OUTBOX = Outbox()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "shop.db")


@pytest.fixture
def engine(path: str) -> Iterator[Engine]:
    async def migrate() -> None:
        store = SqliteStore(path)
        await store.migrate()
        await store.close()

    asyncio.run(migrate())
    engine = create_engine(f"sqlite:///{path}")

    # SQLAlchemy's own recipe for savepoints on SQLite.
    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def written(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return [row[0] for row in connection.exec_driver_sql("SELECT type FROM outbox_event ORDER BY seq")]


def orders(engine: Engine) -> int:
    with Session(engine) as session:
        return len(session.scalars(select(Order)).all())


class Statements:
    """The INSERTs into the outbox, and what came before them."""

    def __init__(self, engine: Engine) -> None:
        self.all: list[str] = []
        event.listen(engine, "before_cursor_execute", self._note)

    def _note(self, _connection: object, _cursor: object, text: str, *_rest: object) -> None:
        self.all.append(text.split(" (")[0].split(" VALUES")[0])

    def of_the_outbox(self) -> list[str]:
        return [text for text in self.all if "outbox_event" in text]


def test_500_adds_are_one_statement_after_the_data(engine: Engine) -> None:
    statements = Statements(engine)
    with Session(engine) as session, session.begin():
        for number in range(500):
            OUTBOX.add(session, "order.created", {"n": number}, key=number)
        session.add(Order(id=1))
    assert statements.of_the_outbox() == ["INSERT INTO outbox_event"]
    inserts = [text for text in statements.all if text.startswith("INSERT")]
    assert inserts == ["INSERT INTO orders", "INSERT INTO outbox_event"]
    assert len(written(engine)) == 500


@pytest.mark.parametrize("way", ["engine", "option", "connection"])
def test_a_session_that_commits_by_itself_is_refused_before_anything_is_written(
    engine: Engine, path: str, way: str
) -> None:
    options = {"isolation_level": "AUTOCOMMIT"}
    loose = create_engine(f"sqlite:///{path}", **(options if way == "engine" else {}))
    bind: Any = loose if way == "engine" else loose.execution_options(**options)
    if way == "connection":
        bind = loose.connect().execution_options(**options)
    with Session(bind) as session:
        session.add(Order(id=1))
        with pytest.raises(NotInTransaction, match="isolation_level='AUTOCOMMIT'"):
            OUTBOX.add(session, "order.created", {})
        session.rollback()
    assert (orders(engine), written(engine)) == (0, [])
    if way == "connection":
        bind.close()
    loose.dispose()


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["engine", "option", "connection"])
async def test_an_async_session_that_commits_by_itself_is_refused_too(tmp_path: Path, way: str) -> None:
    options = {"isolation_level": "AUTOCOMMIT"}
    url = f"sqlite+aiosqlite:///{tmp_path}/shop.db"
    loose = create_async_engine(url, **(options if way == "engine" else {}))
    async with loose.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    bind: Any = loose if way == "engine" else loose.execution_options(**options)
    if way == "connection":
        bind = await loose.connect()
        await bind.execution_options(**options)
    async with AsyncSession(bind) as session:
        session.add(Order(id=1))
        with pytest.raises(NotInTransaction, match="isolation_level='AUTOCOMMIT'"):
            OUTBOX.add(session, "order.created", {})
        await session.rollback()
        assert (await session.scalars(select(Order))).all() == []
    if way == "connection":
        await bind.close()
    await loose.dispose()


def test_a_savepoint_takes_its_events_with_it(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        OUTBOX.add(session, "before", {})
        with session.begin_nested():
            OUTBOX.add(session, "kept", {})
        with session.begin_nested() as savepoint:
            OUTBOX.add(session, "gone", {})
            session.add(Order(id=1))
            session.flush()
            OUTBOX.add(session, "gone, too", {})
            savepoint.rollback()
        OUTBOX.add(session, "after", {})
    assert written(engine) == ["before", "kept", "after"]
    assert orders(engine) == 0


def test_an_event_of_the_outer_transaction_survives_the_savepoint_it_was_written_in(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        OUTBOX.add(session, "outer", {})
        savepoint = session.begin_nested()
        session.add(Order(id=1))
        session.flush()
        savepoint.rollback()
    assert written(engine) == ["outer"]
    assert orders(engine) == 0


def test_savepoints_in_savepoints(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        with session.begin_nested() as outer:
            OUTBOX.add(session, "1", {})
            with session.begin_nested():
                OUTBOX.add(session, "2", {})
                session.add(Order(id=2))
            outer.rollback()
        with session.begin_nested():
            OUTBOX.add(session, "3", {})
            inner = session.begin_nested()
            OUTBOX.add(session, "4", {})
            session.flush()
            inner.rollback()
    assert written(engine) == ["3"]
    assert orders(engine) == 0


def test_a_savepoint_that_is_closed_is_rolled_back(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        savepoint = session.begin_nested()
        session.add(Order(id=1))
        OUTBOX.add(session, "gone", {})
        session.flush()
        savepoint.close()
        OUTBOX.add(session, "kept", {})
    assert orders(engine) == 0
    assert written(engine) == ["kept"]


def test_rollback_and_close_forget_what_waits(engine: Engine) -> None:
    session = Session(engine)
    OUTBOX.add(session, "rolled back", {})
    session.rollback()
    OUTBOX.add(session, "closed", {})
    session.close()
    session.add(Order(id=1))
    session.commit()
    assert written(engine) == []
    OUTBOX.add(session, "committed", {})
    session.commit()
    session.commit()
    session.close()
    assert written(engine) == ["committed"]


def test_a_failed_flush_leaves_nothing(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(id=1))
    with Session(engine) as session:
        OUTBOX.add(session, "order.created", {})
        session.add(Order(id=1))
        with pytest.raises(IntegrityError):
            session.commit()
    assert written(engine) == []


def test_a_duplicate_fails_the_commit_and_can_be_rolled_back(engine: Engine) -> None:
    first = OUTBOX.event("order.created", {})
    with Session(engine) as session:
        OUTBOX.add_all(session, [first])
        session.commit()
        session.add(Order(id=1))
        OUTBOX.add_all(session, [first])
        with pytest.raises(DuplicateEvent, match=str(first.id)):
            session.commit()
        session.rollback()
        OUTBOX.add_all(session, [first], on_duplicate="ignore")
        session.add(Order(id=2))
        session.commit()
    assert written(engine) == ["order.created"]
    assert orders(engine) == 1


def test_events_added_by_hooks_of_the_flush(engine: Engine) -> None:
    with Session(engine) as session, session.begin():

        @event.listens_for(session, "before_flush")
        def before(each: Session, *_: object) -> None:
            if each.new:
                OUTBOX.add(each, "before flush", {})

        @event.listens_for(session, "after_flush")
        def after(each: Session, *_: object) -> None:
            OUTBOX.add(each, "after flush", {})

        session.add(Order(id=1))
    assert sorted(written(engine)) == ["after flush", "before flush"]


@pytest.mark.parametrize("on", ["class", "session"])
@pytest.mark.parametrize("hook", ["before_flush", "after_flush", "after_flush_postexec", "before_commit"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_hook_may_add_an_event_at_any_stage(engine: Engine, on: str, hook: str, is_first: bool) -> None:
    sessions = sessionmaker(engine)
    with sessions() as session:
        if not is_first:
            OUTBOX.add(session, "earlier", {})
            session.commit()
        added: list[str] = []

        @event.listens_for(sessions if on == "class" else session, hook)
        def called(each: Session, *_: object) -> None:
            if not added:
                added.append(OUTBOX.add(each, "by the hook", {}).type)

        session.add(Order(id=1))
        session.commit()
        assert added
    assert written(engine) == [*([] if is_first else ["earlier"]), "by the hook"]


def test_a_hook_of_the_commit_of_a_session_that_has_nothing_to_flush(engine: Engine) -> None:
    sessions = sessionmaker(engine)

    @event.listens_for(sessions, "before_commit")
    def committing(session: Session) -> None:
        OUTBOX.add(session, "by the hook", {})

    with sessions() as session, session.begin():
        session.execute(insert(Order).values(id=1))
    assert written(engine) == ["by the hook"]


def test_a_hook_of_the_commit_sees_what_is_new(engine: Engine) -> None:
    with Session(engine) as session:
        seen: list[int] = []
        event.listen(session, "before_commit", lambda each: seen.append(len(each.new)))
        session.add(Order(id=1))
        session.commit()
    assert seen == [1]


@pytest.mark.parametrize("hook", ["after_commit", "after_rollback"])
def test_an_event_after_the_end_is_refused(engine: Engine, hook: str) -> None:
    refused: list[str] = []
    with Session(engine) as session:

        @event.listens_for(session, hook)
        def ended(each: Session) -> None:
            with pytest.raises(NotInTransaction) as caught:
                OUTBOX.add(each, "late", {})
            refused.append(str(caught.value))

        session.add(Order(id=1))
        session.flush()
        session.commit() if hook == "after_commit" else session.rollback()
    assert len(refused) == 1
    assert written(engine) == []


def test_what_waits_is_not_in_the_info_of_the_session(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        OUTBOX.add(session, "order.created", {})
        session.info.clear()
    assert written(engine) == ["order.created"]


def test_a_session_without_autobegin_must_be_begun(engine: Engine) -> None:
    with Session(engine, autobegin=False) as session:
        with pytest.raises(NotInTransaction, match=r"session\.begin"):
            OUTBOX.add(session, "order.created", {})
        with session.begin():
            OUTBOX.add(session, "order.created", {})
    assert written(engine) == ["order.created"]


def test_a_session_in_a_transaction_from_outside(engine: Engine) -> None:
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            added = OUTBOX.add(session, "order.created", {})
            session.commit()
            assert OUTBOX.exists(session, added.id)
        outer.rollback()
    assert written(engine) == []


def test_scoped_sessions(engine: Engine) -> None:
    registry = scoped_session(sessionmaker(engine))
    OUTBOX.add(registry, "order.created", {})
    registry.commit()
    registry.remove()
    assert written(engine) == ["order.created"]


@pytest.mark.asyncio
async def test_asynchronous_sessions(postgres: Postgres) -> None:
    prefix = "async_session"
    store = PostgresStore(postgres.url, prefix=prefix)
    await store.migrate()
    await store.open()
    outbox = Outbox(prefix=prefix)
    engine = create_async_engine(postgres.url.replace("postgresql:", "postgresql+asyncpg:"))
    sessions = async_sessionmaker(engine)
    async with sessions() as session, session.begin():
        outbox.add(session, "one", {})
        await outbox.add(session, "two", {})
        async with session.begin_nested() as savepoint:
            outbox.add(session, "gone", {})
            await savepoint.rollback()
    registry = async_scoped_session(sessions, scopefunc=lambda: 1)
    outbox.add(registry, "three", {})
    await registry.commit()
    await registry.remove()
    async with AsyncSession(engine) as session:
        outbox.add(session, "never committed", {})
    assert (await store.count("default"))[Status.PENDING] == 3
    await engine.dispose()
    await store.close()
