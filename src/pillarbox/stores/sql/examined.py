"""Whether the rights of a user suffice on SQL: each table is asked for what a relay does, and nothing is changed."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from pillarbox.errors import NotAllowed, StoreDown, StoreError
from pillarbox.finding import Finding, failed, ok
from pillarbox.sql.statements import Statements
from pillarbox.stores.sql.database import Database

# Each table of a relay with a column that anybody who may write it may set.
_WRITTEN: Final = {
    "event": "stream",
    "stream": "name",
    "worker": "stream",
    "lease": "stream",
    "held_key": "stream",
    "dead_letter": "stream",
}
_ADDED_TO: Final = {"audit": "stream"}
_PRUNED: Final = ("inbox", "idempotency")


class Server(Protocol):
    """The checks of one kind of server."""

    async def __call__(self, *, lease_seconds: float) -> Sequence[Finding]: ...


async def no_server(*, lease_seconds: float) -> Sequence[Finding]:
    """A database that is a file has no server."""
    return []


class SqlExamined:
    """The part that checks a server. server: the checks of one kind of server. written, read: tables and sequences that
    only this kind has, each table with a column."""

    def __init__(
        self, db: Database, sql: Statements, server: Server, written: Mapping[str, str], read: Sequence[str]
    ) -> None:
        self._db, self._sql, self._server, self._written, self._read = db, sql, server, written, read

    async def examine(self, lease_seconds: float) -> Sequence[Finding]:
        return [await self._rights(), *await self._server(lease_seconds=lease_seconds)]

    async def _rights(self) -> Finding:
        wanted = [
            (right, table, column) for table, column in {**_WRITTEN, **self._written}.items() for right in _RIGHTS
        ]
        wanted += [(right, table, column) for table, column in _ADDED_TO.items() for right in ("SELECT", "INSERT")]
        wanted += [(right, table, "") for table in _PRUNED for right in ("SELECT", "DELETE")]
        wanted += [("SELECT", name, "") for name in self._read]
        lacking: dict[str, list[str]] = {}
        for right, table, column in wanted:
            statement = self._sql.make(_RIGHTS[right].replace("TABLE", f"{{{table}}}").replace("COLUMN", column))
            try:
                await self._db.execute(statement)
            except NotAllowed:
                lacking.setdefault(table, []).append(right)
            except StoreDown:
                raise
            except StoreError:
                continue  # MariaDB asks first for columns without a default, after it has found the right
        if not lacking:
            return ok("rights", "this user may do all that a relay does")
        names = self._sql.tables
        said = "; ".join(f"{', '.join(rights)} on {names[table]}" for table, rights in lacking.items())
        return failed("rights", f"this user lacks {said}", "grant it to the user of the relay")


# No row has such a condition, so that nothing is changed; a server checks the rights before it looks.
_RIGHTS: Final = {
    "SELECT": "SELECT 1 FROM TABLE WHERE 1 = 0",
    "INSERT": "INSERT INTO TABLE (COLUMN) SELECT COLUMN FROM TABLE WHERE 1 = 0",
    "UPDATE": "UPDATE TABLE SET COLUMN = COLUMN WHERE 1 = 0",
    "DELETE": "DELETE FROM TABLE WHERE 1 = 0",
}
