"""Rows: speed and memory with a long backlog."""

import asyncio

from benchmarks.bed import Bed
from benchmarks.drains import Drains, row
from benchmarks.load import fill, waiting
from benchmarks.load_events import SHARDS
from benchmarks.report import Row
from benchmarks.rounds import in_turn
from benchmarks.scale import Scale

MEMORY_MB = 150.0
_PARTS = 4


def _many_waiting(bed: Bed, scale: Scale, name: str, url: str, count: int) -> Row:
    """The first part of a long backlog, against as many events in short backlogs. Short ones fill the batches too."""
    drains = Drains(bed, name)
    few, batch = scale.few_waiting, scale.few_waiting // SHARDS // 3
    # Enough that `count` events still wait in the last round, and in the row of the memory.
    fill(url, count + scale.rounds * (few * _PARTS + _for_memory(scale)), prefix="million")
    ours, floor = in_turn(
        scale.rounds,
        lambda: drains.run("ours", few * _PARTS, url=url, prefix="million", batch=batch),
        lambda: drains.run("ours", few, lambda: fill(url, few), url=url, batch=batch, refills=_PARTS - 1),
    )
    drains.close()
    return row(name, ours, floor, waiting=count, few_waiting=few)


def postgres(bed: Bed, scale: Scale) -> Row:
    return _many_waiting(bed, scale, "postgres-backlog-1m", bed.url, scale.waiting)


def postgres_most(bed: Bed, scale: Scale) -> Row:
    return _many_waiting(bed, scale, "postgres-backlog-5m", bed.url, scale.most_waiting)


def mysql(bed: Bed, scale: Scale) -> Row:
    return _many_waiting(bed, scale, "mysql-backlog-1m", bed.mysql.url, scale.waiting)


def mariadb(bed: Bed, scale: Scale) -> Row:
    return _many_waiting(bed, scale, "mariadb-backlog-1m", bed.mariadb.url, scale.waiting)


def mongo(bed: Bed, scale: Scale) -> Row:
    return _many_waiting(bed, scale, "mongo-backlog-1m", bed.mongo.url, scale.waiting)


def _for_memory(scale: Scale) -> int:
    return scale.waiting // 20


def memory(bed: Bed, scale: Scale) -> Row:
    """The highest memory use of a relay with a long backlog."""
    drains = Drains(bed, "postgres-memory")
    events = _for_memory(scale)
    wanted = scale.waiting + scale.rounds * events
    # Use the backlog that an earlier row left: loading takes long.
    if asyncio.run(waiting(bed.url, "million")) < wanted:
        fill(bed.url, wanted, prefix="million")
    found = [drains.run("ours", events, prefix="million")["peak_mb"] for _ in range(scale.rounds)]
    drains.close()
    return Row("postgres-memory", "MB", found, [MEMORY_MB] * len(found), against="limit")
