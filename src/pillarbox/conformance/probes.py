"""Direct access to an outbox for tests: read it, move its instants, cut its connection."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, Protocol, overload

import pytest

from pillarbox.errors import StoreDown
from pillarbox.event import Event
from pillarbox.ids import uuid7
from pillarbox.store import Store
from pillarbox.stores.sql import SqlStore

_LATER: Final = {
    "postgres": "now() + {} * interval '1 second'",
    "mysql": "UTC_TIMESTAMP(6) + INTERVAL {} SECOND",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', {} || ' seconds')",
}
# All names in the database's catalog.
_CATALOGS: Final = {
    "postgres": "SELECT relname FROM pg_class UNION ALL SELECT proname FROM pg_proc UNION ALL "
    "SELECT tgname FROM pg_trigger UNION ALL SELECT typname FROM pg_type",
    "mysql": "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()",
    "sqlite": "SELECT name FROM sqlite_master UNION ALL SELECT name FROM sqlite_sequence",
}


class Probe(Protocol):
    """One outbox of any database. The store may be closed: a probe opens the database when it needs it."""

    @property
    def prefix(self) -> str: ...

    @property
    def url(self) -> str:
        """The URL with its secrets, for another process."""
        ...

    async def made(self) -> set[str]:
        """The names in the database that start with this outbox's prefix."""
        ...

    async def set_schema_version(self, version: int) -> None:
        """Make the outbox look as if another release had migrated it."""

    async def move(self, name: str, instant: str, seconds: float, **where: Any) -> None:
        """Set an instant to ``seconds`` from now, in the rows with these values."""

    async def owners(self, stream: str) -> Mapping[str | None, int]:
        """The number of shards of each worker."""
        ...

    async def damage(self, event: Event, how: str) -> None:
        """Write a value into this event past the outbox: see ``StoreContract.damage``."""

    async def remember(self, table: str, count: int) -> None:
        """Write rows of the inbox or idempotency keys: see ``StoreContract.remember``."""

    def cut(self, patch: pytest.MonkeyPatch) -> None:
        """Until ``patch.undo()`` this store reaches nothing, as if its machine were off the network."""


class SqlProbe:
    """A probe with methods for SQL. In a text {event} is a table and :name a parameter.

    ``statements`` are the store's own, by name: change one to plant a bug. ``tables`` are the names of its tables."""

    def __init__(self, store: SqlStore) -> None:
        self._database = store.database
        self.statements = store.statements
        self.tables = store.outbox.names.parts
        self.prefix = store.outbox.names.prefix
        self.url = store.database.url
        self._kind = next(kind for kind in _LATER if kind in type(store.database).__module__)

    async def query(self, text: str, **values: Any) -> list[Any]:
        await self._database.open(create=True)
        return [tuple(row) for row in await self._database.fetch(self.statements.make(text), **values)]

    async def execute(self, text: str, **values: Any) -> int:
        """Run a statement; returns the number of changed rows."""
        await self._database.open(create=True)
        return await self._database.execute(self.statements.make(text), **values)

    async def run(self, text: str) -> None:
        """Run a text without parameters."""
        await self._database.open(create=True)
        await self._database.run(text)

    def later(self, seconds: str) -> str:
        """The SQL for the database's time plus ``seconds``, a number or a parameter."""
        return _LATER[self._kind].format(seconds)

    async def move(self, name: str, instant: str, seconds: float, **where: Any) -> None:
        chosen = " AND ".join(["1 = 1", *(f"t.{column} = :{column}" for column in where)])
        text = f"UPDATE {{{name}}} AS t SET {instant} = {self.later(':seconds')} WHERE {chosen}"
        await self.execute(text, seconds=seconds, **where)

    async def owners(self, stream: str) -> Mapping[str | None, int]:
        text = "SELECT owner, count(*) FROM {lease} WHERE stream = :stream GROUP BY owner"
        return dict(await self.query(text, stream=stream))

    async def set_schema_version(self, version: int) -> None:
        await self._database.execute(self.statements["set_meta"], name="schema_version", value=str(version))

    async def damage(self, event: Event, how: str) -> None:
        value = {"headers": '{"number": 7}', "attempts": 2**31 - 1}[how]
        text = f"UPDATE {{event}} SET {how} = :value WHERE id = :id AND stream = :stream"
        assert await self.execute(text, value=value, id=event.id, stream=event.stream) == 1

    async def remember(self, table: str, count: int) -> None:
        for number in range(count):
            if table == "inbox":
                text = "INSERT INTO {inbox} (consumer, event_id) VALUES (:consumer, :id)"
                await self.execute(text, consumer=f"consumer {number % 2}", id=uuid7())
            else:
                text = "INSERT INTO {idempotency} (id, fingerprint, status) VALUES (:id, :id, :status)"
                await self.execute(text, id=sha256(uuid7().bytes).digest(), status=200 if number % 2 else None)

    async def made(self) -> set[str]:
        rows = await self.query(_CATALOGS[self._kind])
        return {name for (name,) in rows if name.startswith((f"{self.prefix}_", f"_{self.prefix}_"))}

    def cut(self, patch: pytest.MonkeyPatch) -> None:
        def unreachable(*_: Any, **__: Any) -> Any:
            raise StoreDown("cut off")

        for name in (
            "fetch",
            "fetch_unless_known",
            "execute",
            "execute_many",
            "run",
            "transaction",
            "transact",
            "together",
        ):
            patch.setattr(self._database, name, unreachable, raising=False)


@overload
def probe_of(store: SqlStore) -> SqlProbe: ...


@overload
def probe_of(store: Store) -> Probe: ...


def probe_of(store: Any) -> Any:
    """The probe for this store's database."""
    if isinstance(store, SqlStore):
        return SqlProbe(store)
    from pillarbox.conformance.mongo_probe import MongoProbe  # its driver is an extra

    return MongoProbe(store)
