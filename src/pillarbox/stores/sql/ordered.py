"""Ordered streams on SQL: shards that are owned, and turns on them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from pillarbox.event import Event, Status
from pillarbox.store import PARKED, Aside, Failure, Grant, KeyRun, Settlement, Work
from pillarbox.stores._errors import keepable
from pillarbox.stores._outbox import lost
from pillarbox.stores.sql.database import Connection
from pillarbox.stores.sql.rows import ADDED, ID, PAYLOAD, cut, error_line, event_from_row, events_from_rows
from pillarbox.stores.sql.schema import SchemaPart
from pillarbox.stores.sql.statements import POLL, POLL_SHARD, Statement

_LONG_AGO = -86_400.0


def fence(grant: Grant) -> dict[str, Any]:
    """The parameters that prove ownership."""
    return {"stream": grant.stream, "shard": grant.shard, "token": grant.token, "worker": grant.worker}


def _same(value: Any) -> Any:
    return value


class OrderedPart(SchemaPart):
    """The part of a SQL store that serves ordered streams."""

    _announced: set[str]
    _polls: dict[int, Statement]
    # How this driver's cells become Python's own types.
    _event: Callable[[Sequence[Any], str, Status], Event] = staticmethod(event_from_row)
    _batch: Callable[[Sequence[Any], str, Status], list[Event]] = staticmethod(events_from_rows)
    _as_uuid: Callable[[Any], Any] = staticmethod(_same)
    _as_instant: Callable[[Any], Any] = staticmethod(_same)

    async def join(self, stream: str, worker: str, seconds: float) -> None:
        if stream not in self._announced:
            async with self._db.transaction() as tx:
                await tx.execute(self._sql["announce"], stream=stream)
                shards = [{"stream": stream, "shard": shard} for shard in range(self._shards)]
                await tx.execute_many(self._sql["announce_shard"], shards)
            self._announced.add(stream)
        await self._db.execute(self._sql["join"], stream=stream, worker=worker, seconds=seconds)

    async def leave(self, stream: str, worker: str) -> None:
        await self._db.execute(self._sql["leave"], stream=stream, worker=worker, long_ago=_LONG_AGO)

    async def take(self, stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        async with self._db.transaction() as tx:
            rows = await tx.fetch(self._sql["takeable"], stream=stream, limit=limit)
            shards = [row[0] for row in rows]
            if not shards:
                return []
            await tx.execute(self._sql["take"], stream=stream, worker=worker, seconds=seconds, shards=shards)
            taken = await tx.fetch(self._sql["taken"], stream=stream, shards=shards)
        return [
            Grant(stream, shard, worker, token, unclean_count, self._as_uuid(suspect))
            for shard, token, unclean_count, suspect in taken
        ]

    async def renew(self, grants: Sequence[Grant], seconds: float) -> Collection[Grant]:
        # A row per statement: several leases locked by one deadlock with the settle of one of them.
        renew = self._sql["renew"]
        return [grant for grant in grants if await self._db.execute(renew, **fence(grant), seconds=seconds)]

    async def give(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            await self._db.execute(self._sql["give"], **fence(grant))

    async def poll(self, stream: str, worker: str, grants: Sequence[Grant] | None) -> Work:
        shards = range(self._shards) if grants is None else [grant.shard for grant in grants]
        values = {f"shard_{place}": shard for place, shard in enumerate(shards)}
        rows = await self._db.fetch(self._poll_statement(len(shards)), stream=stream, worker=worker, **values)
        return self._work(rows)

    @staticmethod
    def _work(rows: Sequence[Any]) -> Work:
        found: dict[str, list[int]] = {}
        for kind, number in rows:
            found.setdefault(kind, []).append(number)
        return Work(
            paused=found["paused"] != [0],
            live=found["live"][0],
            rank=found["rank"][0],
            free=found["free"][0],
            ready=frozenset(found.get("ready", ())),
            due=frozenset(found.get("due", ())),
            scheduled="scheduled" in found,
            suspects="suspects" in found,
        )

    def _poll_statement(self, shards: int) -> Statement:
        if shards not in self._polls:
            branches = [POLL_SHARD.format(n=place) for place in range(shards)]
            self._polls[shards] = self._statement(" UNION ALL ".join([POLL, *branches]))
        return self._polls[shards]

    async def keys_aside(self, grant: Grant) -> Collection[str]:
        rows = await self._db.fetch(self._sql["keys_aside"], stream=grant.stream, shard=grant.shard)
        return {row[0] for row in rows}

    async def read(self, grant: Grant, limit: int, max_bytes: int) -> Sequence[Event]:
        inline = max_bytes // limit
        rows = await self._db.fetch(self._sql["read"], **fence(grant), limit=limit, inline=inline)
        return await self._events(rows, grant.stream, max_bytes)

    async def _events(self, rows: Sequence[Any], stream: str, max_bytes: int) -> Sequence[Event]:
        """Pending events from the rows of a read, with the payloads that were left behind."""
        if any(row[ADDED] is not None for row in rows):
            rows = await self._with_payloads(rows, max_bytes)
        return self._batch(rows, stream, Status.PENDING)

    async def _with_payloads(self, rows: Sequence[Any], max_bytes: int) -> Sequence[Any]:
        kept = cut(rows, max_bytes)
        left_behind = [row[ID] for row in kept if row[ADDED] is not None]
        payloads = dict(await self._db.fetch(self._sql["payloads"], ids=left_behind))
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
        if any(row[ADDED] is not None for row in rows):
            rows = await self._with_payloads(rows, max_bytes)
        events = [self._event(row, grant.stream, Status(row[ADDED + 1])) for row in rows]
        return KeyRun(key, Aside(mode), events, self._as_uuid(dead_head))

    async def suspect(self, grant: Grant, event: Event | None) -> None:
        suspect = None if event is None else event.id
        if not await self._db.execute(self._sql["suspect"], **fence(grant), suspect=suspect):
            raise lost(grant)

    async def trust(self, grant: Grant, unclean_count: int = 0) -> None:
        if not await self._db.execute(self._sql["trust"], unclean_count=unclean_count, **fence(grant)):
            raise lost(grant)

    async def settle(self, grant: Grant, settlement: Settlement) -> Collection[str]:
        async with self._db.transaction() as tx:
            if not await tx.fetch(self._sql["fence"], **fence(grant)):
                raise lost(grant)
            return await self._settle(tx, grant, settlement)

    async def _settle(self, tx: Connection, grant: Grant, settlement: Settlement) -> Collection[str]:
        place = {"stream": grant.stream, "shard": grant.shard}
        # The keys' rows first: an operator who replays at this moment is seen by the statements that follow.
        keys = {event.key for event in settlement.held if event.key is not None}
        keys |= settlement.aside.keys() | set(settlement.release)
        modes: dict[str, str] = {}
        if keys:
            rows = await tx.fetch(self._sql["lock_keys"], **place, keys=sorted(keys))
            modes = dict(rows)
        await self._publish(tx, settlement)
        await self._fail(tx, "fail", settlement.failed)
        parked = [event for event in settlement.held if modes.get(event.key or "") == Aside.PARKED]
        held = [event.id for event in settlement.held if event.key in modes and modes[event.key] != Aside.PARKED]
        await self._bury(tx, [*settlement.dead, *(Failure(event, PARKED, event.attempts) for event in parked)])
        if held:
            await tx.execute(self._sql["hold"], ids=held)
        for key, (mode, delay, dead_head) in settlement.aside.items():
            aside = {"key": key, "mode": mode.value, "delay": delay, "dead_head": dead_head}
            await tx.execute(self._sql["set_aside"], **place, **aside)
            modes[key] = mode
        for key in settlement.release:
            if await tx.execute(self._sql["release_key"], **place, key=key):
                modes.pop(key, None)
        return modes.keys()

    async def _publish(self, tx: Connection, settlement: Settlement) -> None:
        if settlement.published:
            statement = self._sql["publish" if settlement.keep_published else "publish_delete"]
            await tx.execute(statement, ids=[event.id for event in settlement.published])

    async def _fail(self, tx: Connection, statement: str, failures: Sequence[Failure]) -> None:
        if failures:
            rows = [_failure_row(failure) | {"delay": failure.delay} for failure in failures]
            await tx.execute_many(self._sql[statement], rows)

    async def _bury(self, tx: Connection, failures: Sequence[Failure]) -> None:
        if failures:
            await self._bury_rows(tx, [_failure_row(failure) for failure in failures])

    async def _bury_rows(self, tx: Connection, rows: Sequence[dict[str, Any]]) -> None:
        ids = [row["id"] for row in rows]
        await tx.execute(self._sql["unbury"], ids=ids)
        await tx.execute_many(self._sql["bury"], rows)
        await tx.execute(self._sql["remove"], ids=ids)

    async def promote(self, stream: str, limit: int) -> int:
        async with self._db.transaction() as tx:
            rows = await tx.fetch(self._sql["due_ids"], stream=stream, limit=limit)
            return await tx.execute(self._sql["promote"], ids=[row[0] for row in rows]) if rows else 0


def _failure_row(failure: Failure) -> dict[str, Any]:
    error = keepable(failure.error)
    line = error_line(error, failure.attempts)
    return {"id": failure.event.id, "attempts": failure.attempts, "error": error, "line": line}
