"""Queue streams on SQL: events that are leased one by one."""

from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

from pillarbox.event import Status
from pillarbox.store import Claim, Rescued, Settlement
from pillarbox.stores._errors import CRASHED
from pillarbox.stores.sql.ordered import OrderedPart
from pillarbox.stores.sql.rows import ADDED, error_line


class QueuePart(OrderedPart):
    """The part of a SQL store that serves queue streams."""

    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        async with self._db.transaction() as tx:
            if shard is None:
                found = await tx.fetch(self._sql["suspect_ids"], stream=stream)
            else:
                found = await tx.fetch(self._sql["ready_ids"], stream=stream, shard=shard, limit=limit)
            ids = [row[0] for row in found]
            if not ids:
                return []
            await tx.execute(self._sql["claim"], ids=ids, worker=worker, seconds=seconds)
            rows = await tx.fetch(self._sql["claimed"], ids=ids)
        return [Claim(self._event(row, stream, Status.PROCESSING), row[ADDED]) for row in rows]

    async def renew_claims(self, claims: Sequence[Claim], seconds: float) -> Collection[UUID]:
        renew = self._sql["renew_claim"]
        return [
            claim.event.id
            for claim in claims
            if await self._db.execute(renew, id=claim.event.id, token=claim.token, seconds=seconds)
        ]

    async def settle_claims(self, claims: Sequence[Claim], settlement: Settlement, refund: Sequence[UUID] = ()) -> int:
        wanted = {claim.event.id: claim.token for claim in claims}
        async with self._db.transaction() as tx:
            rows = await tx.fetch(self._sql["lock_claim"], ids=list(wanted))
            held = {self._as_uuid(event_id): token for event_id, token in rows}
            mine = {event_id for event_id, token in held.items() if wanted[event_id] == token}
            published = [event.id for event in settlement.published if event.id in mine]
            if published:
                statement = "publish_claims" if settlement.keep_published else "remove"
                await tx.execute(self._sql[statement], ids=published)
            await self._fail(tx, "fail_claim", [failure for failure in settlement.failed if failure.event.id in mine])
            await self._bury(tx, [failure for failure in settlement.dead if failure.event.id in mine])
            back = [event_id for event_id in refund if event_id in mine]
            if back:
                await tx.execute(self._sql["refund"], ids=back)
        return len(wanted) - len(mine)

    async def rescue(self, stream: str, stuck_seconds: float, max_attempts: int, limit: int) -> Rescued:
        retried: list[dict[str, Any]] = []
        dead: list[dict[str, Any]] = []
        async with self._db.transaction() as tx:
            rows = await tx.fetch(self._sql["stuck"], stream=stream, stuck=-stuck_seconds, limit=limit)
            for event_id, attempts, own_limit, suspect in rows:
                # Only a crash while it was worked alone is this event's own: else the attempt is given back.
                charged = attempts if suspect else attempts - 1
                over = suspect and charged >= (own_limit or max_attempts)
                line = error_line(CRASHED, charged)
                (dead if over else retried).append(
                    {"id": event_id, "attempts": charged, "error": CRASHED, "line": line}
                )
            if retried:
                await tx.execute_many(self._sql["rescue"], retried)
            if dead:
                await self._bury_rows(tx, dead)
        return Rescued(len(retried), len(dead))
