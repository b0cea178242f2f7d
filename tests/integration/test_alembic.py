"""The operations for an application's own Alembic migrations, on each database, by plain and by async engines."""

import io
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.util import CommandError
from sqlalchemy import Column, Connection, Integer, MetaData, Table, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox import Outbox
from pillarbox.alembic import drop_outbox, migrate_outbox, without_outbox
from pillarbox.conformance.probes import probe_of
from pillarbox.errors import SchemaError
from pillarbox.sql.migrations import migrations
from pillarbox.stores.sql import SqlStore
from pillarbox.urls import store_from_url

T = TypeVar("T")

ENGINES = [
    ("sqlite", "sqlite"),
    ("sqlite", "sqlite+aiosqlite"),
    ("postgres", "postgresql+psycopg"),
    ("postgres", "postgresql+psycopg2"),
    ("postgres", "postgresql+asyncpg"),
    ("mysql", "mysql+pymysql"),
    ("mysql", "mysql+asyncmy"),
    ("mariadb", "mysql+pymysql"),
]


class Project:
    """An application with an outbox of its own prefix; ``run`` is what an ``env.py`` does."""

    def __init__(self, url: str, scheme: str, database: str) -> None:
        self.url, self.database = url, database
        self.prefix = f"alembic_{os.getpid()}" if url.startswith(("postgresql", "mysql")) else "outbox"
        engine_url = scheme + url[url.index(":") :]
        self.engine: Any = (
            create_async_engine(engine_url)
            if scheme.endswith(("asyncpg", "aiosqlite", "asyncmy"))
            else create_engine(engine_url)
        )

    async def run(self, work: Callable[[MigrationContext], T], **opts: Any) -> T:
        def configured(connection: Connection) -> T:
            context = MigrationContext.configure(connection, opts=opts)
            with context.begin_transaction():
                return work(context)

        if isinstance(self.engine, AsyncEngine):
            async with self.engine.begin() as connection:
                return await connection.run_sync(configured)
        with self.engine.begin() as connection:
            return configured(connection)

    async def migrate(self, version: int = 1, **options: Any) -> None:
        await self.run(lambda context: migrate_outbox(Operations(context), version, prefix=self.prefix, **options))

    async def drop(self, **options: Any) -> None:
        await self.run(lambda context: drop_outbox(Operations(context), prefix=self.prefix, **options))

    def store(self) -> SqlStore:
        store = store_from_url(self.url, prefix=self.prefix)
        assert isinstance(store, SqlStore)
        return store


@pytest_asyncio.fixture(params=ENGINES, ids=[f"{database}-{scheme}" for database, scheme in ENGINES])
async def project(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Project]:
    database, scheme = request.param
    url = f"sqlite:///{tmp_path}/shop.db" if database == "sqlite" else request.getfixturevalue(database).url
    made = Project(url, scheme, database)
    yield made
    store = made.store()
    await store.remove()
    await store.close()
    if isinstance(made.engine, AsyncEngine):
        await made.engine.dispose()
    else:
        made.engine.dispose()


@pytest.mark.asyncio
async def test_an_outbox_comes_and_goes_with_a_migration(project: Project) -> None:
    await project.migrate(shards=8)
    store = project.store()
    await store.open()
    assert store.shards == 8
    assert await store.migrate() == [], "Alembic has made all that `pillarbox migrate` makes"
    await store.add([Outbox(prefix=project.prefix).event("order.created", {"id": 1})])

    own = MetaData()
    Table("alembic_orders", own, Column("id", Integer, primary_key=True))
    include = without_outbox(
        lambda name, type_, _: type_ != "table" or not str(name).startswith("other"), prefix=project.prefix
    )
    changes = await project.run(lambda context: compare_metadata(context, own), include_name=include)
    assert [change[0] for change in changes if project.prefix in str(change)] == []
    assert "add_table" in [change[0] for change in changes]

    with pytest.raises(SchemaError, match="is there already, with version 1"):
        await project.migrate()
    with pytest.raises(SchemaError, match="events wait in the outbox"):
        await project.drop()
    await project.drop(pending=True)
    with pytest.raises(SchemaError, match="to drop; correct the prefix"):
        await project.drop()
    await store.close()
    store = project.store()
    assert project.prefix not in await store.prefixes()
    await store.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "project", [ENGINES[2], ENGINES[5], ENGINES[7]], indirect=True, ids=["postgres", "mysql", "mariadb"]
)
async def test_a_printed_migration_makes_an_outbox(project: Project) -> None:
    written = io.StringIO()
    context = MigrationContext.configure(
        dialect_name=project.engine.dialect.name, opts={"as_sql": True, "output_buffer": written}
    )
    # `alembic --sql` takes it from the URL.
    vars(context.dialect)["is_mariadb"] = project.database == "mariadb"
    migrate_outbox(Operations(context), 1, prefix=project.prefix)
    store = project.store()
    await probe_of(store).run(written.getvalue())
    await store.open()
    await store.close()


@pytest.fixture
def lite(tmp_path: Path) -> Project:
    return Project(f"sqlite:///{tmp_path}/shop.db", "sqlite", "sqlite")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("version", "options", "remedy"),
    [
        (2, {}, "this release has the versions 1 to 1"),
        (1, {"after": 1}, "version has to be above after"),
        (1, {"schema": "shop"}, "schema is for PostgreSQL"),
        (1, {"shards": 0}, "use 1 to 1024"),
    ],
)
async def test_a_wrong_migration_is_refused(lite: Project, version: int, options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(CommandError, match=remedy):  # which `alembic` prints as one line
        await lite.migrate(version, **options)
    lite.engine.dispose()


@pytest.mark.asyncio
async def test_a_migration_out_of_order_is_refused(lite: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a release with a second version."""
    monkeypatch.setattr(
        "pillarbox.alembic.migrations",
        lambda *args: [*migrations(*args), migrations(*args)[0]._replace(number=2, statements=[])],
    )
    with pytest.raises(SchemaError, match=r"from version 1 on, and it has version 0; put the migrations in order"):
        await lite.migrate(2, after=1)
    await lite.migrate()
    await lite.migrate(2, after=1)
    lite.engine.dispose()


@pytest.mark.asyncio
@pytest.mark.parametrize("project", [("postgres", "postgresql+psycopg")], indirect=True, ids=["postgres"])
async def test_a_migration_in_autocommit_is_refused(project: Project) -> None:
    project.engine = project.engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(SchemaError, match="half of the tables; use an engine without"):
        await project.migrate()
