"""The store on PostgreSQL, by asyncpg."""

import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self
from urllib.parse import urlsplit
from uuid import UUID

from pillarbox.errors import ConfigError
from pillarbox.event import Event, Status
from pillarbox.store import Claim, Features, Grant, Page, Settlement, Work
from pillarbox.stores._id_walk import IdWalk
from pillarbox.stores._outbox import lost
from pillarbox.stores._postgres_driver import PostgresDatabase, PostgresListener
from pillarbox.stores._postgres_floor import Floors
from pillarbox.stores.sql import Connection, Dialect, Names, SqlStore
from pillarbox.stores.sql.ordered import fence
from pillarbox.stores.sql.rows import ADDED
from pillarbox.stores.sql.statements import EVENT_COLUMNS, POLL

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::(\d*))?")

# All of a worker's leases at once: rows that a settle holds at this moment are passed over, so nothing can deadlock.
_RENEW_ALL = """UPDATE {lease} AS l SET lease_until = {later:seconds} FROM (
        SELECT stream, shard FROM {lease} JOIN unnest(:streams::text[], :shards::int[], :tokens::bigint[])
            AS mine (stream, shard, token) USING (stream, shard, token) WHERE owner = :worker
        ORDER BY stream, shard FOR UPDATE SKIP LOCKED) AS free
    WHERE l.stream = free.stream AND l.shard = free.shard RETURNING l.stream, l.shard, l.token"""
# LATERAL with LIMIT 1: one step into the index for each shard, which no planner turns into a join over all events.
_POLL_SHARDS = """ UNION ALL SELECT 'ready', s.shard FROM unnest(:shards::int[], :floors::bigint[]) AS s (shard, floor)
        CROSS JOIN LATERAL (SELECT 1 FROM {event} AS e WHERE e.stream = :stream AND e.shard = s.shard
            AND e.status = 'pending' AND e.seq >= s.floor LIMIT 1) AS first
    UNION ALL SELECT 'due', s.shard FROM unnest(:shards::int[]) AS s (shard)
        CROSS JOIN LATERAL (SELECT 1 FROM {blocked_key} AS b WHERE b.stream = :stream AND b.shard = s.shard
            AND b.next_attempt_at <= now() LIMIT 1) AS first"""
# FOR SHARE: with FOR KEY SHARE, or with an EXISTS over the lease alone, a settle and a take-over can cross.
_GUARD = """WITH guard AS MATERIALIZED (SELECT 1 FROM {lease} WHERE stream = :stream AND shard = :shard
    AND token = :token AND owner = :worker FOR SHARE) """
_WAITING = "WHERE id = ANY(:ids) AND status IN ('pending', 'failed', 'held') AND EXISTS (SELECT 1 FROM guard)"
_STATEMENTS = {
    "renew_all": _RENEW_ALL,
    "poll": POLL + _POLL_SHARDS,
    "publish_fenced": _GUARD
    + "UPDATE {event} SET status = 'published', published_at = now(), attempts = attempts + 1 "
    + _WAITING,
    "publish_delete_fenced": _GUARD + "DELETE FROM {event} " + _WAITING,
    "claim_shard": """UPDATE {event} SET status = 'processing', attempts = attempts + 1, next_attempt_at = NULL,
        lease_owner = :worker, lease_token = lease_token + 1, lease_until = {later:seconds},
        processing_started_at = now() WHERE id = ANY(ARRAY(SELECT id FROM {event} WHERE stream = :stream
            AND shard = :shard AND status = 'pending' ORDER BY seq LIMIT :limit FOR UPDATE SKIP LOCKED))
        RETURNING """
    + f"{EVENT_COLUMNS}, lease_token",
    # By id, which is in order of time. Without an upper bound: with one, and no statistics, the planner scans it all.
    "prune_page_by_id": """SELECT id, status = 'published' AND published_at < {later:keep} FROM {event}
        WHERE id > :after ORDER BY id LIMIT :limit""",
    "prune_by_id": """DELETE FROM {event} WHERE id = ANY(:ids) AND status = 'published'
        AND published_at < {later:keep}""",
    "now": "SELECT extract(epoch FROM now())::float8",
    # Before its first use a sequence says 1 too.
    "look": """SELECT CASE WHEN is_called THEN last_value ELSE 0 END,
        pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
        pg_snapshot_xmax(pg_current_snapshot())::text::bigint FROM {event_seq}""",
    "doze": "INSERT INTO {sleeper} (stream, worker) VALUES (:stream, :worker) ON CONFLICT DO NOTHING",
    "wake": "DELETE FROM {sleeper} WHERE stream = :stream AND worker = :worker",
    # Relays that were killed in their sleep.
    "wake_dead": """DELETE FROM {sleeper} AS s WHERE NOT EXISTS (SELECT 1 FROM {worker} AS w
        WHERE w.stream = s.stream AND w.name = s.worker AND w.seen_until > now())""",
    "lock_migration": "SELECT pg_advisory_xact_lock(hashtext(:name))",
}


