"""Membership, polling and re-entry on SQL."""

from collections.abc import Sequence
from typing import Any

from pillarbox.event import Mode, Status
from pillarbox.sql.statements import Statements
from pillarbox.store import Grant, Work
from pillarbox.stores._errors import keepable
from pillarbox.stores.outbox_info import OutboxInfo
from pillarbox.stores.sql.database import Connection, Database
from pillarbox.version import __version__


def work_of(rows: Sequence[Any]) -> Work:
    """The work from the rows of a poll: kinds and numbers."""
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


async def reenter(tx: Connection, sql: Statements, stream: str, ids: Sequence[Any]) -> None:
    """Let events take new places at the end of their stream, in this order. The caller has locked them."""
    await tx.execute_many(sql["reenter"], [{"id": each, "stream": stream} for each in ids])


async def reenter_due(tx: Connection, sql: Statements, stream: str, limit: int) -> tuple[int, int]:
    """Make due events pending; returns how many entered at the end, and how many returned to their places."""
    due = await tx.fetch(sql["due"], stream=stream, limit=limit)
    scheduled = [each for each, status in due if status == Status.SCHEDULED]
    failed = [each for each, status in due if status == Status.FAILED]
    if scheduled:
        await reenter(tx, sql, stream, scheduled)
    if failed:
        await tx.execute(sql["return"], stream=stream, ids=failed)
    return len(scheduled), len(failed)


class SqlServing:
    """The part that registers workers and answers polls, on databases that cannot wake a relay."""

    def __init__(self, db: Database, sql: Statements, outbox: OutboxInfo) -> None:
        self._db, self._sql, self._outbox = db, sql, outbox

    async def announce(self, stream: str, mode: Mode, destination: str) -> None:
        shards = [{"stream": stream, "shard": shard} for shard in range(self._outbox.shards)]

        async def work(tx: Connection) -> None:
            await tx.execute(self._sql["announce"], stream=stream, mode=mode.value, destination=destination)
            await tx.execute_many(self._sql["announce_shard"], shards)

        await self._db.transact(work)

    async def join(self, stream: str, worker: str, seconds: float, circuit_error: str | None = None) -> None:
        error = None if circuit_error is None else keepable(circuit_error)
        values = {"seconds": seconds, "version": __version__, "circuit_error": error}
        await self._db.execute(self._sql["join"], stream=stream, worker=worker, **values)

    async def leave(self, stream: str, worker: str) -> None:
        await self._db.execute(self._sql["leave"], stream=stream, worker=worker)

    async def poll(self, stream: str, worker: str, grants: Sequence[Grant] | None) -> Work:
        shards = list(range(self._outbox.shards)) if grants is None else [grant.shard for grant in grants]
        return work_of(await self._db.fetch(self._sql["poll"], stream=stream, worker=worker, shards=shards))

    async def reenter_due(self, stream: str, limit: int) -> int:
        return sum(await self._db.transact(lambda tx: reenter_due(tx, self._sql, stream, limit)))

    async def doze(self, stream: str, worker: str, asleep: bool) -> None:
        """Nothing to do: the relay polls."""
