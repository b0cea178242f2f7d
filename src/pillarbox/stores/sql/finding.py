"""What operators ask of a SQL store."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final
from uuid import UUID

from pillarbox.event import Status
from pillarbox.store import Audit, Filter, Found, StreamStatus
from pillarbox.stores.sql.queue import QueuePart
from pillarbox.stores.sql.rows import ADDED, error_history
from pillarbox.stores.sql.statements import FOUND, FOUND_DEAD

_HOUR: Final = 3600.0
_WAITING: Final = (Status.PENDING, Status.PROCESSING, Status.FAILED, Status.HELD)
_CONDITIONS: Final = {
    "stream": "stream = :stream",
    "key": "key = :key",
    "type": "type = :type",
    "tenant": "tenant = :tenant",
    "since": "{instant} >= :since",
    "until": "{instant} < :until",
    "ids": "id {{among:ids}}",
}


def _in_a_list(select: str) -> str:
    """Payloads and histories can be large, and a list shows neither."""
    return select.replace(" payload,", " NULL AS payload,", 1).replace(" errors,", " NULL AS errors,", 1)


class FindingPart(QueuePart):
    """The part of a SQL store that only looks."""

    async def streams(self) -> Sequence[StreamStatus]:
        counts: dict[str, dict[Status, int]] = {}
        oldest: dict[str, Any] = {}
        recent: dict[str, int] = {}
        for stream, state, count, since, published in await self._db.fetch(self._sql["states"], recently=-_HOUR):
            status = Status(state)
            counts.setdefault(stream, {})[status] = count
            recent[stream] = recent.get(stream, 0) + int(published)
            if status in _WAITING:
                instant = self._as_instant(since)
                oldest[stream] = min(instant, oldest.get(stream, instant))
        for stream, count in await self._db.fetch(self._sql["dead_by_stream"]):
            counts.setdefault(stream, {})[Status.DEAD] = count
        paused = {name: bool(value) for name, value in await self._db.fetch(self._sql["known_streams"])}
        workers: dict[str, int] = dict(await self._db.fetch(self._sql["live_workers"]))
        # Asked last: nothing that was read before can be younger.
        now = self._as_instant((await self._db.fetch(self._sql["clock"]))[0][0])
        return [
            StreamStatus(
                stream,
                paused.get(stream, False),
                workers.get(stream, 0),
                counts.get(stream, {}),
                max(0.0, (now - oldest[stream]).total_seconds()) if stream in oldest else None,
                recent.get(stream, 0),
            )
            for stream in sorted({*counts, *paused, *workers})
        ]

    async def find(self, where: Filter, limit: int, newest_first: bool = True) -> Sequence[Found]:
        order = "id DESC" if newest_first else "id"
        found: list[Found] = []
        if where.status is not Status.DEAD:
            found += await self._find(_in_a_list(FOUND), where, "created_at", order, limit)
        if where.status in (None, Status.DEAD):
            found += await self._find(_in_a_list(FOUND_DEAD), where, "created_at", order, limit)
        return sorted(found, key=lambda each: each.event.id, reverse=newest_first)[:limit]

    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        if where.status not in (None, Status.DEAD):
            return []
        return await self._find(_in_a_list(FOUND_DEAD), where, "died_at", "seq", limit, after)

    async def look(self, id: UUID) -> Found | None:
        where = Filter(ids=[id])
        # An id that died and was written again is in both: the one that moves is the one to see.
        for select in (FOUND, FOUND_DEAD):
            if found := await self._find(select, where, "created_at", "id", 1):
                return found[0]
        return None

    async def _find(
        self, select: str, where: Filter, instant: str, order: str, limit: int, after: int | None = None
    ) -> list[Found]:
        values = {field.name: getattr(where, field.name) for field in fields(where)}
        given = {name: value for name, value in values.items() if name in _CONDITIONS and value is not None}
        conditions = [_CONDITIONS[name].format(instant=instant) for name in given]
        if where.status not in (None, Status.DEAD):
            conditions.append(f"status = '{where.status}'")
        if after is not None:
            conditions.append("seq > :after")
            given["after"] = after
        if "ids" in given:
            given["ids"] = list(given["ids"])
        chosen = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        statement = self._statement(f"{select}{chosen} ORDER BY {order} LIMIT :limit")
        return [self._found(row) for row in await self._db.fetch(statement, **given, limit=limit)]

    def _found(self, row: Sequence[Any]) -> Found:
        (
            stream,
            status,
            size,
            available,
            due,
            published,
            started,
            owner,
            until,
            token,
            error,
            error_at,
            errors,
            holds,
        ) = row[ADDED:]
        event = self._event(row[:ADDED], stream, Status(status))
        return Found(
            event=event._replace(payload=event.payload or b"", available_at=self._instant(available)),
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
            holds_key=bool(holds),
        )

    def _instant(self, value: Any) -> Any:
        return None if value is None else self._as_instant(value)

    async def audit(self, limit: int) -> Sequence[Audit]:
        rows = await self._db.fetch(self._sql["audited"], limit=limit)
        return [
            Audit(self._as_instant(at), by, action, stream, self._as_uuid(event_id))
            for at, by, action, stream, event_id in rows
        ]
