"""The store on MySQL and MariaDB, by asyncmy."""

import hashlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit
from uuid import UUID

from pillarbox.errors import ConfigError, StoreDown
from pillarbox.event import NO_HEADERS, Event, Status
from pillarbox.store import Claim, Grant, Rescued, Settlement
from pillarbox.stores._mysql_dialect import DIALECT
from pillarbox.stores._mysql_driver import MysqlDatabase, again
from pillarbox.stores.sql import Connection, Names, SqlStore
from pillarbox.stores.sql.rows import CREATED_AT, HEADERS, ID, OCCURRED_AT, event_from_row

_MIGRATION_SECONDS = 60
_EXAMPLE = "mysql://user:password@host:3306/database"
_NEXT: Final = "SELECT min(stream) FROM {{event}} {{use_ready}} WHERE status = '{status}' AND stream > :after"
_STATEMENTS: Final = {
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


def _uuid(value: bytes) -> UUID:
    # Past the constructor, which checks what a column of 16 bytes cannot get wrong.
    made = object.__new__(UUID)
    object.__setattr__(made, "int", int.from_bytes(value))
    object.__setattr__(made, "is_safe", _UNKNOWN)
    return made


_UNKNOWN: Final = UUID(int=0).is_safe


def _event(row: Sequence[Any], stream: str, status: Status) -> Event:
    cells = list(row)
    cells[ID] = _uuid(cells[ID])
    cells[CREATED_AT] = cells[CREATED_AT].replace(tzinfo=UTC)
    if cells[OCCURRED_AT] is not None:
        cells[OCCURRED_AT] = cells[OCCURRED_AT].replace(tzinfo=UTC)
    return event_from_row(cells, stream, status)


def _events(rows: Sequence[Sequence[Any]], stream: str, status: Status) -> list[Event]:
    new, uuid, zone = tuple.__new__, _uuid, UTC
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
        self._database = MysqlDatabase(settings, where, pool_size=pool_size)
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
        return None if value is None else _uuid(value)

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
        return await again(lambda: super(MysqlStore, self).settle(grant, settlement))

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


def connect_settings(url: str) -> dict[str, Any]:
    """The driver's settings from a URL."""
    parts = urlsplit(url)
    try:
        port = parts.port or 3306
    except ValueError:
        raise ConfigError(f"the store URL has a port that is no number; write {_EXAMPLE}") from None
    database = unquote(parts.path.removeprefix("/"))
    if not database or "/" in database:
        raise ConfigError(f"the store URL names no database; write {_EXAMPLE}")
    settings: dict[str, Any] = {
        "host": unquote(parts.hostname or "localhost"),
        "port": port,
        "user": unquote(parts.username or "root"),
        "password": unquote(parts.password or ""),
        "database": database,
    }
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "ssl" and value in ("true", "false"):
            settings["ssl"] = settings.get("ssl") or value == "true"
        elif name == "ssl_ca" and value:
            settings["ssl"] = {"ca": value}
        elif name == "unix_socket" and value:
            settings["unix_socket"] = value
        else:
            raise ConfigError(
                f"the store URL has an option {name!r} that is unknown or has no such value; "
                "use ssl=true, ssl_ca=file or unix_socket=file, and percent-encode the password"
            )
    return settings
