"""The changes for events that failed or died, in ordered streams and in queues."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pillarbox.sql.statements import Statements
from pillarbox.store import Failure
from pillarbox.stores._errors import MOST_ATTEMPTS, error_entry, keepable
from pillarbox.stores.sql.database import Connection


def failure_row(event_id: Any, stream: str, error: str, attempts: int) -> dict[str, Any]:
    """The parameters of an event that failed or died."""
    error, attempts = keepable(error), min(attempts, MOST_ATTEMPTS)
    line = json.dumps(error_entry(error, attempts), ensure_ascii=False) + "\n"
    return {"id": event_id, "stream": stream, "error": error, "attempts": attempts, "line": line}


async def fail(tx: Connection, sql: Statements, stream: str, failures: Sequence[Failure]) -> None:
    if failures:
        rows = [
            failure_row(each.event.id, stream, each.error, each.attempts) | {"delay": each.delay, "suspect": 0}
            for each in failures
        ]
        await tx.execute_many(sql["fail"], rows)


async def move_to_dead(tx: Connection, sql: Statements, stream: str, failures: Sequence[Failure]) -> None:
    rows = [failure_row(each.event.id, stream, each.error, each.attempts) for each in failures]
    await move_rows_to_dead(tx, sql, stream, rows)


async def move_rows_to_dead(tx: Connection, sql: Statements, stream: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        await tx.execute_many(sql["forget_dead"], rows)
        await tx.execute_many(sql["move_to_dead"], rows)
        await tx.execute(sql["remove"], stream=stream, ids=[row["id"] for row in rows])
