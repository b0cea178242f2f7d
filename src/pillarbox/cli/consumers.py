"""``pillarbox consumers``, and the part of ``pillarbox status`` that is about them."""

from collections.abc import Sequence
from typing import Any, Final

from pillarbox import operations
from pillarbox.cli import output
from pillarbox.cli.output import Column
from pillarbox.cli.parser import command
from pillarbox.cli.session import open_store
from pillarbox.cli.settings import Settings
from pillarbox.operations import ConsumerRow

_COLUMNS: Final = (
    Column("consumer", shrinks=True),
    Column("lag_events", "lag", right=True),
    Column("behind", right=True),
    Column("lanes", right=True),
    Column("held_keys", "held keys", right=True),
    Column("dead", right=True),
    Column("workers", right=True),
    Column("source", shrinks=True),
)


def add(group: Any) -> None:
    """Register the command."""
    command(group, "consumers", consumers, "show the consumers with a store: lag, lanes, held keys, dead letters")


async def consumers(chosen: Any) -> int:
    async with open_store(Settings.of(chosen)) as store:
        rows, where = await operations.consumer_status(store), store.description
    if chosen.json:
        output.print_json([operations.consumer_record(row) for row in rows])
    elif rows:
        print_consumers(rows)
    else:
        print(f"no consumer runs with {where} as its store, and none has dead letters there")
    return 0


def print_consumers(rows: Sequence[ConsumerRow]) -> None:
    """A table of consumers, and their processes."""
    marks: dict[tuple[int, str], bool] = {}
    lines = []
    for number, row in enumerate(rows):
        record = operations.consumer_record(row) | {"behind": output.duration(row.lag_seconds)}
        if row.paused_lanes:
            record["lanes"] = f"{row.lanes} ({row.paused_lanes} paused)"
            marks[number, "lanes"] = False
        if not row.live_workers:
            if row.workers:
                record["workers"] = "0 (not seen)"
            marks[number, "workers"] = True
        if row.dead:
            marks[number, "dead"] = True
        if any(worker.live and worker.report.failed_lanes for worker in row.workers):
            marks[number, "lanes"] = True
        lines.append(record)
    output.print_table(_COLUMNS, lines, marks)
    print()
    for row in rows:
        for line in _details(row):
            print(output.shown(line))


def _details(row: ConsumerRow) -> list[str]:
    name = row.consumer
    if row.live_workers:
        workers = ", ".join(f"{each.worker} ({output.count(each.report.lanes, 'lane')})" for each in row.workers)
        lines = [f"{name}: served by {workers}"]
    elif row.workers:
        lines = [f"{name}: no process is live; {row.workers[0].worker} was seen {_ago(row)} ago"]
    else:
        lines = [f"{name}: no process runs"]
    lines += [
        f"{name}: {worker.worker} gets no more messages of {each}"
        for worker in row.workers
        if worker.live
        for each in worker.report.failed_lanes.splitlines()
    ]
    if row.dead:
        lines.append(f"{name}: {output.count(row.dead, 'dead letter')}, see `pillarbox dead list --consumer {name}`")
    return lines


def _ago(row: ConsumerRow) -> str:
    return output.duration(row.workers[0].seen_seconds)
