"""The store on MongoDB, by PyMongo's own asynchronous client."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.event import Event
from pillarbox.names import Names
from pillarbox.store import Features

try:
    from pillarbox.stores.mongo.database import MongoDatabase, Session
except ModuleNotFoundError as error:
    raise MissingExtra("MongoDB", "mongo") from error

from pillarbox.stores.mongo.documents import encoded
from pillarbox.stores.mongo.operations import OperationsPart
from pillarbox.stores.mongo.settling import SettlingSessions
from pillarbox.stores.mongo.wake import Watcher

__all__ = ["MongoStore"]

_EXAMPLE = "mongodb://user:password@host:27017/database?replicaSet=rs0"


def _where(url: str) -> tuple[str, str]:
    """The servers and the database; refuses a URL whose password would be taken for something else, and shown."""
    parts = urlsplit(url)
    database = unquote(parts.path.removeprefix("/"))
    hosts = parts.netloc.rpartition("@")[2]
    if "@" in parts.path + parts.fragment or ("@" in parts.query and "@" not in parts.netloc):
        raise ConfigError(
            f"the store URL has a password with unescaped characters; write {_EXAMPLE}, "
            "in a password @ as %40, / as %2F, # as %23 and ? as %3F"
        )
    if not hosts or not database or "/" in database:
        raise ConfigError(f"the store URL names no server or no database; write {_EXAMPLE}")
    return f"{parts.scheme} {hosts}/{database}", database


class MongoStore(OperationsPart):
    """An outbox in MongoDB 6.0 or newer: in a replica set, of one node too, with all that the contract promises.

    A standalone server has no transactions and no change streams: it works, and is told of in the log.
    schema: another database than the URL's. wake_up: False polls only.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "outbox",
        schema: str | None = None,
        shards: int = 16,
        wake_up: bool = True,
    ) -> None:
        where, database = _where(url)
        names = Names(prefix, schema)
        super().__init__(MongoDatabase(url, where, schema or database, names), names, shards=shards, description=where)
        self._announced = set()
        self._unanswered = {}
        self._settling = SettlingSessions(self._db)
        self._watcher = Watcher(self._db)
        self._wake_up = wake_up

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """``mongodb://user@host:27017/database?replicaSet=rs0``"""
        return cls(url, **options)

    @property
    def features(self) -> Features:
        """Known once the store is open."""
        return Features(wake_up=self._wake_up and self._db.replicated, transactions=self._db.replicated)

    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        await super().open()
        if on_wake is not None:  # by a relay
            self._db.warn()
            self._watcher.listen(on_wake)

    async def close(self) -> None:
        if self._opened <= 1:
            await self._watcher.close()
            self._settling.close()
        await super().close()

    async def doze(self, stream: str, worker: str, asleep: bool) -> None:
        if self.features.wake_up:
            await self._watcher.doze(stream, worker, asleep)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self._db.transaction()

    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        if not events:
            return
        documents = [encoded(event, self._shards) for event in events]
        if tx is not None:
            with self._db.errors():
                await self._db.collection("event").insert_many(documents, session=tx)
            return

        async def work(session: Session | None) -> None:
            await self._db.collection("event").insert_many(documents, session=session)

        await self._db.transact(work)
