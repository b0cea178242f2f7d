"""What a database server spends: its CPU time and the statements of its clients."""

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pymysql

from benchmarks.bed import Bed, BenchMongo
from servers import MySQL, Postgres

# Calls of each statement that a client sent; a statement of a trigger is not one.
_CALLS = """SELECT query, calls FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid
    WHERE d.datname LIKE 'everyday%'"""


class Database(ABC):
    """A server, or SQLite, on which each round gets a new database."""

    @contextmanager
    def new(self) -> Iterator[str]:
        """The URL of an empty database, which is dropped at the end of the block."""
        name = f"everyday_{uuid.uuid4().hex[:8]}"
        try:
            yield self.create(name)
        finally:
            self.drop(name)

    @abstractmethod
    def create(self, name: str) -> str: ...

    @abstractmethod
    def drop(self, name: str) -> None: ...

    @abstractmethod
    def cpu_seconds(self) -> float | None:
        """Of the server so far; None: there is no server."""

    @abstractmethod
    def statements(self) -> Counter[str] | None:
        """Of all clients so far, by kind; None: there is no server that counts them."""


def kind_of(query: str) -> str:
    """The first word of a statement."""
    return query.split(None, 1)[0].rstrip(";").upper()


class OnPostgres(Database):
    def __init__(self, server: Postgres) -> None:
        self._server = server
        asyncio.run(self._ask("CREATE EXTENSION IF NOT EXISTS pg_stat_statements"))

    def create(self, name: str) -> str:
        asyncio.run(self._ask(f"CREATE DATABASE {name}"))
        return self._server.url.removesuffix("/postgres") + f"/{name}"

    def drop(self, name: str) -> None:
        asyncio.run(self._ask(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))

    def cpu_seconds(self) -> float:
        return self._server.cpu_seconds()

    def statements(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for query, calls in asyncio.run(self._ask(_CALLS)):
            found[kind_of(query)] += calls
        return found

    async def _ask(self, query: str) -> list[Any]:
        connection = await asyncpg.connect(self._server.url)
        try:
            return list(await connection.fetch(query))
        finally:
            await connection.close()


def mysql_statements(status: Mapping[str, int]) -> Counter[str]:
    """From the counters of the server. A prepared statement is counted as itself and as ``stmt_execute``."""
    kinds = {name.removeprefix("Com_"): value for name, value in status.items() if name.startswith("Com_")}
    return Counter({kind: value for kind, value in kinds.items() if not kind.startswith("stmt_")})


class OnMysql(Database):
    def __init__(self, server: MySQL) -> None:
        self._server = server

    def create(self, name: str) -> str:
        self._ask(f"CREATE DATABASE {name}")
        return self._server.url.removesuffix("/test") + f"/{name}"

    def drop(self, name: str) -> None:
        self._ask(f"DROP DATABASE IF EXISTS {name}")

    def cpu_seconds(self) -> float:
        return self._server.cpu_seconds()

    def statements(self) -> Counter[str]:
        return mysql_statements({name: int(value) for name, value in self._ask("SHOW GLOBAL STATUS LIKE 'Com\\_%'")})

    def _ask(self, query: str) -> list[Any]:
        parts = urlsplit(self._server.url)
        connection = pymysql.connect(host=parts.hostname, port=parts.port or 0, user=parts.username)
        with closing(connection), connection.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())


def mongo_statements(commands: Mapping[str, Any]) -> Counter[str]:
    """From ``metrics.commands`` of ``serverStatus``; commands that no version knows are a plain number there."""
    return Counter({name: int(value["total"]) for name, value in commands.items() if isinstance(value, Mapping)})


class OnMongo(Database):
    def __init__(self, server: BenchMongo) -> None:
        self._server = server

    def create(self, name: str) -> str:
        return self._server.url.replace("/bench?", f"/{name}?")

    def drop(self, name: str) -> None:
        from pymongo import MongoClient

        with MongoClient[dict[str, Any]](self._server.address, directConnection=True) as client:
            client.drop_database(name)

    def cpu_seconds(self) -> float:
        return self._server.cpu_seconds()

    def statements(self) -> Counter[str]:
        return mongo_statements(self._server.admin({"serverStatus": 1})["metrics"]["commands"])


class OnSqlite(Database):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, name: str) -> str:
        return f"sqlite:///{self._folder / name}.db"

    def drop(self, name: str) -> None:
        for file in self._folder.glob(f"{name}.db*"):
            file.unlink()

    def cpu_seconds(self) -> None:
        return None

    def statements(self) -> None:
        return None


STORES = ("postgres", "mysql", "mongo", "sqlite")


def database(bed: Bed, store: str) -> Database:
    if store == "postgres":
        return OnPostgres(bed.counting_postgres)
    if store == "mysql":
        return OnMysql(bed.mysql)
    return OnMongo(bed.mongo) if store == "mongo" else OnSqlite(bed.folder)
