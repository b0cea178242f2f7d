"""Cheap questions on SQL: each count ends at its limit, and comes from an index."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from pillarbox.event import Mode, key_hash
from pillarbox.sql.rows import Rows
from pillarbox.sql.statements import Statements
from pillarbox.store import Ahead, Filter, Found, HoldMode, StreamGauges, StuckKey, WorkerStatus
from pillarbox.stores._members import members
from pillarbox.stores._waiting import WAITING_LIMIT, heads_of, summary
from pillarbox.stores.outbox_info import OutboxInfo
from pillarbox.stores.sql.database import Database
from pillarbox.stores.sql.insights import SqlInsights

_UNKNOWN: Final = (False, None, None)


class SqlGauges:
    """The part that a monitor asks."""

    def __init__(self, db: Database, sql: Statements, rows: Rows, outbox: OutboxInfo, insights: SqlInsights) -> None:
        self._db, self._sql, self._rows, self._outbox, self._insights = db, sql, rows, outbox, insights

    async def gauges(self, limit: int = 10_000) -> Sequence[StreamGauges]:
        known = {row[0]: row[1:] for row in await self._db.fetch(self._sql["known_streams"])}
        workers = await self.workers()
        waiting = await self._insights.waiting_streams()
        found = []
        for stream in sorted({*known, *workers, *waiting}):
            paused, mode, destination = known.get(stream, _UNKNOWN)
            values = {"stream": stream, "limit": limit, "last_shard": self._outbox.shards - 1}
            rows = await self._db.fetch(self._sql["gauges"], **values)
            # Read last, so that no event is younger.
            now = await self.clock()
            cells = [(place, state, n, since and self._rows.instant(since)) for place, state, n, since in rows]
            found.append(
                summary(
                    stream,
                    Mode(mode) if mode else None,
                    destination,
                    bool(paused),
                    cells,
                    workers.get(stream, ()),
                    now,
                    limit,
                )
            )
        return found

    async def stuck_keys(self, stream: str, limit: int = 100, key: str | None = None) -> Sequence[StuckKey]:
        if key is None:
            rows = await self._db.fetch(self._sql["stuck_keys"], stream=stream, limit=limit)
        else:
            rows = await self._db.fetch(self._sql["stuck_key"], stream=stream, shard=self._shard(key), key=key)
        held = []
        for shard, name, mode, due, dead_head in rows:
            values = {"stream": stream, "shard": shard, "key": name, "limit": WAITING_LIMIT}
            ((first, waiting),) = await self._db.fetch(self._sql["held_key_events"], **values)
            due_at = due and self._rows.instant(due)
            held.append((name, HoldMode(mode), due_at, self._id(dead_head) or self._id(first), waiting))
        where = Filter(stream=stream, ids=[head for *_, head, _ in held if head is not None])
        return heads_of(held, await self._insights.find(where, 2 * len(held)) if where.ids else ())

    def _id(self, cell: Any) -> UUID | None:
        return None if cell is None else self._rows.uuid(cell)

    def _shard(self, key: str) -> int:
        return key_hash(UUID(int=0), key) % self._outbox.shards

    async def workers(self) -> Mapping[str, Sequence[WorkerStatus]]:
        instant = self._rows.instant
        seen = await self._db.fetch(self._sql["workers"])
        owners = await self._db.fetch(self._sql["owners"])
        return members(
            await self.clock(),
            [
                (stream, name, instant(at), instant(until), error, circuit_at and instant(circuit_at), version)
                for stream, name, at, until, error, circuit_at, version in seen
            ],
            [(stream, name, shards, instant(until)) for stream, name, shards, until in owners],
        )

    async def ahead(self, found: Found, limit: int = 10_000) -> Ahead:
        event = found.event
        place = {"stream": event.stream, "shard": key_hash(event.id, event.key) % self._outbox.shards}
        ((events,),) = await self._db.fetch(self._sql["before"], **place, seq=event.seq, limit=limit)
        rows = await self._db.fetch(self._sql["owner"], **place)
        owner, until = rows[0] if rows else (None, None)
        if owner is None or until is None:
            return Ahead(None, 0.0, events)
        left = (self._rows.instant(until) - await self.clock()).total_seconds()
        return Ahead(owner, left, events) if left > 0 else Ahead(None, 0.0, events)

    async def clock(self) -> datetime:
        return self._rows.instant((await self._db.fetch(self._sql["clock"]))[0][0])
