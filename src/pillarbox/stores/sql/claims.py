"""Queue streams on SQL: events that are leased one by one."""

from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

from pillarbox.event import Status
from pillarbox.sql.rows import ADDED, Rows, readable
from pillarbox.sql.statements import Statements
from pillarbox.store import CRASHES_ALONE, Claim, ClaimResults, Rescued
from pillarbox.stores._errors import CRASHED, DEAD_OF_CRASHES
from pillarbox.stores._tokens import new_token
from pillarbox.stores.sql.database import Connection, Database
from pillarbox.stores.sql.results import fail, failure_row, move_rows_to_dead, move_to_dead


def claims_of(rows: Rows, found: Sequence[Any], stream: str) -> list[Claim]:
    """The claims of rows of events, each with its token behind the columns of the event."""
    claims = []
    for row in found:
        (event,), reason = readable(rows, [row], stream, lambda _: Status.PROCESSING)
        claims.append(Claim(event, row[ADDED], reason))
    return claims


class SqlClaims:
    """The part that leases single events: found, locked and leased in one transaction."""

    def __init__(self, db: Database, sql: Statements, rows: Rows) -> None:
        self._db, self._sql, self._rows = db, sql, rows

    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        async def work(tx: Connection) -> Sequence[Any]:
            if shard is None:
                found = await tx.fetch(self._sql["suspects"], stream=stream)
            else:
                found = await tx.fetch(self._sql["ready"], stream=stream, shard=shard, limit=limit)
            ids = [row[0] for row in found]
            if not ids:
                return []
            own = {"worker": worker, "token": new_token(), "seconds": seconds}
            await tx.execute(self._sql["claim"], stream=stream, ids=ids, **own)
            return await tx.fetch(self._sql["claimed"], stream=stream, ids=ids)

        rows = await self._db.transact(work)
        return claims_of(self._rows, rows, stream)

    async def renew_claims(self, claims: Sequence[Claim], seconds: float) -> Collection[UUID]:
        renewed = []
        for claim in claims:
            event = claim.event
            row = {"id": event.id, "stream": event.stream, "token": claim.token, "seconds": seconds}
            if await self._db.execute(self._sql["renew_claim"], **row):
                renewed.append(event.id)
        return renewed

    async def settle_claims(self, claims: Sequence[Claim], results: ClaimResults) -> int:
        if not claims:
            return 0
        stream = claims[0].event.stream
        wanted = {claim.event.id: claim.token for claim in claims}

        async def work(tx: Connection) -> int:
            rows = await tx.fetch(self._sql["lock_claims"], stream=stream, ids=list(wanted))
            tokens = {self._rows.uuid(row[0]): row[1] for row in rows}
            mine = {event_id for event_id, token in tokens.items() if wanted[event_id] == token}
            published = [event.id for event in results.published if event.id in mine]
            if published:
                statement = "publish_claims" if results.keep_published else "remove"
                await tx.execute(self._sql[statement], stream=stream, ids=published)
            await fail(tx, self._sql, stream, [each for each in results.failed if each.event.id in mine])
            await move_to_dead(tx, self._sql, stream, [each for each in results.dead if each.event.id in mine])
            back = [event.id for event in results.refund if event.id in mine]
            if back:
                await tx.execute(self._sql["refund"], stream=stream, ids=back)
            return len(wanted) - len(mine)

        return await self._db.transact(work)

    async def rescue(self, stream: str, stuck_seconds: float, limit: int) -> Rescued:
        async def work(tx: Connection) -> Rescued:
            retried: list[dict[str, Any]] = []
            dead: list[dict[str, Any]] = []
            rows = await tx.fetch(self._sql["stuck"], stream=stream, stuck=stuck_seconds, limit=limit)
            for event_id, attempts, crashes in rows:
                # The attempt is refunded. A suspect was alone in all crashes but the first.
                if crashes < CRASHES_ALONE:
                    row = failure_row(event_id, stream, CRASHED, attempts - 1)
                    retried.append(row | {"delay": 0.0, "suspect": crashes + 1})
                else:
                    dead.append(failure_row(event_id, stream, DEAD_OF_CRASHES, attempts - 1))
            if retried:
                await tx.execute_many(self._sql["fail"], retried)
            await move_rows_to_dead(tx, self._sql, stream, dead)
            return Rescued(len(retried), len(dead))

        return await self._db.transact(work)
