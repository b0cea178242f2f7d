"""Every driver fulfils the contract, on its real database."""

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pillarbox import drivers
from pillarbox.conformance import DriverContract
from pillarbox.conformance.driver_setup import MakeApplication, Row, Shop, done
from pillarbox.drivers._sqlalchemy_async import SqlAlchemyAsync, SqlAlchemyAsyncSession
from pillarbox.drivers.aiosqlite import AioSqlite
from pillarbox.drivers.asyncmy import AsyncMy
from pillarbox.drivers.asyncpg import Asyncpg
from pillarbox.drivers.contract import Answer, Build, Driver, Steps
from pillarbox.drivers.django import Database, Django
from pillarbox.drivers.psycopg import Psycopg, PsycopgAsync
from pillarbox.drivers.psycopg2 import Psycopg2
from pillarbox.drivers.pymongo import Call, PyMongo, PyMongoAsync
from pillarbox.drivers.pymysql import PyMysql
from pillarbox.drivers.sqlalchemy import SqlAlchemy, SqlAlchemySession
from pillarbox.drivers.sqlite3 import Sqlite3
from servers import Postgres
from tests.drivers import applications
from tests.drivers.conftest import database_url
from tests.mongo_outbox import database_url as mongo_url


def made(kind: str, url: str) -> MakeApplication:
    return lambda: getattr(applications, kind)(url)


class TestSqlite3(DriverContract):
    drivers = (Sqlite3,)

    @pytest.fixture(params=["Sqlite3", "Sqlite3Cursor"])
    def application(self, request: pytest.FixtureRequest, tmp_path: Path) -> MakeApplication:
        return made(request.param, f"sqlite:///{tmp_path}/shop.db")


class TestAioSqlite(DriverContract):
    drivers = (AioSqlite,)

    @pytest.fixture
    def application(self, tmp_path: Path) -> MakeApplication:
        return made("AioSqlite", f"sqlite:///{tmp_path}/shop.db")


class TestPsycopg(DriverContract):
    drivers = (Psycopg, PsycopgAsync)

    @pytest.fixture(params=["Psycopg", "PsycopgAsync"])
    def application(self, request: pytest.FixtureRequest, postgres: Postgres) -> MakeApplication:
        return made(request.param, postgres.url)


class TestPsycopg2(DriverContract):
    drivers = (Psycopg2,)

    @pytest.fixture
    def application(self, postgres: Postgres) -> MakeApplication:
        return made("Psycopg2", postgres.url)


class TestAsyncpg(DriverContract):
    drivers = (Asyncpg,)

    @pytest.fixture
    def application(self, postgres: Postgres) -> MakeApplication:
        return made("Asyncpg", postgres.url)


class TestPyMysql(DriverContract):
    drivers = (PyMysql,)

    @pytest.fixture(params=["mysql", "mariadb"])
    def application(self, request: pytest.FixtureRequest) -> MakeApplication:
        return made("PyMysql", request.getfixturevalue(request.param).url)


class TestAsyncMy(DriverContract):
    drivers = (AsyncMy,)

    @pytest.fixture(params=["mysql", "mariadb"])
    def application(self, request: pytest.FixtureRequest) -> MakeApplication:
        return made("AsyncMy", request.getfixturevalue(request.param).url)


class TestSqlAlchemy(DriverContract):
    drivers = (SqlAlchemy, SqlAlchemyAsync, SqlAlchemySession, SqlAlchemyAsyncSession)

    @pytest.fixture(params=["sqlite", "postgres", "mysql"])
    def database(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        return database_url(request.param, request, tmp_path)

    @pytest.fixture(params=["SqlAlchemy", "SqlAlchemyAsync", "SqlAlchemySession", "SqlAlchemyAsyncSession"])
    def application(self, request: pytest.FixtureRequest, database: str) -> MakeApplication:
        return made(request.param, database)


class TestDjango(DriverContract):
    drivers = (Django, Database)

    @pytest.fixture(params=["sqlite", "postgres", "mysql", pytest.param("mariadb", marks=pytest.mark.long)])
    def application(self, request: pytest.FixtureRequest, tmp_path: Path) -> MakeApplication:
        return made("Django", database_url(request.param, request, tmp_path))


class TestPyMongo(DriverContract):
    """The statements of the tests as calls on collections."""

    drivers = (PyMongo, PyMongoAsync)
    has_tables = False

    @pytest.fixture(params=["PyMongo", "PyMongoAsync"])
    def application(self, request: pytest.FixtureRequest) -> MakeApplication:
        return made(request.param, mongo_url(request.getfixturevalue("mongo").url))

    def call(self, table: str, method: str, *arguments: Any) -> Build[Answer]:
        def steps(driver: Driver) -> Steps[Answer]:
            result = yield Call(None, table, method, arguments)
            if method == "find":
                rows = [(each["_id"], each.get("amount"), each.get("body")) for each in result]
                return Answer(rows, len(rows))
            counts = {"insert_many": "inserted_ids", "update_many": "modified_count", "delete_many": "deleted_count"}
            count = getattr(result, counts[method])
            return Answer((), len(count) if method == "insert_many" else count)

        return steps

    def create(self, table: str) -> Build[Answer]:
        return self.insert(table, Row(99))  # a collection that is made in a transaction is locked until its end

    async def write_own(self, shop: Shop) -> None:
        orders = shop.app.handle.client.get_default_database()[shop.table]
        await done(orders.insert_one({"_id": 0}, session=shop.app.handle))

    async def committed(self, shop: Shop) -> list[int]:
        return [number for number in await super().committed(shop) if number != 99]

    def drop(self, table: str) -> Build[Answer]:
        return self.call(table, "delete_many", {})

    def insert(self, table: str, *rows: Row) -> Build[Answer]:
        documents = [{"_id": row.number, **{name: getattr(row, name) for name in Row._fields[1:]}} for row in rows]
        return self.call(table, "insert_many", documents)

    def rows(self, table: str) -> Build[Answer]:
        return self.call(table, "find", {"_id": {"$lt": 99}})

    def equal(self, table: str, row: Row) -> Build[Answer]:
        return self.call(table, "find", {"_id": row.number, **{name: getattr(row, name) for name in Row._fields[1:]}})

    def pay(self, table: str, least: int) -> Build[Answer]:
        return self.call(table, "update_many", {"amount": {"$gte": least}}, {"$inc": {"amount": 1}})

    def pay_at_once(self, table: str) -> Build[Answer]:
        return self.pay(table, 0)

    def refused(self, table: str) -> Build[Answer]:
        return self.call(table, "update_many", {}, {"$nonsense": {"amount": 1}})


def test_every_driver_has_a_contract() -> None:
    files = [name for _, name, _ in pkgutil.iter_modules(drivers.__path__) if name[0] != "_"]
    modules = [
        import_module(f"pillarbox.drivers.{name}") for name in files if name not in ("awaiting", "contract", "registry")
    ]
    assert len(modules) >= 8
    tested: set[type[Driver]] = {
        each for name, test in globals().items() if name[:4] == "Test" for each in test.drivers
    }
    for module in modules:
        own = {each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__}
        found = {each for each in own if issubclass(each, Driver)}
        assert found, f"{module.__name__} has no driver"
        assert not found - tested, f"without a class Test...(DriverContract): {sorted(each.__name__ for each in found)}"