def _where(url: str) -> str:
    """The servers and the database; refuses a URL whose password would be taken for something else, and shown."""
    parts = urlsplit(url)
    hosts = [_HOST.fullmatch(host) for host in parts.netloc.rpartition("@")[2].split(",")]
    if "@" in parts.path + parts.fragment or ("@" in parts.query and "@" not in parts.netloc) or None in hosts:
        raise ConfigError(
            "the store URL has a port that is no number, or a password with unescaped characters; "
            "write postgresql://user@host:5432/database, in a password @ as %40, / as %2F, # as %23 and ? as %3F"
        )
    places = ",".join(f"{host[1] or 'localhost'}:{host[2] or 5432}" for host in hosts if host is not None)
    return f"postgresql {places}{parts.path}"


class PostgresStore(SqlStore):
    """An outbox in PostgreSQL 13 or newer.

    listen_url: for LISTEN where ``url`` leads to a pooler in transaction mode; default ``url``.
    wake_up: False polls only. pool_size: connections at the most, beside the one that listens.
    statement_cache: 0 behind a pooler that does not keep prepared statements.
    """

    migrations = "postgres"
    dialect = Dialect(
        now="now()",
        later="now() + {} * interval '1 second'",
        among="= ANY({})",
        has_meta="WHERE to_regclass('{meta}') IS NOT NULL",
        tables="tablename FROM pg_tables WHERE schemaname = coalesce(lower(:schema), current_schema())",
        version="current_setting('server_version')",
        param="$",
        skip_locked="FOR UPDATE SKIP LOCKED",
        share_lock="FOR SHARE",
        update_lock="FOR UPDATE",
        size="octet_length(payload)",
        newline="chr(10)",
        floor="AND seq >= :floor",
        true="true",
        false="false",
    )

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "outbox",
        schema: str | None = None,
        shards: int = 16,
        wake_up: bool = True,
        listen_url: str | None = None,
        pool_size: int = 10,
        statement_cache: int = 256,
    ) -> None:
        where = _where(url)
        names = Names(prefix, schema)
        self._database = PostgresDatabase(url, where, pool_size=pool_size, statement_cache=statement_cache)
        super().__init__(self._database, names, shards=shards, description=where)
        self.features = Features(wake_up=wake_up)
        self._sql |= {name: self._statement(template) for name, template in _STATEMENTS.items()}
        self._floors = Floors()
        self._poll_sweep_at: dict[str, float] = {}
        self._listener = PostgresListener(listen_url or url, where, names.parts["channel"]) if wake_up else None

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """``postgresql://user@host:5432/database``"""
        return cls(url, **options)

    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        await super().open()
        if self._listener is not None and on_wake is not None:
            self._listener.start(on_wake)

    async def close(self) -> None:
        if self._listener is not None and self._opened <= 1:
            await self._listener.stop()
        await super().close()

    @asynccontextmanager
    async def _migrating(self) -> AsyncIterator[Connection]:
        async with self._db.transaction() as tx:
            await tx.fetch(self._sql["lock_migration"], name=f"pillarbox {self._names.parts['meta']}")
            yield tx

    async def _drop(self, tx: Connection) -> None:
        await super()._drop(tx)
        await tx.run(f"DROP FUNCTION IF EXISTS {self._names.parts['wake']}()")

    async def renew(self, grants: Sequence[Grant], seconds: float) -> Collection[Grant]:
        if not grants:
            return []
        rows = await self._db.fetch(
            self._sql["renew_all"],
            worker=grants[0].worker,
            streams=[grant.stream for grant in grants],
            shards=[grant.shard for grant in grants],
            tokens=[grant.token for grant in grants],
            seconds=seconds,
        )
        renewed = {(stream, shard, token) for stream, shard, token in rows}
        # What is missing is lost, or is being settled at this moment: one by one it can be waited for.
        missing = [grant for grant in grants if (grant.stream, grant.shard, grant.token) not in renewed]
        held = set(await super().renew(missing, seconds))
        return [grant for grant in grants if grant not in missing or grant in held]

    async def give(self, grants: Sequence[Grant]) -> None:
        self._floors.forget(list(grants))
        await super().give(grants)

    async def poll(self, stream: str, worker: str, grants: Sequence[Grant] | None) -> Work:
        if grants is None:
            shards = list(range(self._shards))
            return await self._poll_from(stream, worker, shards, [0] * len(shards))
        begun = time.monotonic()
        sweep = begun >= self._poll_sweep_at.get(stream, 0.0)
        floors = [0 if sweep else self._floors.floor(grant) for grant in grants]
        work = await self._poll_from(stream, worker, [grant.shard for grant in grants], floors)
        if sweep:
            self._poll_sweep_at[stream] = Floors.next_sweep(begun, time.monotonic())
            for grant in grants:
                if grant.shard in work.ready:
                    self._floors.sweep(grant)
        return work

    async def _poll_from(self, stream: str, worker: str, shards: list[int], floors: list[int]) -> Work:
        values = {"stream": stream, "worker": worker, "shards": shards, "floors": floors}
        return self._work(await self._db.fetch(self._sql["poll"], **values))

    async def read(self, grant: Grant, limit: int, max_bytes: int) -> Sequence[Event]:
        begun = time.monotonic()
        if self._floors.look_due(begun):
            await self._look(begun)
            begun = time.monotonic()
        floor = self._floors.start(grant, begun)
        inline = max_bytes // limit
        rows = await self._db.fetch(self._sql["read"], **fence(grant), limit=limit, inline=inline, floor=floor)
        self._floors.done(grant, floor, rows[0][1] if rows else None, begun, time.monotonic())
        return await self._events(rows, grant.stream, max_bytes)

    async def _look(self, begun: float) -> None:
        try:
            last, xmin, xmax = (await self._db.fetch(self._sql["look"]))[0]
        except BaseException:
            self._floors.look_failed()
            raise
        self._floors.looked(begun, time.monotonic(), last, xmin, xmax)

    async def promote(self, stream: str, limit: int) -> int:
        promoted = await super().promote(stream, limit)
        if promoted:
            self._floors.sweep_all()
            self._poll_sweep_at.pop(stream, None)
        return promoted

    async def settle(self, grant: Grant, settlement: Settlement) -> Collection[str]:
        others = settlement.failed or settlement.dead or settlement.held or settlement.aside or settlement.release
        if others or not settlement.published:
            return await super().settle(grant, settlement)
        ids = [event.id for event in settlement.published]
        statement = "publish_fenced" if settlement.keep_published else "publish_delete_fenced"
        changed = await self._db.execute(self._sql[statement], **fence(grant), ids=ids)
        # Fewer: done before by a settle whose answer was lost, or not ours to do any more.
        if changed != len(ids) and not await self._db.fetch(self._sql["owned"], **fence(grant)):
            raise lost(grant)
        return ()

    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        if shard is None:
            return await super().claim(stream, shard, worker, limit, seconds)
        rows = await self._db.fetch(
            self._sql["claim_shard"], stream=stream, shard=shard, worker=worker, limit=limit, seconds=seconds
        )
        return sorted(
            (Claim(self._event(row, stream, Status.PROCESSING), row[ADDED]) for row in rows),
            key=lambda claim: claim.event.seq,
        )

    async def prune_published(self, keep_seconds: float, limit: int, after: UUID | None = None) -> Page:
        walk = IdWalk((await self._db.fetch(self._sql["now"]))[0][0], keep_seconds, after)
        found = await self._db.fetch(self._sql["prune_page_by_id"], keep=-keep_seconds, limit=limit, after=walk.start)
        rows = [row for row in found if row[0] < walk.bound]
        settled = [event_id for event_id, is_settled in rows if is_settled]
        deleted = 0
        if settled:
            deleted = await self._db.execute(self._sql["prune_by_id"], ids=settled, keep=-keep_seconds)
        return Page(deleted, walk.next([row[0] for row in rows], limit))

    async def join(self, stream: str, worker: str, seconds: float) -> None:
        await super().join(stream, worker, seconds)
        await self._db.execute(self._sql["wake_dead"])

    async def doze(self, stream: str, worker: str, asleep: bool) -> None:
        if self._listener is not None:
            await self._db.execute(self._sql["doze" if asleep else "wake"], stream=stream, worker=worker)
