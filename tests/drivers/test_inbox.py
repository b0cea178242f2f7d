"""The inbox, on every driver and its real database."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import PyMongoError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import Event, Inbox, InvalidEvent, Outbox, stable_id
from pillarbox.conformance.driver import AWKWARD
from pillarbox.conformance.driver_setup import done
from pillarbox.drivers import driver_of
from pillarbox.errors import ConfigError, NotInTransaction, SchemaError
from pillarbox.ids import uuid7
from pillarbox.inbox import sql
from pillarbox.sql.dialects import ErrorKind
from servers import Mongo, MongoStandalone
from tests.drivers.applications import SqlAlchemyAsyncSession, SqlAlchemySession
from tests.drivers.desk import Desk
from tests.mongo_outbox import MongoOutbox

AWAITED: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda _, kind: kind.is_awaited or kind is SqlAlchemyAsyncSession
)
PLAIN: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda _, kind: not kind.is_awaited and kind is not SqlAlchemyAsyncSession
)
SQLITE: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda database, _: database == "sqlite")
POOLED: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: kind.has_pool)
SESSIONS: pytest.MarkDecorator = pytest.mark.drivers.with_args(
    lambda _, kind: kind in (SqlAlchemySession, SqlAlchemyAsyncSession)
)
BLOCKS: pytest.MarkDecorator = pytest.mark.drivers.with_args(lambda _, kind: kind.is_awaited)


def event_of(version: int | None = None, aggregate: str | None = "7", **fields: Any) -> Event:
    return Outbox().event("order.created", {}, aggregate_id=aggregate, aggregate_version=version, **fields)


async def recorded(desk: Desk, event: Event | UUID | str, name: str = "mailer") -> bool:
    """Record it in a transaction of its own."""
    await desk.app.begin()
    is_new = await desk.inbox(name).record(desk.app.handle, event)
    await desk.app.commit()
    return is_new


async def all_recorded(desk: Desk, events: Sequence[Any]) -> Sequence[Any]:
    await desk.app.begin()
    new = await desk.inbox().record_all(desk.app.handle, events)
    await desk.app.commit()
    return new


@pytest.mark.asyncio
async def test_an_event_is_new_once(desk: Desk) -> None:
    await desk.app.open()
    event = event_of(3, aggregate_type="order")
    assert await recorded(desk, event) is True
    assert await recorded(desk, event) is False
    assert await recorded(desk, event.id) is False
    assert await recorded(desk, str(event.id).upper()) is False
    for other in (event_of(), uuid4(), stable_id(event.id, 7), stable_id(event.id, 8)):
        assert await recorded(desk, other) is True
        assert await recorded(desk, other) is False


@pytest.mark.asyncio
async def test_in_one_transaction_the_second_copy_is_not_new(desk: Desk) -> None:
    await desk.app.open()
    await desk.app.begin()
    inbox, event = desk.inbox(), event_of()
    assert await inbox.record(desk.app.handle, event)
    assert not await inbox.record(desk.app.handle, event)
    assert await inbox.record_all(desk.app.handle, [event, event]) == []
    await desk.app.commit()


@pytest.mark.asyncio
async def test_effects_and_record_roll_back_together(desk: Desk) -> None:
    await desk.app.open()
    event = event_of()
    await desk.app.begin()
    assert await desk.inbox().record(desk.app.handle, event)
    await done(desk.apply(desk.app.handle, event))
    await desk.app.rollback()
    assert await desk.effects(event) == 0
    assert await recorded(desk, event)


@pytest.mark.asyncio
async def test_each_consumer_has_its_own_events(desk: Desk) -> None:
    await desk.app.open()
    event = event_of()
    names = ["mailer", "Mailer", "mailer ", "máiler", AWKWARD, "x" * 100]
    assert [await recorded(desk, event, name) for name in names] == [True] * 6
    assert [await recorded(desk, event, name) for name in names] == [False] * 6


@pytest.mark.parametrize("name", ["", "x" * 101, "nul\0", 7])
def test_a_consumer_has_a_proper_name(name: Any) -> None:
    with pytest.raises(InvalidEvent, match=r"^consumer "):
        Inbox(name)


@pytest.mark.parametrize("value", ["message 7", 7, None, b"0" * 16])
def test_something_without_an_id_is_refused(value: Any) -> None:
    with pytest.raises(InvalidEvent, match="stable_id"):
        Inbox("mailer").record(None, value)


@pytest.mark.asyncio
async def test_a_batch_gives_the_new_ones_in_their_order(desk: Desk) -> None:
    await desk.app.open()
    events = [event_of(n) for n in range(1203)][::-1]
    known = [events[5], events[1001], events[1202]]
    assert list(await all_recorded(desk, known)) == known
    mixed = [*events[:10], events[3], events[5], *events[10:], events[1202], events[3]]
    assert list(await all_recorded(desk, mixed)) == [event for event in events if event not in known]
    assert list(await all_recorded(desk, mixed)) == []
    assert list(await all_recorded(desk, [])) == []


@pytest.mark.asyncio
async def test_a_batch_of_ids(desk: Desk) -> None:
    await desk.app.open()
    ids: list[UUID | str] = [uuid4(), str(uuid4()), uuid7()]
    assert list(await all_recorded(desk, ids)) == ids
    event = event_of(1)
    assert list(await all_recorded(desk, [*ids[:2], str(ids[2]), event])) == [event]


@SQLITE
@pytest.mark.asyncio
async def test_a_batch_on_an_old_sqlite(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "_HAS_RETURNING", False)
    await desk.app.open()
    events = [event_of() for _ in range(5)]
    assert list(await all_recorded(desk, events[1:3])) == events[1:3]
    assert list(await all_recorded(desk, events)) == [events[0], *events[3:]]


@pytest.mark.asyncio
async def test_a_forgotten_event_is_new_again(desk: Desk) -> None:
    await desk.app.open()
    inbox, event, other = desk.inbox(), event_of(), event_of()
    assert await recorded(desk, event)
    assert await recorded(desk, other)
    await desk.app.begin()
    assert await inbox.forget(desk.app.handle, event)
    assert not await inbox.forget(desk.app.handle, event)
    await desk.app.commit()
    assert await recorded(desk, event)
    assert not await recorded(desk, other)


@pytest.mark.asyncio
async def test_only_a_newer_version_passes(desk: Desk) -> None:
    await desk.app.open()
    inbox, order, other = desk.inbox(), str(uuid4()), f"${uuid4()}"

    async def newer(event: Event, name: str = "mailer") -> bool:
        await desk.app.begin()
        is_newer = await desk.inbox(name).newer(desk.app.handle, event)
        await desk.app.commit()
        return is_newer

    first, second = event_of(5, order), event_of(5, order)
    assert first.id < second.id
    assert await newer(first)  # the first that is seen
    assert not await newer(first)  # a copy
    assert not await newer(event_of(4, order))  # older
    assert await newer(second)  # the same version, a higher id
    assert not await newer(first)
    assert await newer(event_of(2**40, order))
    assert not await newer(event_of(6, order))
    assert await newer(event_of(-3, other))
    assert await newer(event_of(0, other))
    assert await newer(event_of(1, order, aggregate_type="order"))
    assert await newer(event_of(1, other, aggregate_type="$order 'x'"))
    assert await newer(event_of(1, order), "other")
    await desk.app.begin()
    assert await inbox.newer(desk.app.handle, event_of(2**41, order))
    await desk.app.rollback()
    assert await newer(event_of(2**41, order))


@pytest.mark.parametrize(
    ("event", "lacks"),
    [(event_of(None), "no aggregate_version"), (event_of(1, None), "no aggregate_id"), (uuid4(), "pass the event")],
)
def test_an_event_without_a_version_cannot_be_compared(event: Any, lacks: str) -> None:
    with pytest.raises(InvalidEvent, match=lacks):
        Inbox("mailer").newer(None, event)


@pytest.mark.asyncio
async def test_it_refuses_where_every_statement_commits_by_itself(desk: Desk) -> None:
    handle = await desk.app.open(autocommit=True)
    inbox, event = desk.inbox(), event_of(1)
    for call in (inbox.record, inbox.newer, inbox.forget):
        with pytest.raises(NotInTransaction, match="effects were not committed; "):
            await call(handle, event)
    with pytest.raises(NotInTransaction, match="effects were not committed; "):
        await inbox.record_all(handle, [event])
    await desk.app.close()
    await desk.app.open()
    assert await recorded(desk, event)


@SESSIONS
@pytest.mark.asyncio
async def test_a_session_that_begins_nothing_is_refused(desk: Desk) -> None:
    session = await desk.app.open()
    begun = session.sync_session if isinstance(session, AsyncSession) else session
    assert isinstance(begun, Session)
    begun.autobegin = False
    begun.rollback()
    with pytest.raises(NotInTransaction, match="open one"):
        await desk.inbox().record(session, event_of())


@POOLED
@pytest.mark.asyncio
async def test_a_pool_has_no_transaction(desk: Desk) -> None:
    pool = await desk.app.pool()
    try:
        with pytest.raises(ConfigError, match=r"no transaction; pass a .*inbox\.once"):
            await desk.inbox().record(pool, event_of())
    finally:
        await desk.app.close_pool(pool)


@pytest.mark.asyncio
async def test_a_database_without_tables(desk: Desk) -> None:
    await desk.app.open()
    inbox, event = Inbox("mailer", prefix="nowhere"), event_of(1)
    for call in (inbox.record, inbox.newer, inbox.forget):
        await desk.app.begin()
        with pytest.raises(SchemaError, match=r"pillarbox init|manage\.py migrate"):
            await call(desk.app.handle, event)
        await desk.app.rollback()


@AWAITED
@pytest.mark.asyncio
async def test_a_result_must_be_awaited_where_the_driver_is(desk: Desk) -> None:
    await desk.app.open()
    await desk.app.begin()
    inbox, event = desk.inbox(), event_of()
    with pytest.raises(TypeError, match=r"write `await inbox\.record\(\.\.\.\)`"):
        bool(inbox.record(desk.app.handle, event))
    with pytest.raises(TypeError, match=r"write `await inbox\.record_all\(\.\.\.\)`"):
        list(inbox.record_all(desk.app.handle, [event]))
    with pytest.warns(RuntimeWarning, match="never awaited"):
        inbox.forget(desk.app.handle, event)
    answer = inbox.record(desk.app.handle, event)
    assert await answer is True
    assert answer  # also after the await
    assert await answer is True
    await desk.app.commit()
    assert not await recorded(desk, event)


@PLAIN
@pytest.mark.asyncio
async def test_a_result_is_there_at_once_on_a_plain_driver(desk: Desk) -> None:
    await desk.app.open()
    await desk.app.begin()
    inbox, events = desk.inbox(), [event_of(), event_of()]
    assert inbox.record(desk.app.handle, events[0])
    assert not inbox.record(desk.app.handle, events[0])
    new = inbox.record_all(desk.app.handle, events)
    assert (len(new), new[0], new[:1], list(new)) == (1, events[1], [events[1]], [events[1]])
    await desk.app.commit()


@BLOCKS
@pytest.mark.asyncio
async def test_in_a_block_of_the_outbox(desk: Desk) -> None:
    await desk.app.open()
    inbox, outbox, event = desk.inbox(), desk.outbox(), event_of()
    for expected in (True, False):
        async with outbox.transaction(desk.app.handle) as tx:
            is_new = await inbox.record(tx, event)
            assert is_new is expected
            if is_new:
                tx.add("order.confirmed", {}, id=event.id)
    async with outbox.transaction(desk.app.handle) as tx:
        assert await outbox.exists(tx, event.id)


def test_a_standalone_server_is_refused(mongo_standalone: MongoStandalone) -> None:
    made = MongoOutbox(mongo_standalone.url)
    inbox = Inbox("mailer", prefix=made.prefix)
    with MongoClient[Any](made.url) as client, client.start_session() as session, session.start_transaction():
        for call in (inbox.record, inbox.newer):
            with pytest.raises(ConfigError, match=r"standalone.*pillarbox\.projections\.upsert\(\.\.\., version="):
                call(session, event_of(1))
    made.close()


@pytest.mark.asyncio
async def test_a_standalone_server_is_refused_where_it_is_awaited(mongo_standalone: MongoStandalone) -> None:
    made = MongoOutbox(mongo_standalone.url)
    async with (
        AsyncMongoClient[Any](made.url) as client,
        client.start_session() as session,
        await session.start_transaction(),
    ):
        with pytest.raises(ConfigError, match="standalone"):
            await Inbox("mailer", prefix=made.prefix).record(session, event_of())
    made.close()


@pytest.mark.parametrize("verb", ["record", "record_all", "newer"])
def test_what_another_transaction_wrote_since_the_snapshot_is_a_conflict(mongo: Mongo, verb: str) -> None:
    made = MongoOutbox(mongo.url)
    inbox, event = Inbox("mailer", prefix=made.prefix), event_of(1)
    work: Any = [event] if verb == "record_all" else event
    call = getattr(inbox, verb)
    with made.client.start_session() as early, made.client.start_session() as late:
        early.start_transaction()
        assert inbox.record(early, uuid4())  # takes the snapshot
        with late.start_transaction():
            assert call(late, work)
        with pytest.raises(PyMongoError) as caught:
            call(early, work)
        assert driver_of(early).classify(caught.value) is ErrorKind.CONFLICT
        early.abort_transaction()
        with early.start_transaction():
            assert not call(early, work)
    made.close()
