"""PostgreSQL's own parts: reads from a floor, one statement for a settle or a claim."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from pillarbox.names import Names
from pillarbox.sql.rows import ID, PLAIN, SEQ
from pillarbox.sql.statements import Statements
from pillarbox.store import Claim, Grant, Page, Settlement, Work
from pillarbox.stores._id_walk import IdWalk
from pillarbox.stores._tokens import new_token
from pillarbox.stores.outbox_info import OutboxInfo
from pillarbox.stores.postgres.floors import Floors
from pillarbox.stores.sql import Connection, Database
from pillarbox.stores.sql.claims import SqlClaims, claims_of
from pillarbox.stores.sql.operations import SqlRetention
from pillarbox.stores.sql.serving import SqlServing, reenter_due, work_of
from pillarbox.stores.sql.turns import SHARD, SqlTurns, fence, ids_of, joint_publishing, reading


@asynccontextmanager
async def migrating(db: Database, sql: Statements, names: Names) -> AsyncIterator[Connection]:
    """A transaction that no other migration of this outbox enters."""
    async with db.transaction() as tx:
        await tx.fetch(sql["lock_migration"], name=f"pillarbox {names.parts['meta']}")
        yield tx


class PostgresServing:
    """Serving: polls from the floors, and wake-ups by the database."""

    def __init__(self, db: Database, sql: Statements, outbox: OutboxInfo, floors: Floors, *, wake_up: bool) -> None:
        self._db, self._sql, self._outbox, self._floors, self._wake_up = db, sql, outbox, floors, wake_up
        self._sweep_at: dict[str, float] = {}
        shared = SqlServing(db, sql, outbox)
        self.announce, self.leave, self._join = shared.announce, shared.leave, shared.join

    async def join(self, stream: str, worker: str, seconds: float, circuit_error: str | None = None) -> None:
        await self._join(stream, worker, seconds, circuit_error)
        await self._db.execute(self._sql["wake_dead"])

    async def poll(self, stream: str, worker: str, grants: Sequence[Grant] | None) -> Work:
        if grants is None:
            shards = list(range(self._outbox.shards))
            return await self._poll_from(stream, worker, shards, [0] * len(shards))
        begun = time.monotonic()
        sweep = begun >= self._sweep_at.get(stream, 0.0)
        floors = [0 if sweep else self._floors.floor(grant) for grant in grants]
        work = await self._poll_from(stream, worker, [grant.shard for grant in grants], floors)
        if sweep:
            self._sweep_at[stream] = Floors.next_sweep(begun, time.monotonic())
            for grant in grants:
                if grant.shard in work.ready:
                    self._floors.sweep(grant)
        return work

    async def _poll_from(self, stream: str, worker: str, shards: list[int], floors: list[int]) -> Work:
        values = {"stream": stream, "worker": worker, "shards": shards, "floors": floors}
        return work_of(await self._db.fetch(self._sql["poll"], **values))

    async def reenter_due(self, stream: str, limit: int) -> int:
        entered, returned = await self._db.transact(lambda tx: reenter_due(tx, self._sql, stream, limit))
        if returned:
            self._floors.sweep_all()
            self._sweep_at.pop(stream, None)
        return entered + returned

    async def doze(self, stream: str, worker: str, asleep: bool) -> None:
        if self._wake_up:
            await self._db.execute(self._sql["doze" if asleep else "wake"], stream=stream, worker=worker)


class PostgresTurns:
    """Reads from the floors, and settles in one statement."""

    def __init__(self, db: Database, sql: Statements, floors: Floors) -> None:
        self._db, self._sql, self._floors = db, sql, floors
        shared = SqlTurns(
            db,
            sql,
            PLAIN,
            settle_joint=self._settle_joint,
            read=self._read,
            settle_published=self._settle_published,
        )
        self.take, self.note_suspect, self.set_crashes = shared.take, shared.note_suspect, shared.set_crashes
        self.held_keys, self.read, self.read_due = shared.held_keys, shared.read, shared.read_due
        self.settle, self.renew, self._give = shared.settle, shared.renew, shared.give
        self.settle_ticket, self.settled_batch = shared.settle_ticket, shared.settled_batch

    async def give(self, grants: Sequence[Grant]) -> None:
        self._floors.forget(grants)
        await self._give(grants)

    async def _read(self, grants: Sequence[Grant], limit: int, inline: int) -> Sequence[Any]:
        begun = time.monotonic()
        if self._floors.look_due(begun):
            await self._look()
            begun = time.monotonic()
        floors = [self._floors.start(grant, begun) for grant in grants]
        statement, values = reading(self._sql, grants, limit, inline)
        rows = await self._db.fetch(statement, **values, floor=floors[0], floors=floors)
        if rows and rows[0][ID] is None:
            return []  # the stream is paused: nothing was looked at, and no floor may rise
        if len(grants) == 1:
            lowest = {grants[0].shard: rows[0][SEQ]} if rows else {}
        else:
            lowest = {row[SHARD]: row[SEQ] for row in reversed(rows)}
        ended = time.monotonic()
        for grant, floor in zip(grants, floors, strict=True):
            # A read that reached its limit says nothing about shards that it has nothing of.
            if grant.shard in lowest or len(rows) < limit:
                self._floors.done(grant, floor, lowest.get(grant.shard), begun, ended)
        return rows

    async def _look(self) -> None:
        try:
            ((last, xid, xmin),) = await self._db.fetch(self._sql["look"])
        except BaseException:
            self._floors.look_failed()
            raise
        self._floors.looked(time.monotonic(), last, xid, xmin)

    async def _settle_published(self, settlement: Settlement) -> bool:
        proof, ids = fence(settlement.grant), ids_of(settlement.published)
        statement = self._sql["publish_fenced" if settlement.keep_published else "delete_fenced"]
        changed = await self._db.execute(statement, **proof, ids=ids)
        # Fewer: done before by a settle whose answer was lost, or not ours to do any more.
        return changed == len(ids) or bool(await self._db.fetch(self._sql["fence"], **proof))

    async def _settle_joint(self, settlements: Sequence[Settlement]) -> bool:
        statement, values = joint_publishing(self._sql, settlements)
        return await self._db.execute(statement, **values) == len(values["ids"])


class PostgresClaims:
    """Claims in one statement."""

    def __init__(self, db: Database, sql: Statements) -> None:
        self._db, self._sql = db, sql
        shared = SqlClaims(db, sql, PLAIN)
        self.renew_claims, self.settle_claims, self.rescue = shared.renew_claims, shared.settle_claims, shared.rescue

    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        statement = self._sql["claim_suspect" if shard is None else "claim"]
        values = {
            "stream": stream,
            "shard": shard,
            "worker": worker,
            "token": new_token(),
            "limit": limit,
            "seconds": seconds,
        }
        rows = await self._db.fetch(statement, **values)
        return sorted(claims_of(PLAIN, rows, stream), key=lambda claim: claim.event.seq)


class PostgresRetention:
    """Deletes what is old, along the ids: seq has no index of its own."""

    def __init__(self, db: Database, sql: Statements) -> None:
        self._db, self._sql = db, sql
        shared = SqlRetention(db, sql)
        self.prune_dead, self.prune_inbox = shared.prune_dead, shared.prune_inbox
        self.prune_idempotency = shared.prune_idempotency

    async def prune_published(self, keep_seconds: float, limit: int, after: tuple[UUID, str] | None = None) -> Page:
        ((_, now),) = await self._db.fetch(self._sql["clock"])
        last_id, last_stream = after or (None, "")
        walk = IdWalk(now, keep_seconds, last_id)
        values = {"id": walk.start, "stream": last_stream, "keep": keep_seconds, "limit": limit}
        rows = [row for row in await self._db.fetch(self._sql["prune_page"], **values) if row[0] < walk.bound]
        ids = [event_id for event_id, _, can_go in rows if can_go]
        deleted = await self._db.execute(self._sql["prune"], ids=ids, keep=keep_seconds) if ids else 0
        following = walk.next([row[0] for row in rows], limit)
        if following is None:
            return Page(deleted, None)
        return Page(deleted, (following, rows[-1][1] if len(rows) == limit else ""))
