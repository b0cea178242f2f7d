"""The outbox as a table of SQLAlchemy, on real databases."""

import asyncio
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, MetaData, create_engine, func, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from pillarbox import Outbox
from pillarbox.sqlalchemy import event_table
from pillarbox.urls import store_from_url
from tests.drivers.applications import SqlAlchemy, SqlAlchemyAsync
from tests.drivers.conftest import database_url

OUTBOX = Outbox(prefix=f"table_{os.getpid()}")


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    url = database_url(request.param, request, tmp_path_factory.mktemp("table"))

    async def migrate() -> None:
        store = store_from_url(url, prefix=f"table_{os.getpid()}")
        await store.migrate()
        await store.close()

    asyncio.run(migrate())
    return url


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    scheme, rest = url.split(":", 1)
    engine = create_engine(f"{SqlAlchemy.driver[scheme]}:{rest}")
    yield engine
    engine.dispose()


def test_events_are_found_by_their_fields(engine: Engine, url: str) -> None:
    table = event_table(OUTBOX)
    instant = datetime(2024, 2, 29, 23, 59, 59, 123000, tzinfo=UTC)
    with Session(engine) as session, session.begin():
        session.execute(table.delete())
        first = OUTBOX.add(
            session, "order.paid", b"\x00\xff", aggregate_type="order", aggregate_id=7, aggregate_version=3,
            headers={"a": "b"}, occurred_at=instant, tenant="acme",
        )  # fmt: skip
        OUTBOX.add(session, "order.sent", {}, key=8, available_at=datetime.now(UTC) + timedelta(days=1))
    with engine.connect() as connection:
        row = connection.execute(select(table).where(table.c.id == first.id)).one()
        assert (row.id, row.payload, row.aggregate_id, row.aggregate_version) == (first.id, b"\x00\xff", "7", 3)
        assert (row.status, row.attempts, row.tenant, row.occurred_at) == ("pending", 0, "acme", instant)
        assert row.published_at is None
        assert abs(datetime.now(UTC) - row.created_at) < timedelta(hours=1)
        assert connection.scalar(select(table.c.type).where(table.c.id == str(first.id))) == "order.paid"
        assert connection.scalars(select(table.c.type).where(table.c.occurred_at <= instant)).all() == ["order.paid"]
        later = select(table.c.type).where(table.c.available_at > datetime.now(UTC))
        assert connection.scalars(later).all() == ["order.sent"]
        waiting = select(table.c.status, func.count()).group_by(table.c.status).order_by(table.c.status)
        assert [tuple(each) for each in connection.execute(waiting)] == [("pending", 1), ("scheduled", 1)]

    async def by_an_async_driver() -> None:
        scheme, rest = url.split(":", 1)
        own = create_async_engine(f"{SqlAlchemyAsync.driver[scheme]}:{rest}")
        async with own.connect() as connection:
            found = (await connection.execute(select(table).where(table.c.id == first.id))).one()
        await own.dispose()
        assert (found.id, found.occurred_at, bytes(found.payload)) == (first.id, instant, b"\x00\xff")

    asyncio.run(by_an_async_driver())


def test_its_metadata_is_its_own() -> None:
    table = event_table(Outbox(schema="shop"))
    assert (table.name, table.schema) == ("outbox_event", "shop")
    own = MetaData()
    assert event_table(OUTBOX, own).metadata is own
    assert table.metadata is not event_table(OUTBOX).metadata
