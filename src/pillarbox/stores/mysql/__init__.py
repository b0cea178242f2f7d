"""The store on MySQL and MariaDB, by asyncmy."""

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Self
from urllib.parse import urlsplit

from pillarbox.errors import StoreDown
from pillarbox.names import Names
from pillarbox.sql.rows import converted
from pillarbox.sql.statements import Statements
from pillarbox.store import Settlement
from pillarbox.stores.mysql.database import MysqlDatabase
from pillarbox.stores.mysql.examined import examine_server
from pillarbox.stores.mysql.url import connect_settings, url_of_engine
from pillarbox.stores.outbox_info import OutboxInfo
from pillarbox.stores.sql import SHARED, Connection, SqlStore
from pillarbox.stores.sql.schema import SqlSchema
from pillarbox.stores.sql.turns import SqlTurns, fence, ids_of, joint_publishing
from pillarbox.uuids import uuid_of

_MIGRATION_SECONDS: Final = 60


def _instant(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC)


ROWS: Final = converted(uuid_of, _instant)


async def _settle_published(database: MysqlDatabase, sql: Statements, settlement: Settlement) -> bool:
    """Settle in one packet: a relay that freezes half way would keep the lease's row, and the shard."""
    statement = sql["publish_fenced" if settlement.keep_published else "delete_fenced"]
    ((ours,),) = await database.together(statement, **fence(settlement.grant), ids=ids_of(settlement.published))
    return bool(ours)


async def _settle_joint(database: MysqlDatabase, sql: Statements, settlements: Sequence[Settlement]) -> bool:
    """Settle several shards in one packet."""
    statement, values = joint_publishing(sql, settlements)
    ((ours,),) = await database.together(statement, **values, count=len(settlements))
    return bool(ours == len(settlements))


@asynccontextmanager
async def _migrating(database: MysqlDatabase, sql: Statements, lock: str) -> AsyncIterator[Connection]:
    # Not a transaction: MySQL commits every change of a schema by itself.
    async with database.alone() as one:
        ((is_mine,),) = await one.fetch(sql["lock_migration"], name=lock, seconds=_MIGRATION_SECONDS)
        if not is_mine:
            raise StoreDown(f"{database.name}: another migration runs for more than {_MIGRATION_SECONDS} s")
        try:
            yield one
        finally:
            await one.fetch(sql["unlock_migration"], name=lock)


class MysqlStore(SqlStore):
    """An outbox in MySQL 8.0.17 or newer, or MariaDB 10.6 or newer; relays look for events by polling.

    url: ``mysql://user:password@host:3306/database``, each part percent-encoded; ``?ssl=true`` asks for TLS,
    ``?ssl_ca=file`` checks the server's certificate, ``?ssl_cert=file&ssl_key=file`` is the client's own, and
    ``?unix_socket=file`` needs no host. pool_size: connections at the most. prefix: the first part of its tables'
    names. shards: of a new outbox; one that exists keeps its own number.
    """

    options = frozenset({"prefix", "shards", "pool_size"})

    def __init__(self, url: str, *, prefix: str = "outbox", shards: int = 16, pool_size: int = 10) -> None:
        settings = connect_settings(url)
        where = f"{urlsplit(url).scheme} {settings['host']}:{settings['port']}/{settings['database']}"
        database = MysqlDatabase(url, where, pool_size=pool_size)
        names = Names(prefix)
        sql = Statements([SHARED, __package__], "%s", names.parts)
        outbox = OutboxInfo(names, shards=shards, description=where)
        place = f"{settings['database']}.{names.parts['meta']}"
        # A lock's name is shared by the whole server and has at most 64 characters.
        lock = "pillarbox." + hashlib.sha256(place.encode()).hexdigest()[:40]
        super().__init__(
            database,
            sql,
            outbox,
            ROWS,
            schema=SqlSchema(
                database,
                sql,
                outbox,
                "mysql",
                migrating=partial(_migrating, database, sql, lock),
                parts=lambda: {"collation": database.collation},
            ),
            turns=SqlTurns(
                database,
                sql,
                ROWS,
                settle_joint=partial(_settle_joint, database, sql),
                settle_published=partial(_settle_published, database, sql),
            ),
            server=partial(examine_server, database, sql, pool_size=pool_size),
        )

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """``mysql://user:password@host:3306/database``, or ``mariadb://``"""
        return cls(url, **options)

    @classmethod
    def of(cls, engine: Any, **options: Any) -> Self:
        """In the database of an SQLAlchemy engine. The store opens its own connections from the engine's URL, because
        it needs its own session settings."""
        return cls(url_of_engine(engine), **options)
