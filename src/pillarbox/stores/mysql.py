"""The store on MySQL and MariaDB, by asyncmy."""

import hashlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final, Self
from urllib.parse import urlsplit
from uuid import UUID

from pillarbox.errors import StoreDown
from pillarbox.event import NO_HEADERS, Event, Status
from pillarbox.store import Claim, Grant, Rescued, Settlement
from pillarbox.stores._mysql_dialect import DIALECT
from pillarbox.stores._mysql_driver import MysqlDatabase, again
from pillarbox.stores._mysql_url import connect_settings
from pillarbox.stores._outbox import lost
from pillarbox.stores._uuids import uuid_of
from pillarbox.stores.sql import Connection, Names, SqlStore
from pillarbox.stores.sql.ordered import fence
from pillarbox.stores.sql.rows import CREATED_AT, HEADERS, ID, OCCURRED_AT, event_from_row
from pillarbox.stores.sql.statements import SHARED

_MIGRATION_SECONDS = 60
# In one packet, so that nobody holds the lease's row who does not go on: a take-over would have to wait for him.
_FENCED: Final = """BEGIN;
    SET @pillarbox_held = (SELECT count(*) FROM {lease} WHERE stream = :stream AND shard = :shard
        AND token = :token AND owner = :worker {share_lock});
    {change} AND @pillarbox_held = 1;
    COMMIT; SELECT @pillarbox_held"""
_NEXT: Final = "SELECT min(stream) FROM {{event}} {{use_ready}} WHERE status = '{status}' AND stream > :after"
_STATEMENTS: Final = {
    "publish_fenced": _FENCED.replace("{change}", SHARED["publish"]),
    "publish_delete_fenced": _FENCED.replace("{change}", SHARED["publish_delete"]),
    # A subquery may not name the table that is deleted from.
    "prune_dead": """DELETE FROM {dead_letter} WHERE died_at < {later:keep} AND NOT EXISTS (
            SELECT 1 FROM {blocked_key} AS b WHERE b.stream = {dead_letter}.stream AND b.shard = {dead_letter}.shard
            AND b.key = {dead_letter}.key AND b.mode IN ('blocked', 'parked'))
        ORDER BY died_at LIMIT :limit""",
    # The least name after a given one is one step into the index; in a recursive statement it would be a walk.
    "next_waiting": f"""SELECT min(name) FROM (
            ({_NEXT.format(status="pending").replace("min(stream)", "min(stream) AS name")})
            UNION ALL ({_NEXT.format(status="scheduled")}) UNION ALL ({_NEXT.format(status="failed")})
            UNION ALL (SELECT min(stream) FROM {{blocked_key}} WHERE stream > :after)) AS following""",
    "served": "SELECT DISTINCT stream FROM {worker} WHERE seen_until > {now}",
    "lock_migration": "SELECT GET_LOCK(:name, :seconds)",
    "unlock_migration": "SELECT RELEASE_LOCK(:name)",
}


def _event(row: Sequence[Any], stream: str, status: Status) -> Event:
    cells = list(row)
    cells[ID] = uuid_of(cells[ID])
    cells[CREATED_AT] = cells[CREATED_AT].replace(tzinfo=UTC)
    if cells[OCCURRED_AT] is not None:
        cells[OCCURRED_AT] = cells[OCCURRED_AT].replace(tzinfo=UTC)
    return event_from_row(cells, stream, status)


def _events(rows: Sequence[Sequence[Any]], stream: str, status: Status) -> list[Event]:
    new, uuid, zone = tuple.__new__, uuid_of, UTC
    events = []
    for row in rows:
        if row[OCCURRED_AT] is None and row[HEADERS] is None:
            at = row[CREATED_AT].replace(tzinfo=zone)
            cells = (uuid(row[ID]), *row[1:CREATED_AT], at, *row[15:OCCURRED_AT], at, NO_HEADERS, stream, status, None)
            events.append(new(Event, cells))
        else:
            events.append(_event(row, stream, status))
    return events


