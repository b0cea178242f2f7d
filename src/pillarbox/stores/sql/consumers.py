"""Dead letters of consumers on SQL, and the processes of consumers."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from pillarbox.event import Event, Status
from pillarbox.sql.columns import event_row
from pillarbox.sql.rows import ADDED, Rows
from pillarbox.sql.statements import Statements
from pillarbox.store import ConsumerReport, ConsumerStatus, Failure, Replay
from pillarbox.stores._errors import MOST_ATTEMPTS, keepable
from pillarbox.stores._letters import entries, longer, statuses, storable
from pillarbox.stores._tokens import new_token
from pillarbox.stores.sql.database import Connection, Database


class SqlConsumers:
    """The part that serves consumers."""

    def __init__(self, db: Database, sql: Statements, rows: Rows) -> None:
        self._db, self._sql, self._rows = db, sql, rows

    async def bury(self, consumer: str, failure: Failure, earlier: Sequence[Mapping[str, Any]] = ()) -> bool:
        event = storable(failure.event)
        place = {"id": event.id, "stream": event.stream, "consumer": consumer}
        died = {"error": keepable(failure.error), "attempts": min(failure.attempts, MOST_ATTEMPTS)}
        added = entries(failure, earlier)

        async def work(tx: Connection) -> bool:
            # The letter first, as an operator does: else the two could wait for each other.
            letters = await tx.fetch(self._sql["lock_letter"], **place)
            if not await self._count_as_applied(tx, consumer, event, is_dead=True):
                return False
            # The copy that this one waited for may have died, and an operator may have replayed it since.
            letters = letters or await tx.fetch(self._sql["lock_letter"], **place)
            if letters:
                errors = longer(letters[0][0], added)
                await tx.execute(self._sql["bury_again"], **place, **died, errors=errors)
            else:
                row = {**event_row(event), "created_at": event.created_at, **place, **died}
                await tx.execute(self._sql["bury"], **row, errors=longer(None, added))
            return True

        return await self._db.transact(work)

    async def _count_as_applied(self, tx: Connection, consumer: str, event: Event, *, is_dead: bool) -> bool:
        """False: it did already."""
        about = {"aggregate_id": event.aggregate_id, "aggregate_version": event.aggregate_version}
        statement = self._sql["count_as_applied"]
        return await tx.execute(statement, consumer=consumer, id=event.id, **about, dead=is_dead) == 1

    async def take_replays(self, consumer: str, worker: str, limit: int, seconds: float) -> Sequence[Replay]:
        token = new_token()

        async def work(tx: Connection) -> Sequence[Any]:
            rows = await tx.fetch(self._sql["due_replays"], consumer=consumer, limit=limit)
            if rows:
                mine = {"consumer": consumer, "ids": [self._id(row) for row in rows]}
                own = {"worker": worker, "token": token, "seconds": seconds}
                await tx.execute(self._sql["lease_replays"], **mine, **own)
            return rows

        return [
            Replay(
                self._rows.event(row[:ADDED], row[ADDED], Status.PENDING)._replace(attempts=0), row[ADDED + 1], token
            )
            for row in await self._db.transact(work)
        ]

    def _id(self, row: Sequence[Any]) -> UUID:
        return self._rows.uuid(row[0])

    async def finish_replay(self, consumer: str, replay: Replay) -> bool:
        event = replay.event
        mine = {"id": event.id, "stream": event.stream, "consumer": consumer, "token": replay.token}

        async def work(tx: Connection) -> bool:
            if not await tx.execute(self._sql["finish_replay"], **mine):
                return False
            await self._count_as_applied(tx, consumer, event, is_dead=False)
            return True

        return await self._db.transact(work)

    async def report(self, consumer: str, worker: str, report: ConsumerReport, seconds: float) -> None:
        texts = {"source": keepable(report.source)[:255], "failed_lanes": keepable(report.failed_lanes)}
        values = report._asdict() | texts
        await self._db.execute(self._sql["report"], consumer=consumer, worker=worker, seconds=seconds, **values)

    async def leave_consumer(self, consumer: str, worker: str) -> None:
        await self._db.execute(self._sql["leave_consumer"], consumer=consumer, worker=worker)

    async def consumers(self) -> Sequence[ConsumerStatus]:
        instant = self._rows.instant
        rows = await self._db.fetch(self._sql["consumers"])
        now = instant((await self._db.fetch(self._sql["clock"]))[0][0])
        return statuses(
            now,
            [
                (consumer, name, instant(seen_at), instant(seen_until), ConsumerReport(*report))
                for consumer, name, seen_at, seen_until, *report in rows
            ],
        )

    async def dead_count(self, consumer: str) -> int:
        count: int = (await self._db.fetch(self._sql["count_dead_of"], consumer=consumer))[0][0]
        return count

    async def dead_consumers(self) -> Mapping[str, int]:
        return dict(await self._db.fetch(self._sql["dead_consumers"]))
