"""Reads for operators on SQL."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from pillarbox.event import Mode, Status
from pillarbox.sql.rows import ADDED, PAYLOAD, Rows, error_history, partly
from pillarbox.sql.statements import Statements
from pillarbox.store import Audit, DeadLetter, Filter, Found, HoldMode, StreamStatus
from pillarbox.stores._members import members
from pillarbox.stores.sql.database import Database
from pillarbox.unreadable import CANNOT_READ

_WAITING: Final = (Status.PENDING, Status.PROCESSING, Status.FAILED, Status.HELD)
_EQUAL: Final = ("stream", "key", "type", "tenant", "topic", "aggregate_type", "aggregate_id")
_STATES: Final = frozenset(Status)
_UNKNOWN: Final = (False, None, None)


class SqlInsights:
    """The part that answers questions and changes nothing."""

    def __init__(self, db: Database, sql: Statements, rows: Rows) -> None:
        self._db, self._sql, self._rows = db, sql, rows

    async def streams(self) -> Sequence[StreamStatus]:
        instant = self._rows.instant
        counts: dict[str, dict[Status, int]] = {}
        oldest: dict[str, Any] = {}
        recent: dict[str, int] = {}
        for stream, state, count, since, published in await self._db.fetch(self._sql["states"]):
            if state not in _STATES:
                continue
            status = Status(state)
            counts.setdefault(stream, {})[status] = count
            recent[stream] = recent.get(stream, 0) + published
            if status in _WAITING:
                oldest[stream] = min(instant(since), oldest.get(stream, instant(since)))
        for stream, count in await self._db.fetch(self._sql["dead_streams"]):
            counts.setdefault(stream, {})[Status.DEAD] = count
        known = {row[0]: row[1:] for row in await self._db.fetch(self._sql["known_streams"])}
        held: dict[str, dict[HoldMode, int]] = {}
        for stream, mode, count in await self._db.fetch(self._sql["held_modes"]):
            held.setdefault(stream, {})[HoldMode(mode)] = count
        seen = await self._db.fetch(self._sql["workers"])
        owners = await self._db.fetch(self._sql["owners"])
        # Read last, so that no event is younger.
        now = instant((await self._db.fetch(self._sql["clock"]))[0][0])
        workers = members(
            now,
            ((stream, name, instant(at), instant(until)) for stream, name, at, until in seen),
            ((stream, name, shards, instant(until)) for stream, name, shards, until in owners),
        )
        found = []
        for stream in sorted({*counts, *known, *workers}):
            paused, mode, destination = known.get(stream, _UNKNOWN)
            found.append(
                StreamStatus(
                    stream,
                    bool(paused),
                    workers.get(stream, ()),
                    counts.get(stream, {}),
                    max(0.0, (now - oldest[stream]).total_seconds()) if stream in oldest else None,
                    recent.get(stream, 0),
                    Mode(mode) if mode else None,
                    destination,
                    held.get(stream, {}),
                )
            )
        return found

    async def unserved(self) -> Sequence[str]:
        served = {row[0] for row in await self._db.fetch(self._sql["live_workers"])}
        found: list[str] = []
        after: str | None = ""
        while True:
            ((after,),) = await self._db.fetch(self._sql["next_waiting"], after=after)
            if after is None:
                return found
            if after not in served:
                found.append(after)

    async def count(self, stream: str) -> Mapping[Status, int]:
        rows = await self._db.fetch(self._sql["count"], stream=stream)
        counts = {Status(status): n for status, n in rows if status in _STATES}
        dead = (await self._db.fetch(self._sql["count_dead"], stream=stream))[0][0]
        return counts | ({Status.DEAD: dead} if dead else {})

    async def find(self, where: Filter, limit: int, newest_first: bool = True) -> Sequence[Found]:
        order = "e.id DESC, e.stream DESC" if newest_first else "e.id, e.stream"
        found: list[Found] = []
        if where.status is not Status.DEAD:
            found += await self._find("find_events", where, order, limit)
        if where.status in (None, Status.DEAD):
            found += await self._find("find_dead_letters", where, order, limit)
        return sorted(found, key=lambda each: each.event.id, reverse=newest_first)[:limit]

    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        if where.status not in (None, Status.DEAD):
            return []
        return await self._find("find_dead_letters", where, "e.seq", limit, instant="died_at", after=after)

    async def find_by_id(self, id: UUID) -> Sequence[Found]:
        where = Filter(ids=[id])
        found = await self._find("find_events", where, "e.stream", 1000, whole=True)
        dead = await self._find("find_dead_letters", where, "e.stream", 1000, whole=True)
        # An id that died and was written again is in both: the new event counts.
        moving = {each.event.stream for each in found}
        return [*found, *(each for each in dead if each.event.stream not in moving)]

    async def dead_letters(self, stream: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        found = await self._find("find_dead_letters", Filter(stream=stream), "e.died_at, e.seq", limit, whole=True)
        return [
            DeadLetter(each.event, each.last_error_at, each.last_error, each.errors)
            for each in found
            if each.last_error_at is not None and each.last_error is not None
        ]

    async def _find(
        self,
        select: str,
        where: Filter,
        order: str,
        limit: int,
        *,
        instant: str = "created_at",
        after: int | None = None,
        whole: bool = False,
    ) -> list[Found]:
        given: dict[str, Any] = {name: value for name in _EQUAL if (value := getattr(where, name)) is not None}
        conditions = [f"e.{name} = :{name}" for name in given]
        if where.status not in (None, Status.DEAD):
            conditions.append(f"e.status = '{where.status}'")
        for name, value, condition in (
            ("since", where.since, f"e.{instant} >= :since"),
            ("until", where.until, f"e.{instant} < :until"),
            ("after", after, "e.seq > :after"),
            ("ids", None if where.ids is None else list(where.ids), self._sql.texts["is_one_of"]),
        ):
            if value is not None:
                conditions.append(condition)
                given[name] = value
        chosen = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        statement = self._sql.extended(select, f"{chosen}ORDER BY {order} LIMIT :limit")
        return [self._found(row) for row in await self._db.fetch(statement, **given, limit=limit, whole=whole)]

    def _found(self, row: Sequence[Any]) -> Found:
        stream, status, size, available, due, published, started, owner, until, token = row[ADDED : ADDED + 10]
        error, error_at, errors, holds_key = row[ADDED + 10 :]
        unreadable = ""
        try:
            event = self._rows.event(row[:ADDED], stream, Status(status))
            event = event._replace(payload=event.payload or b"", available_at=self._instant(available))
        except CANNOT_READ:
            cells = list(row[:ADDED])
            cells[PAYLOAD] = cells[PAYLOAD] or b""
            event, unreadable = partly(self._rows, cells, stream, status)
        return Found(
            event=event,
            payload_bytes=size,
            next_attempt_at=self._instant(due),
            published_at=self._instant(published),
            processing_started_at=self._instant(started),
            lease_owner=owner,
            lease_until=self._instant(until),
            lease_token=token,
            last_error=error,
            last_error_at=self._instant(error_at),
            errors=error_history(errors),
            holds_key=bool(holds_key),
            unreadable=unreadable,
        )

    def _instant(self, value: Any) -> Any:
        with suppress(*CANNOT_READ):
            return None if value is None else self._rows.instant(value)

    async def audit(self, limit: int) -> Sequence[Audit]:
        rows = await self._db.fetch(self._sql["audited"], limit=limit)
        return [
            Audit(self._rows.instant(at), by, action, stream, event_id and self._rows.uuid(event_id))
            for at, by, action, stream, event_id in rows
        ]
