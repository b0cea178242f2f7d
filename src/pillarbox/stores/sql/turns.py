"""Turns on SQL: leases of shards, reading, settling."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias
from uuid import UUID

from pillarbox.batch import Part
from pillarbox.event import Event, Status
from pillarbox.sql.rows import ADDED, ID, PAYLOAD, Rows, cut, readable
from pillarbox.sql.statements import SqlText, Statements
from pillarbox.store import PARKED, Failure, Grant, HoldMode, KeyRun, Progress, Settlement
from pillarbox.store.ticket import Ticket, unsettled
from pillarbox.stores._tokens import new_token
from pillarbox.stores.outbox_info import lost
from pillarbox.stores.sql.database import Connection, Database
from pillarbox.stores.sql.results import fail, move_to_dead
from pillarbox.unreadable import CANNOT_READ

# Reads the rows of the pending events of some shards: at most so many, without payloads of more than so many bytes.
Read: TypeAlias = Callable[[Sequence[Grant], int, int], Awaitable[Sequence[Any]]]
# Settles a turn in which everything was published, in one round trip; False: the shard is lost.
SettlePublished: TypeAlias = Callable[[Settlement], Awaitable[bool]]
# Settles such turns of several shards together; False: at least one may be lost, so settle each by itself.
SettleJoint: TypeAlias = Callable[[Sequence[Settlement]], Awaitable[bool]]

SHARD: Final = ADDED + 1  # the column in the rows of read_joint


def fence(grant: Grant) -> dict[str, Any]:
    """The parameters that prove ownership."""
    return {"stream": grant.stream, "shard": grant.shard, "token": grant.token, "worker": grant.worker}


def joint_fence(grants: Sequence[Grant]) -> dict[str, Any]:
    """The parameters that prove ownership of several shards of one stream."""
    return {
        "stream": grants[0].stream,
        "worker": grants[0].worker,
        "shards": [grant.shard for grant in grants],
        "tokens": [grant.token for grant in grants],
    }


def reading(sql: Statements, grants: Sequence[Grant], limit: int, inline: int) -> tuple[SqlText, dict[str, Any]]:
    """The statement that reads these shards, and its parameters."""
    size = {"limit": limit, "inline": inline}
    if len(grants) > 1:
        return sql["read_joint"], {**joint_fence(grants), **size}
    # One shard has a statement of its own: at full load that is every read, and it checks the lease only once.
    return sql["read"], {**fence(grants[0]), **size}


def joint_publishing(sql: Statements, settlements: Sequence[Settlement]) -> tuple[SqlText, dict[str, Any]]:
    """The statement that settles turns of several shards together, and its parameters."""
    keep = settlements[0].keep_published
    ids = [event.id for settlement in settlements for event in settlement.published]
    return sql["publish_joint" if keep else "delete_joint"], {
        **joint_fence([settlement.grant for settlement in settlements]),
        "ids": ids,
    }


def ids_of(events: Sequence[Event]) -> list[UUID]:
    return [event.id for event in events]


class SqlTurns:
    """Turns. ``read`` and ``settle_published`` are given where a database has a way of its own."""

    def __init__(
        self,
        db: Database,
        sql: Statements,
        rows: Rows,
        *,
        settle_joint: SettleJoint,
        read: Read | None = None,
        settle_published: SettlePublished | None = None,
    ) -> None:
        self._db, self._sql, self._rows = db, sql, rows
        self._read = read or self._read_from_the_start
        self._settle_published, self._settle_joint = settle_published, settle_joint

    async def take(self, stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        async def work(tx: Connection) -> Sequence[Any]:
            owners = {row[0]: row[1] for row in await tx.fetch(self._sql["takeable"], stream=stream, limit=limit)}
            if not owners:
                return []
            shards = list(owners)
            own = {"worker": worker, "token": new_token(), "seconds": seconds}
            await tx.execute(self._sql["take"], stream=stream, shards=shards, **own)
            taken = await tx.fetch(self._sql["taken"], stream=stream, shards=shards)
            return [(*row, owners[row[0]]) for row in taken]

        return [
            Grant(stream, shard, worker, token, crashes, suspect and self._rows.uuid(suspect), alone, previous)
            for shard, token, crashes, suspect, alone, previous in await self._db.transact(work)
        ]

    async def renew(self, grants: Sequence[Grant], seconds: float) -> Collection[Grant]:
        if self._db.can_skip_locked and len({(grant.stream, grant.worker) for grant in grants}) == 1:
            renewed = await self._db.execute(self._sql["renew_all"], **joint_fence(grants), seconds=seconds)
            if renewed == len(grants):
                return grants
        # One is lost, or is being settled now: each by itself waits for its settle, and says whether it is still ours.
        renew = self._sql["renew"]
        return [grant for grant in grants if await self._db.execute(renew, **fence(grant), seconds=seconds)]

    async def give(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            await self._db.execute(self._sql["give"], **fence(grant))

    async def note_suspect(self, grant: Grant, event_id: UUID | None, alone: int = 0) -> None:
        if not await self._db.execute(self._sql["note_suspect"], **fence(grant), suspect=event_id, alone=alone):
            raise lost(grant)

    async def set_crashes(self, grant: Grant, crashes: int) -> None:
        if not await self._db.execute(self._sql["set_crashes"], **fence(grant), crashes=crashes):
            raise lost(grant)

    async def held_keys(self, grant: Grant) -> Collection[str]:
        rows = await self._db.fetch(self._sql["held_keys"], stream=grant.stream, shard=grant.shard)
        return {row[0] for row in rows}

    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        rows = await self._read(grants, limit, max_bytes // limit) if grants else ()
        if rows:
            rows = await self._with_payloads(grants[0].stream, rows, max_bytes)
        if not rows:
            return []
        if len(grants) == 1:
            return [self._part(grants[0], rows)]
        found: dict[int, list[Any]] = {}
        for row in rows:
            found.setdefault(row[SHARD], []).append(row)
        return [self._part(grant, found[grant.shard]) for grant in grants if grant.shard in found]

    def _part(self, grant: Grant, rows: Sequence[Any]) -> Part:
        try:
            return Part(grant.shard, grant.token, self._rows.events(rows, grant.stream, Status.PENDING))
        except CANNOT_READ:
            events, reason = readable(self._rows, rows, grant.stream, lambda _: Status.PENDING)
            return Part(grant.shard, grant.token, events, unreadable=reason)

    async def _read_from_the_start(self, grants: Sequence[Grant], limit: int, inline: int) -> Sequence[Any]:
        statement, values = reading(self._sql, grants, limit, inline)
        return await self._db.fetch(statement, **values)

    async def _with_payloads(self, stream: str, rows: Sequence[Any], max_bytes: int) -> Sequence[Any]:
        """The rows of a read, cut to ``max_bytes``, with the payloads that the read did not load."""
        if not any(row[ADDED] is not None for row in rows):
            return rows
        kept = cut(rows, max_bytes)
        left_behind = [row[ID] for row in kept if row[ADDED] is not None]
        payloads = dict(await self._db.fetch(self._sql["payloads"], stream=stream, ids=left_behind))
        for place, row in enumerate(kept):
            if row[ADDED] is not None:
                if row[ID] not in payloads:
                    return kept[:place]  # settled and deleted meanwhile, by a new owner
                row[PAYLOAD] = payloads[row[ID]]
        return kept

    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        due = await self._db.fetch(self._sql["due_key"], stream=grant.stream, shard=grant.shard)
        if not due:
            return None
        key, mode, dead_head = due[0]
        inline = max_bytes // limit
        rows = await self._db.fetch(self._sql["read_key"], **fence(grant), key=key, limit=limit, inline=inline)
        rows = await self._with_payloads(grant.stream, rows, max_bytes)
        events, reason = readable(self._rows, rows, grant.stream, lambda row: Status(row[ADDED + 1]))
        return KeyRun(key, HoldMode(mode), events, dead_head and self._rows.uuid(dead_head), unreadable=reason)

    async def settle(self, settlements: Sequence[Settlement]) -> Mapping[int, Collection[str]]:
        held: dict[int, Collection[str]] = {}
        joint = [settlement for settlement in settlements if settlement.only_published]
        kinds = {(each.grant.stream, each.grant.worker, each.keep_published) for each in joint}
        # A single one has a faster statement of its own, on some databases.
        together = len(joint) > 1 or self._settle_published is None
        if together and len(kinds) == 1 and await self._settle_joint(joint):
            held = {settlement.grant.shard: () for settlement in joint}
        for settlement in settlements:
            if settlement.grant.shard in held:
                continue
            if self._settle_published is not None and settlement.only_published:
                keys: Collection[str] | None = () if await self._settle_published(settlement) else None
            else:
                keys = await self._db.transact(partial(self._settle, settlement))
            if keys is not None:
                held[settlement.grant.shard] = keys
        return held

    async def settle_ticket(self, grant: Grant, ticket: bytes, *, keep_published: bool = True) -> Progress:
        sql, proof = self._sql, fence(grant)

        async def work(tx: Connection) -> Progress:
            found = await tx.fetch(sql["settled_batch"], **proof)
            if not found:
                raise lost(grant)
            settled = found[0][0] and self._rows.uuid(found[0][0])
            todo = unsettled(ticket, settled, grant)
            if todo is None:
                return Progress(settled)
            events = {"stream": grant.stream, "ids": list(todo.ids)}
            present = {self._rows.uuid(row[0]) for row in await tx.fetch(sql["present"], **events)}
            changed = await tx.execute(sql["publish" if keep_published else "remove"], **events)
            await tx.execute(sql["note_batch"], **proof, batch=todo.batch, before=todo.before)
            return Progress(todo.batch, changed, tuple(each for each in todo.ids if each not in present))

        return await self._db.transact(work)

    async def settled_batch(self, grant: Grant) -> UUID | None:
        found = await self._db.fetch(self._sql["last_batch"], **fence(grant))
        if not found:
            raise lost(grant)
        return self._rows.uuid(found[0][0]) if found[0][0] else None

    async def _fence(self, settlement: Settlement, tx: Connection) -> bool:
        """Whether the shard is ours until the transaction ends."""
        proof = fence(settlement.grant)
        if settlement.ticket:
            batch, before, _ = Ticket.read(settlement.ticket)
            return bool(await tx.execute(self._sql["note_batch"], **proof, batch=batch, before=before))
        return bool(await tx.fetch(self._sql["fence"], **proof))

    async def _settle(self, settlement: Settlement, tx: Connection) -> Collection[str] | None:
        """The keys that are held now; None: the shard is lost."""
        grant, sql = settlement.grant, self._sql
        if not await self._fence(settlement, tx):
            return None
        place = {"stream": grant.stream, "shard": grant.shard}
        # The keys' rows first, so that the next statements see what an operator replays now.
        keys = {event.key for event in settlement.held if event.key is not None}
        keys |= settlement.hold_keys.keys() | set(settlement.release_keys)
        modes: dict[str, str] = {}
        if keys:
            modes = dict(await tx.fetch(sql["lock_keys"], **place, keys=sorted(keys)))
        if settlement.published:
            statement = sql["publish" if settlement.keep_published else "remove"]
            await tx.execute(statement, stream=grant.stream, ids=ids_of(settlement.published))
        await fail(tx, sql, grant.stream, settlement.failed)
        parked = [event for event in settlement.held if modes.get(event.key or "") == HoldMode.PARKED]
        behind = [Failure(event, PARKED, event.attempts) for event in parked]
        await move_to_dead(tx, sql, grant.stream, [*settlement.dead, *behind])
        waiting = [event for event in settlement.held if event.key in modes and modes[event.key] != HoldMode.PARKED]
        if waiting:
            await tx.execute(sql["hold"], stream=grant.stream, ids=ids_of(waiting))
        own_dead = {failure.event.id for failure in settlement.dead}
        for key, (mode, delay, dead_head) in settlement.hold_keys.items():
            # It was parked when it was read, and an operator has freed it since: nobody would free it again.
            if mode is HoldMode.PARKED and dead_head not in own_dead and modes.get(key) != HoldMode.PARKED:
                continue
            hold = {"key": key, "mode": mode.value, "delay": delay, "dead_head": dead_head}
            await tx.execute(sql["hold_key"], **place, **hold)
            modes[key] = mode
        for key in settlement.release_keys:
            if await tx.execute(sql["release_key"], **place, key=key):
                modes.pop(key, None)
        return modes.keys()
