"""Reads for operators on SQL."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from pillarbox.event import Status
from pillarbox.sql.rows import ADDED, PAYLOAD, Rows, error_history, partly
from pillarbox.sql.statements import Statements
from pillarbox.store import Audit, DeadLetter, Filter, Found
from pillarbox.stores.sql.database import Database
from pillarbox.unreadable import CANNOT_READ

_EQUAL: Final = ("stream", "key", "type", "tenant", "topic", "aggregate_type", "aggregate_id")
_STATES: Final = frozenset(Status)


class SqlInsights:
    """The part that answers questions and changes nothing."""

    def __init__(self, db: Database, sql: Statements, rows: Rows) -> None:
        self._db, self._sql, self._rows = db, sql, rows

    async def unserved(self) -> Sequence[str]:
        served = {row[0] for row in await self._db.fetch(self._sql["live_workers"])}
        return [stream for stream in await self.waiting_streams() if stream not in served]

    async def waiting_streams(self) -> list[str]:
        """The streams that have events to publish, by name."""
        found: list[str] = []
        after: str | None = ""
        while True:
            ((after,),) = await self._db.fetch(self._sql["next_waiting"], after=after)
            if after is None:
                return found
            found.append(after)

    async def count(self, stream: str) -> Mapping[Status, int]:
        rows = await self._db.fetch(self._sql["count"], stream=stream)
        counts = {Status(status): n for status, n in rows if status in _STATES}
        dead = (await self._db.fetch(self._sql["count_dead"], stream=stream))[0][0]
        return counts | ({Status.DEAD: dead} if dead else {})

    async def find(
        self, where: Filter, limit: int, newest_first: bool = True, after: UUID | None = None
    ) -> Sequence[Found]:
        order = "e.id DESC, e.stream DESC" if newest_first else "e.id, e.stream"
        behind = None if after is None else ("e.id < :behind" if newest_first else "e.id > :behind", after)
        found: list[Found] = []
        if where.status is not Status.DEAD and not where.consumer:
            found += await self._find("find_events", where, order, limit, behind=behind)
        if where.status in (None, Status.DEAD):
            found += await self._find("find_dead_letters", where, order, limit, behind=behind)
        return sorted(found, key=lambda each: each.event.id, reverse=newest_first)[:limit]

    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        if where.status not in (None, Status.DEAD):
            return []
        return await self._find("find_dead_letters", where, "e.seq", limit, instant="died_at", after=after)

    async def find_by_id(self, id: UUID, consumer: str = "") -> Sequence[Found]:
        where = Filter(ids=[id], consumer=consumer)
        found = [] if consumer else await self._find("find_events", where, "e.stream", 1000, whole=True)
        dead = await self._find("find_dead_letters", where, "e.stream", 1000, whole=True)
        # An id that died and was written again is in both: the new event counts.
        moving = {each.event.stream for each in found}
        return [*found, *(each for each in dead if each.event.stream not in moving)]

    async def dead_letters(
        self, stream: str | None = None, limit: int = 100, consumer: str = ""
    ) -> Sequence[DeadLetter]:
        where = Filter(stream=stream, consumer=consumer)
        found = await self._find("find_dead_letters", where, "e.died_at, e.seq", limit, whole=True)
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
        behind: tuple[str, UUID] | None = None,
        whole: bool = False,
    ) -> list[Found]:
        given: dict[str, Any] = {name: value for name in _EQUAL if (value := getattr(where, name)) is not None}
        conditions = [f"e.{name} = :{name}" for name in given]
        if where.status not in (None, Status.DEAD):
            conditions.append(f"e.status = '{where.status}'")
        consumer = where.consumer if select == "find_dead_letters" else None
        for name, value, condition in (
            ("consumer", consumer, "e.consumer = :consumer"),
            ("since", where.since, f"e.{instant} >= :since"),
            ("until", where.until, f"e.{instant} < :until"),
            ("after", after, "e.seq > :after"),
            ("ids", None if where.ids is None else list(where.ids), self._sql.texts["is_one_of"]),
        ):
            if value is not None:
                conditions.append(condition)
                given[name] = value
        if behind is not None:
            conditions.append(behind[0])
            given["behind"] = behind[1]
        chosen = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        statement = self._sql.extended(select, f"{chosen}ORDER BY {order} LIMIT :limit")
        return [self._found(row) for row in await self._db.fetch(statement, **given, limit=limit, whole=whole)]

    def _found(self, row: Sequence[Any]) -> Found:
        stream, status, size, due, published, started, owner, until, token = row[ADDED : ADDED + 9]
        error, error_at, errors, holds_key, consumer, replay_at = row[ADDED + 9 :]
        unreadable = ""
        try:
            event = self._rows.event(row[:ADDED], stream, Status(status))
            event = event._replace(payload=event.payload or b"")
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
            consumer=consumer,
            replay_at=self._instant(replay_at),
        )

    def _instant(self, value: Any) -> Any:
        with suppress(*CANNOT_READ):
            return None if value is None else self._rows.instant(value)

    async def audit(self, limit: int, stream: str | None = None, action: str | None = None) -> Sequence[Audit]:
        given = {name: value for name, value in (("stream", stream), ("action", action)) if value is not None}
        chosen = " AND ".join(f"{name} = :{name}" for name in given)
        where = f"WHERE {chosen} " if chosen else ""
        statement = self._sql.extended("audited", f"{where}ORDER BY id DESC LIMIT :limit")
        rows = await self._db.fetch(statement, **given, limit=limit)
        return [
            Audit(self._rows.instant(at), by, action, stream, event_id and self._rows.uuid(event_id), consumer)
            for at, by, action, stream, event_id, consumer in rows
        ]
