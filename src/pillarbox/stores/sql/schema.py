"""Migrations: numbered files, each run once, in a transaction that keeps other migrations out."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.resources import files
from typing import ClassVar, NamedTuple

from pillarbox.errors import SchemaError
from pillarbox.names import TABLES, Names
from pillarbox.stores._outbox import OutboxPart
from pillarbox.stores.sql.database import Connection, Database
from pillarbox.stores.sql.statements import SHARED, Dialect, Statement


class Migration(NamedTuple):
    """One file under ``migrations/<database>``; its statements are separated by blank lines."""

    number: int
    name: str
    statements: Sequence[str]


class SchemaPart(OutboxPart):
    """The part of a SQL store that knows its statements, its tables and their version."""

    dialect: ClassVar[Dialect]
    migrations: ClassVar[str]
    made_of = "tables"
    _db: Database

    def __init__(self, database: Database, names: Names, *, shards: int, description: str) -> None:
        super().__init__(names, shards=shards, description=description)
        self._db = database
        self._sql = {name: self._statement(template) for name, template in SHARED.items()}

    def _statement(self, template: str) -> Statement:
        return Statement(template, self.dialect, self._names.parts)

    def steps(self) -> Sequence[Migration]:
        """Every migration of this database, in order."""
        found = []
        folder = files("pillarbox.stores.sql") / "migrations" / self.migrations
        for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
            text = file.read_text().format(**self._names.parts, **self._migration_parts(), shards=self._shards)
            found.append(
                Migration(int(file.name[:4]), file.name, [part for part in text.split("\n\n") if part.strip()])
            )
        return found

    def _migration_parts(self) -> Mapping[str, str]:
        """What else the placeholders of a migration stand for."""
        return {}

    async def migrate(self) -> Sequence[str]:
        """Bring the schema to this release's version; the names of the steps that were run."""
        await self._db.open()
        run = []
        async with self._migrating() as tx:
            meta = await self._meta(tx)
            version = int(meta.get("schema_version", 0))
            self._refuse_a_newer(version)
            self._shards = int(meta.get("shards", self._shards))
            for step in self.steps():
                if step.number > version:
                    for statement in step.statements:
                        await tx.run(statement)
                    for name, value in (("schema_version", step.number), ("shards", self._shards)):
                        await tx.execute(self._sql["set_meta"], name=name, value=str(value))
                    run.append(step.name)
        return run

    async def remove(self) -> bool:
        """Drop the tables of this outbox with all that belongs to them, its events too; False: there was none.

        Let what uses it stop before. Refused are the tables of a newer release, for it may have made more than this one
        knows, and tables that are not an outbox's. Safe to call again; a new outbox of that name needs a new store.
        """
        await self._db.open()
        async with self._migrating() as tx:
            if not await self._has(tx, "meta"):
                return False
            meta = await self._meta(tx)
            if meta and "schema_version" not in meta:
                where = f"the table {self._names.parts['meta']} in {self.description}"
                raise SchemaError(f"{where} is not of an outbox; correct the prefix")
            self._refuse_a_newer(int(meta.get("schema_version", 0)))
            await self._drop(tx)
        return True

    async def _drop(self, tx: Connection) -> None:
        # The table that tells that there is an outbox goes last: a removal that was cut short is run again.
        for name in reversed(TABLES):
            if await self._has(tx, name):
                await tx.run(f"DROP TABLE {self._names.parts[name]}")

    async def prefixes(self) -> Sequence[str]:
        """What can be the prefix of an outbox in the same place: what stands before ``_meta`` in names of tables."""
        await self._db.open()
        rows = await self._db.fetch(self._sql["tables"], schema=self._names.schema)
        return sorted(name.removesuffix("_meta") for (name,) in rows if name.endswith("_meta"))

    async def server_version(self) -> str:
        """As the database says it."""
        return str((await self._db.fetch(self._sql["version"]))[0][0])

    def script(self, after: int = 0) -> str:
        """The migrations above this version as SQL, for those who run it by another tool."""
        meta = self._names.parts["meta"]
        lines = ["BEGIN"]
        for step in self.steps():
            if step.number > after:
                lines += step.statements
        lines.append(f"DELETE FROM {meta} WHERE name = 'schema_version'")
        lines.append(f"INSERT INTO {meta} (name, value) VALUES ('schema_version', '{self.steps()[-1].number}')")
        if not after:
            lines.append(f"INSERT INTO {meta} (name, value) VALUES ('shards', '{self._shards}')")
        return "".join(f"{line.strip()};\n" for line in [*lines, "COMMIT"])

    def _migrating(self) -> AbstractAsyncContextManager[Connection]:
        return self._db.transaction()

    async def _meta(self, connection: Connection) -> dict[str, str]:
        # Asked first: on some databases an error ends the transaction that it happens in.
        if not await connection.fetch(self._sql["has_meta"]):
            return {}
        return dict(await connection.fetch(self._sql["meta"]))

    async def _has(self, connection: Connection, name: str) -> bool:
        """Whether this table of the outbox exists."""
        parts = {**self._names.parts, "meta": self._names.parts[name]}
        return bool(await connection.fetch(Statement(SHARED["has_meta"], self.dialect, parts)))

    async def _version(self) -> int:
        meta = await self._meta(self._db)
        self._shards = int(meta.get("shards", self._shards))
        return int(meta.get("schema_version", 0))
