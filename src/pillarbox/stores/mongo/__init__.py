"""The store on MongoDB, by PyMongo's asynchronous client."""

from collections.abc import Callable
from typing import Any, Self

from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.names import Names
from pillarbox.store import Features
from pillarbox.stores.composed import ComposedStore
from pillarbox.stores.outbox_info import OutboxInfo

try:
    from pillarbox.stores.mongo.database import MongoDatabase
except ModuleNotFoundError as error:
    raise MissingExtra("MongoDB", "mongo") from error

from pillarbox.stores.mongo.claims import MongoClaims
from pillarbox.stores.mongo.clients import Client, client_source
from pillarbox.stores.mongo.consumers import MongoConsumers
from pillarbox.stores.mongo.dead_letters import DeadLetters
from pillarbox.stores.mongo.examined import MongoExamined
from pillarbox.stores.mongo.gauges import MongoGauges
from pillarbox.stores.mongo.held_keys import HeldKeys
from pillarbox.stores.mongo.insights import MongoInsights
from pillarbox.stores.mongo.leases import Leases
from pillarbox.stores.mongo.marks import Marks
from pillarbox.stores.mongo.migration import MongoSchema
from pillarbox.stores.mongo.operator import MongoOperator
from pillarbox.stores.mongo.reentry import Reentry
from pillarbox.stores.mongo.retention import MongoRetention
from pillarbox.stores.mongo.serving import MongoServing
from pillarbox.stores.mongo.settling import SettlingSessions
from pillarbox.stores.mongo.turns import MongoTurns
from pillarbox.stores.mongo.wake import Watcher
from pillarbox.stores.mongo.writing import MongoWriting

__all__ = ["MongoStore"]


class MongoStore(ComposedStore):
    """An outbox in MongoDB 6.0 or newer. The full guarantees need a replica set, at least of one node.

    A standalone server has no transactions and no change streams: it works, and the log says what is weaker.
    url: ``mongodb://user@host:27017/database?replicaSet=rs0``, or the application's ``AsyncMongoClient``, which the
    application closes. schema: another database than the URL's. wake_up: False polls only.
    prefix: the first part of its collections' names. shards: of a new outbox; one that exists keeps its own number.
    """

    options = frozenset({"prefix", "schema", "shards", "wake_up"})

    def __init__(
        self,
        url: str | Client,
        *,
        prefix: str = "outbox",
        schema: str | None = None,
        shards: int = 16,
        wake_up: bool = True,
    ) -> None:
        source = client_source(url)
        place = schema or source.database
        if place is None:
            raise ConfigError(
                "the client names no database; pass one: MongoStore.of(client, database='shop'), "
                "or make the client with mongodb://host/database"
            )
        outbox = OutboxInfo(Names(prefix), shards=shards, description=f"{source.servers}/{place}")
        database = MongoDatabase(source, place, outbox)
        sessions = SettlingSessions(database)
        watcher = Watcher(database) if wake_up else None
        held_keys, dead_letters, reentry = HeldKeys(database), DeadLetters(database), Reentry(database)
        leases, consumers, insights = Leases(database, sessions), MongoConsumers(database), MongoInsights(database)
        super().__init__(
            database,
            outbox,
            serving=MongoServing(database, reentry, watcher),
            turns=MongoTurns(database, sessions, leases, Marks(database, leases), held_keys, dead_letters),
            claims=MongoClaims(database, dead_letters),
            consumers=consumers,
            retention=MongoRetention(database),
            operator=MongoOperator(database, held_keys, reentry, consumers),
            insights=insights,
            examined=MongoExamined(database),
            gauges=MongoGauges(database, insights),
            writing=MongoWriting(database),
            schema=MongoSchema(database),
        )
        self.database = database
        self._sessions = sessions
        self._watcher = watcher

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        return cls(url, **options)

    @classmethod
    def of(cls, client: Client, database: str | None = None, **options: Any) -> Self:
        """A store on the application's client, in the client's database or in this one."""
        return cls(client, **{"schema": database, **options})

    @property
    def features(self) -> Features:
        """Known once the store is open."""
        replicated = self.database.replicated
        return Features(wake_up=self._watcher is not None and replicated, transactions=replicated)

    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        await super().open()
        if on_wake is not None:
            self.database.warn()
            if self._watcher is not None:
                self._watcher.listen(on_wake)

    async def close(self) -> None:
        if self._opened <= 1:
            if self._watcher is not None:
                await self._watcher.close()
            self._sessions.close()
        await super().close()
