"""The tables of an outbox on SQL: made, migrated and removed in a transaction that keeps other migrations out."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from pillarbox.errors import SchemaError
from pillarbox.names import TABLES
from pillarbox.sql.migrations import Migration, migrations, script
from pillarbox.sql.statements import Statements
from pillarbox.stores.identity import IDENTITY, check_identity, has_owners, new_identity
from pillarbox.stores.outbox_info import OutboxInfo, check_version, refuse_newer
from pillarbox.stores.sql.database import Connection, Database, NoDatabase

_AGGREGATE_INDEX: Final = "aggregate_index"


class SqlSchema:
    """The part that makes, migrates and removes the tables.

    folder: the database's folder of migrations. migrating: a transaction that no other migration enters.
    parts: more values for the placeholders of a migration. drop: statements that drop more than the tables."""

    def __init__(
        self,
        db: Database,
        sql: Statements,
        outbox: OutboxInfo,
        folder: str,
        *,
        migrating: Callable[[], AbstractAsyncContextManager[Connection]] | None = None,
        parts: Callable[[], Mapping[str, str]] = dict,
        drop: Sequence[str] = (),
    ) -> None:
        self._db, self._sql, self._outbox = db, sql, outbox
        self._folder, self._parts, self._also_drop = folder, parts, drop
        self._migrating = migrating or db.transaction

    def _steps(self) -> Sequence[Migration]:
        parts = {**self._outbox.names.parts, **self._parts(), "shards": self._outbox.shards}
        return migrations(self._folder, parts)

    @property
    def newest_version(self) -> int:
        return self._steps()[-1].number

    async def check(self) -> None:
        """Refuse an outbox of another release, and learn its number of shards."""
        meta = await self._meta(self._db)
        self._outbox.shards = int(meta.get("shards", self._outbox.shards))
        check_version(int(meta.get("schema_version", 0)), self.newest_version, str(self._outbox), "tables")

    async def migrate(self, *, aggregate_index: bool = False) -> Sequence[str]:
        await self._db.open(create=True)
        run = []
        async with self._migrating() as tx:
            meta = await self._meta(tx)
            version = int(meta.get("schema_version", 0))
            refuse_newer(version, self.newest_version, str(self._outbox))
            self._outbox.shards = int(meta.get("shards", self._outbox.shards))
            for step in self._steps():
                if step.number > version:
                    for statement in step.statements:
                        await tx.run(statement)
                    for name, value in (("schema_version", step.number), ("shards", self._outbox.shards)):
                        await tx.execute(self._sql["set_meta"], name=name, value=str(value))
                    run.append(step.name)
            schema = self._outbox.names.schema
            if aggregate_index and not await tx.fetch(self._sql["has_aggregate_index"], schema=schema):
                await tx.run(self._sql["create_aggregate_index"].text)
                run.append(_AGGREGATE_INDEX)
        return run

    def script(self, after: int = 0, *, aggregate_index: bool = False) -> str:
        steps = [step for step in self._steps() if step.number > after]
        lines = script(steps, self._outbox.names.parts["meta"], None if after else self._outbox.shards)
        if aggregate_index:
            lines.append(self._sql["create_aggregate_index"].text)
        return "".join(f"{line};\n" for line in ["BEGIN", *lines, "COMMIT"]) if lines else ""

    async def remove(self) -> bool:
        """Drop the tables of this outbox with all that belongs to them. False: there was none. Refuses tables that are
        not an outbox, and an outbox of a newer release, which may have more tables. Safe to call again; a new outbox of
        that name needs a new store."""
        try:
            await self._db.open()
        except NoDatabase:
            return False
        async with self._migrating() as tx:
            if not await self._has(tx, "meta"):
                return False
            meta = await self._meta(tx)
            if meta and "schema_version" not in meta:
                where = f"the table {self._outbox.names.parts['meta']} in {self._outbox.description}"
                raise SchemaError(f"{where} is not of an outbox; correct the prefix")
            refuse_newer(int(meta.get("schema_version", 0)), self.newest_version, str(self._outbox))
            # The table that marks an outbox goes last: an interrupted removal can be run again.
            for name in reversed(TABLES):
                if await self._has(tx, name):
                    await tx.run(f"DROP TABLE {self._outbox.names.parts[name]}")
            for text in self._also_drop:
                await tx.run(text)
        return True

    async def prefixes(self) -> Sequence[str]:
        await self._db.open()
        rows = await self._db.fetch(self._sql["tables"], schema=self._outbox.names.schema)
        return sorted(name.removesuffix("_meta") for (name,) in rows if name.endswith("_meta"))

    async def identity(self) -> str:
        async with self._migrating() as tx:
            meta = await self._meta(tx)
            if IDENTITY not in meta:
                meta[IDENTITY] = new_identity()
                await tx.execute(self._sql["set_meta"], name=IDENTITY, value=meta[IDENTITY])
            return meta[IDENTITY]

    async def set_identity(self, identity: str) -> None:
        check_identity(identity)
        async with self._migrating() as tx:
            if busy := await tx.fetch(self._sql["busy"]):
                raise has_owners(str(self._outbox), sorted(row[0] for row in busy))
            await tx.execute(self._sql["forget_batches"])
            await tx.execute(self._sql["set_meta"], name=IDENTITY, value=identity)

    async def server_version(self) -> str:
        return str((await self._db.fetch(self._sql["version"]))[0][0])

    async def _meta(self, connection: Connection) -> dict[str, str]:
        # Check first: on some databases an error ends the transaction.
        if not await self._has(connection, "meta"):
            return {}
        return dict(await connection.fetch(self._sql["meta"]))

    async def _has(self, connection: Connection, name: str) -> bool:
        return bool(await connection.fetch(self._sql["has_table"], table=self._outbox.names.parts[name]))
