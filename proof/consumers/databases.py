"""The databases of consumers: their servers, the effects of handlers, and what is left at the end."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from pillarbox.event import Event
from pillarbox.store import Ref, Store
from pillarbox.urls import store_from_url
from proof.consumers.history import Applied, Letter

T = TypeVar("T")
CONSUMER = "proof"


class Database(ABC):
    """A database for effects, the inbox and dead letters."""

    name: ClassVar[str]

    def __init__(self, server: Any, url: str) -> None:
        self.server = server
        self.url = url

    def ask(self, work: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` on a store of its own, as an operator would."""

        async def run() -> T:
            store = store_from_url(self.url)
            await store.open()
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(run())

    def prepare(self) -> None:
        async def migrate() -> None:
            store = store_from_url(self.url)
            await store.migrate()
            await store.close()

        asyncio.run(migrate())
        self._make()

    def letters(self) -> list[Letter]:
        async def find(store: Store) -> list[Letter]:
            from pillarbox.store import Filter

            found: list[Letter] = []
            after = 0
            while page := await store.find_dead(Filter(consumer=CONSUMER), 500, after):
                found += [
                    Letter(str(each.event.id), each.event.attempts, each.last_error or "", each.replay_at is not None)
                    for each in page
                ]
                after = page[-1].event.seq
            return found

        return self.ask(find)

    def replay(self, limit: int) -> int:
        """Give some dead letters another run."""

        async def act(store: Store) -> int:
            letters = await store.dead_letters(limit=limit, consumer=CONSUMER)
            return await store.replay([Ref(each.event.id, each.event.stream, CONSUMER) for each in letters], "proof")

        return self.ask(act)

    def close(self) -> None:
        self.server.close()

    @abstractmethod
    def _make(self) -> None:
        """Make the table of effects."""

    @abstractmethod
    def cut_sessions(self) -> None: ...

    @abstractmethod
    def effects(self) -> Iterator[Applied]:
        """In the order in which the handlers wrote them."""

    @abstractmethod
    def inbox(self) -> Sequence[str]: ...

    @abstractmethod
    def version(self) -> str: ...


class PostgresDatabase(Database):
    """PostgreSQL. An identity numbers the effects."""

    name = "postgres"

    def _query(self, text: str) -> list[Any]:
        import psycopg

        with psycopg.connect(self.url, connect_timeout=5, autocommit=True) as connection:
            cursor = connection.execute(text)
            return cursor.fetchall() if cursor.description else []

    def _make(self) -> None:
        self._query(
            "CREATE TABLE proof_effect (seq bigint GENERATED ALWAYS AS IDENTITY, event_id text, k text, n integer)"
        )

    def cut_sessions(self) -> None:
        self._query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    def effects(self) -> Iterator[Applied]:
        for row in self._query("SELECT event_id, k, n FROM proof_effect ORDER BY seq"):
            yield Applied(*row)

    def inbox(self) -> Sequence[str]:
        return [str(row[0]) for row in self._query("SELECT event_id FROM outbox_inbox")]

    def version(self) -> str:
        return f"PostgreSQL {self._query('SHOW server_version')[0][0]}"


class MongoDatabase(Database):
    """MongoDB. The server's cluster time numbers the effects."""

    name = "mongo"

    def __init__(self, server: Any, url: str) -> None:
        from bson.binary import UuidRepresentation
        from bson.codec_options import CodecOptions
        from pymongo import MongoClient

        super().__init__(server, url)
        self._client: Any = MongoClient(url, timeoutMS=10_000)
        codec: Any = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
        self._database = self._client.get_default_database(codec_options=codec)

    def _make(self) -> None:
        self._database.create_collection("proof_effect")

    def close(self) -> None:
        self._client.close()
        super().close()

    def cut_sessions(self) -> None:
        self._client.admin.command("killAllSessions", [])

    def effects(self) -> Iterator[Applied]:
        for row in self._database["proof_effect"].find(sort=[("seq", 1)]):
            yield Applied(row["event_id"], row["k"], row["n"])

    def inbox(self) -> Sequence[str]:
        return [str(row["_id"]["event_id"]) for row in self._database["outbox_inbox"].find({}, {"_id": 1})]

    def version(self) -> str:
        return f"MongoDB {self._client.server_info()['version']}"


def start(name: str) -> Database:
    """Start a server of this kind."""
    from servers import Mongo, Postgres

    if name == "postgres":
        server: Any = Postgres(settings={"max_connections": "200"}).start()
        return PostgresDatabase(server, server.url)
    # MongoDB keeps the transaction of a process that was killed until this limit, and the events in it wait so long.
    server = Mongo(settings={"transactionLifetimeLimitSeconds": "5"}).start()
    return MongoDatabase(server, str(server.url.replace("/?", "/proof?")))


NAMES = ("postgres", "mongo")


def handle_of(name: str, url: str) -> Any:
    """What begins the transactions of handlers, in a consumer's process."""
    if name == "postgres":
        from sqlalchemy.ext.asyncio import create_async_engine

        return create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=20, max_overflow=20)
    from pymongo import AsyncMongoClient

    return AsyncMongoClient(url, timeoutMS=20_000)


async def write_effect(name: str, tx: Any, event: Event) -> None:
    """Write the effect of an event in the transaction of its handler. Nothing keeps it from being there twice."""
    n = int(event.headers["n"])
    if name == "postgres":
        from sqlalchemy import text

        values = {"id": str(event.id), "k": event.key, "n": n}
        await tx.execute(text("INSERT INTO proof_effect (event_id, k, n) VALUES (:id, :k, :n)"), values)
        return
    from bson import Timestamp

    row = {"seq": Timestamp(0, 0), "event_id": str(event.id), "k": event.key, "n": n}
    await tx.client.get_default_database()["proof_effect"].insert_one(row, session=tx)