class MysqlStore(SqlStore):
    """An outbox in MySQL 8.0.17 or newer, or MariaDB 10.6 or newer; relays look for events by polling.

    url: ``mysql://user:password@host:3306/database``, each part percent-encoded; ``?ssl=true`` asks for TLS,
    ``?ssl_ca=file`` checks the server's certificate, ``?unix_socket=file`` needs no host. pool_size: connections at the
    most.
    """

    migrations = "mysql"
    dialect = DIALECT
    _event = staticmethod(_event)
    _batch = staticmethod(_events)

    def __init__(self, url: str, *, prefix: str = "outbox", shards: int = 16, pool_size: int = 10) -> None:
        settings = connect_settings(url)
        where = f"{urlsplit(url).scheme} {settings['host']}:{settings['port']}/{settings['database']}"
        self._database = MysqlDatabase(url, where, pool_size=pool_size)
        super().__init__(self._database, Names(prefix), shards=shards, description=where)
        self._sql |= {name: self._statement(template) for name, template in _STATEMENTS.items()}
        place = f"{settings['database']}.{self._names.parts['meta']}"
        # A lock's name is the server's, and at most 64 characters long.
        self._migration_lock = "pillarbox." + hashlib.sha256(place.encode()).hexdigest()[:40]

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """``mysql://user:password@host:3306/database``, or ``mariadb://``"""
        return cls(url, **options)

    @staticmethod
    def _as_uuid(value: bytes | None) -> UUID | None:
        return None if value is None else uuid_of(value)

    @staticmethod
    def _as_instant(value: datetime) -> datetime:
        return value.replace(tzinfo=UTC)

    def _migration_parts(self) -> Mapping[str, str]:
        return {"collation": self._database.collation}

    @asynccontextmanager
    async def _migrating(self) -> AsyncIterator[Connection]:
        # Not a transaction: here every change of a schema commits by itself.
        async with self._database.alone() as one:
            lock = {"name": self._migration_lock}
            ((is_mine,),) = await one.fetch(self._sql["lock_migration"], **lock, seconds=_MIGRATION_SECONDS)
            if not is_mine:
                raise StoreDown(f"{self.description}: another migration runs for more than {_MIGRATION_SECONDS} s")
            try:
                yield one
            finally:
                await one.fetch(self._sql["unlock_migration"], **lock)

    async def unserved(self) -> Sequence[str]:
        served = {row[0] for row in await self._db.fetch(self._sql["served"])}
        found: list[str] = []
        after = ""
        while True:
            ((name,),) = await self._db.fetch(self._sql["next_waiting"], after=after)
            if name is None:
                return found
            if name not in served:
                found.append(name)
            after = name

    # What is one transaction each is run again when a deadlock ended it.
    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        if tx is not None:
            await super().add(events, tx)
        else:
            await again(lambda: super(MysqlStore, self).add(events))

    async def take(self, stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        return await again(lambda: super(MysqlStore, self).take(stream, worker, limit, seconds))

    async def settle(self, grant: Grant, settlement: Settlement) -> Collection[str]:
        others = settlement.failed or settlement.dead or settlement.held or settlement.aside or settlement.release
        if others or not settlement.published:
            return await again(lambda: super(MysqlStore, self).settle(grant, settlement))
        ids = [event.id for event in settlement.published]
        statement = "publish_fenced" if settlement.keep_published else "publish_delete_fenced"
        ((is_held,),) = await self._database.together(self._sql[statement], **fence(grant), ids=ids)
        if not is_held:
            raise lost(grant)
        return ()

    async def promote(self, stream: str, limit: int) -> int:
        return await again(lambda: super(MysqlStore, self).promote(stream, limit))

    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        return await again(lambda: super(MysqlStore, self).claim(stream, shard, worker, limit, seconds))

    async def settle_claims(self, claims: Sequence[Claim], settlement: Settlement, refund: Sequence[UUID] = ()) -> int:
        return await again(lambda: super(MysqlStore, self).settle_claims(claims, settlement, refund))

    async def rescue(self, stream: str, stuck_seconds: float, max_attempts: int, limit: int) -> Rescued:
        return await again(lambda: super(MysqlStore, self).rescue(stream, stuck_seconds, max_attempts, limit))

    async def _steer(self, stream: str, action: str, paused: bool, by: str) -> None:
        await again(lambda: super(MysqlStore, self)._steer(stream, action, paused, by))

    async def _act_on_dead(self, ids: Sequence[UUID], by: str, action: str) -> int:
        return await again(lambda: super(MysqlStore, self)._act_on_dead(ids, by, action))
