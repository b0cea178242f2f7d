"""Retention, operators and writing on SQL."""

from collections.abc import Mapping, Sequence
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
            await tx.execute(self._sql["audit"], operator=by, action=action, stream=stream, event_id=None, consumer="")

        await self._db.transact(work)

    async def replay(self, refs: Sequence[Ref], by: str) -> int:
        return await self._decide(refs, "replay", by)

    async def discard(self, refs: Sequence[Ref], by: str) -> int:
        return await self._decide(refs, "discard", by)

    async def _decide(self, refs: Sequence[Ref], action: str, by: str) -> int:
        ids = _by_place(refs)

        async def work(tx: Connection) -> int:
            decided = 0
            for (consumer, stream), some in ids.items():
                if consumer:
                    decided += await self._decide_of(tx, consumer, stream, some, action, by)
                else:
                    decided += await self._decide_in(tx, stream, some, action, by)
            return decided

        return await self._db.transact(work)

    async def replay_published(self, refs: Sequence[Ref], by: str) -> int:
        ids = _by_place(refs)

        async def work(tx: Connection) -> int:
            return sum([await self._replay_published_in(tx, stream, some, by) for (_, stream), some in ids.items()])

        return await self._db.transact(work)

    async def _replay_published_in(self, tx: Connection, stream: str, ids: Sequence[UUID], by: str) -> int:
        events = await tx.fetch(self._sql["lock_published"], stream=stream, ids=list(ids))
        if not events:
            return 0
        keys: dict[int, set[str]] = {}
        for _, shard, key, _ in events:
            if key is not None:
                keys.setdefault(shard, set()).add(key)
        held = set()
        for shard, some in sorted(keys.items()):
            # From here on a settle of these keys waits, and then sees this change.
            values = {"stream": stream, "shard": shard, "keys": sorted(some)}
            held |= {key for key, *_ in await tx.fetch(self._sql["lock_keys"], **values)}
        rows = [{"id": event_id, "stream": stream, "consumer": ""} for event_id, *_ in events]
        await tx.execute_many(self._sql["unpublish"], rows)
        free = sorted((seq, event_id) for event_id, _, key, seq in events if key not in held)
        await reenter(tx, self._sql, stream, [event_id for _, event_id in free])
        await self._note(tx, rows, "replay published", by)
        for event_id, shard, key, _ in events:
            if key in held:
                await tx.execute(self._sql["free_key"], stream=stream, shard=shard, key=key, id=event_id)
        return len(events)

    async def _decide_in(self, tx: Connection, stream: str, ids: Sequence[UUID], action: str, by: str) -> int:
        letters = await tx.fetch(self._sql["lock_dead"], stream=stream, ids=list(ids), consumer="")
        free = []
        rows = [{"id": event_id, "stream": stream, "consumer": ""} for event_id, *_ in letters]
        for event_id, shard, key, seq in letters:
            place = {"stream": stream, "shard": shard}
            # From here on a settle of this key waits, and then sees this change.
            is_held = key is not None and await tx.fetch(self._sql["lock_keys"], **place, keys=[key])
            if action == "replay":
                status = Status.FAILED if is_held else Status.PENDING
                await tx.execute(self._sql["revive"], id=event_id, stream=stream, status=status.value)
            if not is_held:
                free.append((seq, event_id))
        if action == "replay":
            # An event of a held key keeps its place, because the events behind it wait for it.
            await reenter(tx, self._sql, stream, [event_id for _, event_id in sorted(free)])
        await tx.execute_many(self._sql["remove_dead"], rows)
        await self._note(tx, rows, action, by)
        for event_id, shard, key, _ in letters:
            if key is not None:
                await tx.execute(self._sql["free_key"], stream=stream, shard=shard, key=key, id=event_id)
        return len(letters)

    async def _decide_of(
        self, tx: Connection, consumer: str, stream: str, ids: Sequence[UUID], action: str, by: str
    ) -> int:
        letters = await tx.fetch(self._sql["lock_dead"], stream=stream, ids=list(ids), consumer=consumer)
        rows = [{"id": event_id, "stream": stream, "consumer": consumer} for event_id, *_ in letters]
        if action == "replay":
            await tx.execute_many(self._sql["order_replay"], rows)
            await tx.execute_many(self._sql["count_as_new"], rows)
        else:
            await tx.execute_many(self._sql["remove_dead"], rows)
            # The row is missing if the letter waits for a replay.
            for row in rows:
                applied = {"aggregate_id": None, "aggregate_version": None, "dead": True}
                await tx.execute(self._sql["count_as_applied"], **row, **applied)
        await self._note(tx, rows, action, by)
        return len(rows)

    async def _note(self, tx: Connection, rows: Sequence[Mapping[str, Any]], action: str, by: str) -> None:
        audit = {"operator": by, "action": action}
        await tx.execute_many(self._sql["audit"], [{**audit, **row, "event_id": row["id"]} for row in rows])


def _by_place(refs: Sequence[Ref]) -> dict[tuple[str, str], list[UUID]]:
    """The ids by consumer and stream, in the order in which everybody locks them."""
    ids: dict[tuple[str, str], list[UUID]] = {}
    for ref in sorted(refs, key=lambda ref: (ref.consumer, ref.stream)):
        ids.setdefault((ref.consumer, ref.stream), []).append(ref.id)
    return ids


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
