"""Retention, steering and operators on SQL."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from pillarbox.event import Status
from pillarbox.store import DeadLetter, Page
from pillarbox.stores.sql.finding import FindingPart
from pillarbox.stores.sql.rows import ADDED, error_history


class OperationsPart(FindingPart):
    """The part of a SQL store for everything around the relay's own work."""

    async def prune_published(self, keep_seconds: float, limit: int, after: Any = None) -> Page:
        # In order of seq, which is the order of insertion: what is too young ends the walk, what waits is stepped over.
        rows = await self._db.fetch(self._sql["prune_page"], keep=-keep_seconds, limit=limit, after=after or 0)
        settled = [seq for seq, is_settled, _ in rows if is_settled]
        deleted = await self._db.execute(self._sql["prune"], seqs=settled, keep=-keep_seconds) if settled else 0
        return Page(deleted, rows[-1][0] if len(rows) == limit and rows[-1][2] else None)

    async def prune_dead(self, keep_seconds: float, limit: int) -> int:
        return await self._db.execute(self._sql["prune_dead"], keep=-keep_seconds, limit=limit)

    async def pause(self, stream: str, by: str) -> None:
        await self._steer(stream, "pause", True, by)

    async def resume(self, stream: str, by: str) -> None:
        await self._steer(stream, "resume", False, by)

    async def _steer(self, stream: str, action: str, paused: bool, by: str) -> None:
        async with self._db.transaction() as tx:
            await tx.execute(self._sql["pause"], stream=stream, paused=paused)
            await tx.execute(self._sql["audit"], operator=by, action=action, stream=stream, event_id=None)

    async def doze(self, stream: str, worker: str, asleep: bool) -> None:
        """Nothing to tell where the database cannot wake a relay."""

    async def unserved(self) -> Sequence[str]:
        return [row[0] for row in await self._db.fetch(self._sql["waiting_streams"])]

    async def count(self, stream: str) -> Mapping[Status, int]:
        counts = {Status(status): n for status, n in await self._db.fetch(self._sql["count"], stream=stream)}
        dead = (await self._db.fetch(self._sql["count_dead"], stream=stream))[0][0]
        return counts | ({Status.DEAD: dead} if dead else {})

    async def dead_letters(self, stream: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        rows = await self._db.fetch(self._sql["dead_letters"], stream=stream, limit=limit)
        letters = []
        for row in rows:
            own_stream, died_at, error, errors = row[ADDED:]
            event = self._event(row, own_stream, Status.DEAD)
            letters.append(DeadLetter(event, self._as_instant(died_at), error, error_history(errors)))
        return letters

    async def replay(self, ids: Sequence[UUID], by: str) -> int:
        return await self._act_on_dead(ids, by, "replay")

    async def discard(self, ids: Sequence[UUID], by: str) -> int:
        return await self._act_on_dead(ids, by, "discard")

    async def _act_on_dead(self, ids: Sequence[UUID], by: str, action: str) -> int:
        async with self._db.transaction() as tx:
            letters = await tx.fetch(self._sql["lock_dead"], ids=list(ids))
            for event_id, stream, shard, key in letters:
                aside: Sequence[Any] = ()
                if key is not None:
                    # From here on the owner's settle of this key waits, and will see what is done here.
                    aside = await tx.fetch(self._sql["lock_keys"], stream=stream, shard=shard, keys=[key])
                if action == "replay":
                    status = Status.FAILED if aside else Status.PENDING
                    await tx.execute(self._sql["exhume"], id=event_id, status=status.value)
                await tx.execute(self._sql["audit"], operator=by, action=action, stream=stream, event_id=event_id)
            await tx.execute(self._sql["remove_dead"], ids=[row[0] for row in letters])
            for event_id, stream, shard, key in letters:
                if key is not None:
                    await tx.execute(self._sql["free_key"], stream=stream, shard=shard, key=key, id=event_id)
        return len(letters)
