"""Retention, operators and writing on SQL."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from uuid import UUID

from pillarbox.event import Event, Status
from pillarbox.sql.columns import event_row
from pillarbox.sql.statements import Statements
from pillarbox.store import Page, Ref
from pillarbox.stores.sql.database import Connection, Database
from pillarbox.stores.sql.serving import reenter


class SqlRetention:
    """The part that deletes what is old, along seq."""

    def __init__(self, db: Database, sql: Statements) -> None:
        self._db, self._sql = db, sql

    async def prune_published(self, keep_seconds: float, limit: int, after: Any = None) -> Page:
        rows = await self._db.fetch(self._sql["prune_page"], keep=keep_seconds, limit=limit, after=after or 0)
        seqs = [seq for seq, can_go, _ in rows if can_go]
        deleted = await self._db.execute(self._sql["prune"], seqs=seqs, keep=keep_seconds) if seqs else 0
        return Page(deleted, rows[-1][0] if len(rows) == limit and rows[-1][2] else None)

    async def prune_dead(self, keep_seconds: float, limit: int) -> int:
        return await self._db.execute(self._sql["prune_dead"], keep=keep_seconds, limit=limit)

    async def prune_inbox(self, keep_seconds: float, limit: int) -> int:
        return await self._db.execute(self._sql["prune_inbox"], keep=keep_seconds, limit=limit)

    async def prune_idempotency(self, keep_seconds: float, limit: int) -> int:
        return await self._db.execute(self._sql["prune_idempotency"], keep=keep_seconds, limit=limit)


class SqlOperator:
    """The part that pauses and resumes streams, and decides about dead letters."""

    def __init__(self, db: Database, sql: Statements) -> None:
        self._db, self._sql = db, sql

    async def pause(self, stream: str, by: str) -> None:
        await self._set_paused(stream, True, "pause", by)

    async def resume(self, stream: str, by: str) -> None:
        await self._set_paused(stream, False, "resume", by)

    async def _set_paused(self, stream: str, paused: bool, action: str, by: str) -> None:
        async def work(tx: Connection) -> None:
            await tx.execute(self._sql["pause"], stream=stream, paused=paused)
            await tx.execute(self._sql["audit"], operator=by, action=action, stream=stream, event_id=None)

        await self._db.transact(work)

    async def replay(self, refs: Sequence[Ref], by: str) -> int:
        return await self._decide(refs, "replay", by)

    async def discard(self, refs: Sequence[Ref], by: str) -> int:
        return await self._decide(refs, "discard", by)

    async def _decide(self, refs: Sequence[Ref], action: str, by: str) -> int:
        ids: dict[str, list[UUID]] = {}
        for ref in sorted(refs, key=lambda ref: ref.stream):
            ids.setdefault(ref.stream, []).append(ref.id)

        async def work(tx: Connection) -> int:
            return sum([await self._decide_in(tx, stream, some, action, by) for stream, some in ids.items()])

        return await self._db.transact(work)

    async def _decide_in(self, tx: Connection, stream: str, ids: Sequence[UUID], action: str, by: str) -> int:
        letters = await tx.fetch(self._sql["lock_dead"], stream=stream, ids=list(ids))
        free = []
        rows = [{"id": event_id, "stream": stream} for event_id, *_ in letters]
        for row, (event_id, shard, key, seq) in zip(rows, letters, strict=True):
            place = {"stream": stream, "shard": shard}
            # From here on a settle of this key waits, and then sees this change.
            is_held = key is not None and await tx.fetch(self._sql["lock_keys"], **place, keys=[key])
            if action == "replay":
                status = Status.FAILED if is_held else Status.PENDING
                await tx.execute(self._sql["revive"], **row, status=status.value)
            if not is_held:
                free.append((seq, event_id))
        if action == "replay":
            # An event of a held key keeps its place, because the events behind it wait for it.
            await reenter(tx, self._sql, stream, [event_id for _, event_id in sorted(free)])
        await tx.execute_many(self._sql["remove_dead"], rows)
        audit = {"operator": by, "action": action, "stream": stream}
        await tx.execute_many(self._sql["audit"], [audit | {"event_id": row["id"]} for row in rows])
        for event_id, shard, key, _ in letters:
            if key is not None:
                await tx.execute(self._sql["free_key"], stream=stream, shard=shard, key=key, id=event_id)
        return len(letters)


class SqlWriting:
    """The part that adds events."""

    def __init__(self, db: Database, sql: Statements) -> None:
        self._db, self._sql = db, sql

    def transaction(self) -> AbstractAsyncContextManager[Connection]:
        return self._db.transaction()

    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        rows = [event_row(event) for event in events]
        if tx is not None:
            await tx.execute_many(self._sql["add"], rows)
        else:
            await self._db.transact(lambda own: own.execute_many(self._sql["add"], rows))
