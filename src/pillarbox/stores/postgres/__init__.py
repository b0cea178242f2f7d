"""The store on PostgreSQL, by asyncpg."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from pillarbox.names import Names
from pillarbox.sql.rows import PLAIN
from pillarbox.sql.statements import Statements
from pillarbox.store import Features
from pillarbox.stores.outbox_info import OutboxInfo
from pillarbox.stores.postgres.connections import source_of
from pillarbox.stores.postgres.database import PostgresDatabase
from pillarbox.stores.postgres.examined import examine_server
from pillarbox.stores.postgres.floors import Floors
from pillarbox.stores.postgres.listener import PostgresListener
from pillarbox.stores.postgres.parts import (
    PostgresClaims,
    PostgresRetention,
    PostgresServing,
    PostgresTurns,
    migrating,
)
from pillarbox.stores.sql import SHARED, SqlStore
from pillarbox.stores.sql.schema import SqlSchema

log = logging.getLogger("pillarbox.stores.postgres")


class PostgresStore(SqlStore):
    """An outbox in PostgreSQL 15 or newer.

    prefix, schema: where its tables are. shards: of a new outbox; one that exists keeps its own number.
    listen_url: for LISTEN if ``url`` leads to a pooler in transaction mode; default: ``url``.
    wake_up: False polls only. pool_size: connections at the most, beside the one that listens.
    statement_cache: 0 behind a pooler that does not keep prepared statements.
    """

    options = frozenset({"prefix", "schema", "shards", "wake_up", "listen_url", "pool_size", "statement_cache"})

    def __init__(
        self,
        url: Any,
        *,
        prefix: str = "outbox",
        schema: str | None = None,
        shards: int = 16,
        wake_up: bool = True,
        listen_url: str | None = None,
        pool_size: int = 10,
        statement_cache: int = 256,
    ) -> None:
        source = source_of(url, listen_url, pool_size=pool_size, statement_cache=statement_cache)
        database = PostgresDatabase(source.connections, source.where, source.url)
        names = Names(prefix, schema)
        sql = Statements([SHARED, __package__], "$", names.parts)
        outbox = OutboxInfo(names, shards=shards, description=source.where)
        if wake_up and source.listen is None:
            log.warning(
                "%s: this pool does not say how to connect for LISTEN, so the relay polls; pass listen_url",
                source.where,
                extra={"action": "listen_impossible"},
            )
        self._listener = None
        if wake_up and source.listen is not None:
            self._listener = PostgresListener(source.listen, source.where, names.parts["channel"])
        self.features = Features(wake_up=self._listener is not None)
        floors = Floors()
        super().__init__(
            database,
            sql,
            outbox,
            PLAIN,
            schema=SqlSchema(
                database,
                sql,
                outbox,
                "postgres",
                migrating=partial(migrating, database, sql, names),
                drop=[f"DROP FUNCTION IF EXISTS {names.parts['wake']}()"],
            ),
            serving=PostgresServing(database, sql, outbox, floors, wake_up=self.features.wake_up),
            turns=PostgresTurns(database, sql, floors),
            claims=PostgresClaims(database, sql),
            retention=PostgresRetention(database, sql),
            written={"sleeper": "stream"},
            read=["event_seq"],
            server=partial(
                examine_server,
                database,
                sql,
                pool_size=pool_size,
                listens=self.features.wake_up,
                direct_listen=listen_url is not None,
            ),
        )

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """``postgresql://user@host:5432/database``"""
        return cls(url, **options)

    @classmethod
    def of(cls, handle: Any, **options: Any) -> Self:
        """On an asyncpg pool or an SQLAlchemy engine of the application. The application closes it.

        Connections of an asyncpg pool, and of an ``AsyncEngine`` on asyncpg, are shared. An engine on another driver
        gives its URL only. Connections must keep asyncpg's own types for uuid, bytea and timestamptz."""
        return cls(handle, **options)

    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        await super().open()
        if self._listener is not None and on_wake is not None:
            self._listener.start(on_wake)

    async def close(self) -> None:
        if self._listener is not None and self._opened <= 1:
            await self._listener.stop()
        await super().close()
