"""The store on SQLite, with nothing but the standard library."""

import sqlite3
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, Self

from pillarbox.errors import ConfigError
from pillarbox.names import Names
from pillarbox.sql.rows import converted
from pillarbox.sql.statements import Statements
from pillarbox.store import Grant, Settlement
from pillarbox.stores.outbox_info import OutboxInfo
from pillarbox.stores.sql import SHARED, SqlStore
from pillarbox.stores.sql.schema import SqlSchema
from pillarbox.stores.sql.turns import SqlTurns, joint_fence, reading
from pillarbox.stores.sqlite.database import SqliteDatabase, filled
from pillarbox.uuids import uuid_of_text


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(f"{text}+00:00")


ROWS: Final = converted(uuid_of_text, _instant)


async def _read(
    database: SqliteDatabase, sql: Statements, grants: Sequence[Grant], limit: int, inline: int
) -> Sequence[Any]:
    statement, values = reading(sql, grants, limit, inline)
    return await database.fetch_unless_known(tuple(grants), statement, **values)


async def _settle_joint(database: SqliteDatabase, sql: Statements, settlements: Sequence[Settlement]) -> bool:
    """Settle shards with one commit and one call into the thread: at everyday rates the calls cost most."""
    proof = joint_fence([settlement.grant for settlement in settlements])
    ids = [event.id for settlement in settlements for event in settlement.published]
    statement = sql["publish" if settlements[0].keep_published else "remove"]
    fence, publish = filled(sql["fence_joint"], proof), filled(statement, {"stream": proof["stream"], "ids": ids})

    def settle(connection: sqlite3.Connection) -> bool:
        ((ours,),) = connection.execute(*fence)
        if ours == len(settlements):
            connection.execute(*publish)
        return bool(ours == len(settlements))

    return await database.together(settle)


class SqliteStore(SqlStore):
    """An outbox in a SQLite file, in WAL mode; ``path`` may be ``:memory:``.

    prefix: the first part of its tables' names. shards: of a new outbox; one that exists keeps its own number.
    """

    options = frozenset({"prefix", "shards"})

    def __init__(self, path: str, *, prefix: str = "outbox", shards: int = 16) -> None:
        database = SqliteDatabase(path)
        names = Names(prefix)
        sql = Statements([SHARED, __package__], ":", names.parts)
        outbox = OutboxInfo(names, shards=shards, description=f"sqlite {path}")
        super().__init__(
            database,
            sql,
            outbox,
            ROWS,
            schema=SqlSchema(database, sql, outbox, "sqlite"),
            turns=SqlTurns(
                database,
                sql,
                ROWS,
                settle_joint=partial(_settle_joint, database, sql),
                read=partial(_read, database, sql),
            ),
        )

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """``sqlite:///relative.db`` or ``sqlite:////absolute.db``."""
        path = url.removeprefix("sqlite:///")
        if path == url or not path or "\0" in path:
            raise ConfigError(
                f"the store URL {url!r} names no file; write sqlite:///shop.db or sqlite:////path/shop.db"
            )
        return cls(path, **options)

    @classmethod
    def of(cls, engine: Any, **options: Any) -> Self:
        """In the file of an SQLAlchemy engine. The store opens its own connection: one of SQLite belongs to one
        thread."""
        path = engine.url.database
        if not path or path == ":memory:":
            raise ConfigError("a SQLite database in memory belongs to one connection; give the engine a file")
        return cls(path, **options)
