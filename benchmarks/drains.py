"""The rows that measure how fast a backlog is published."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.load import fill, fill_postgres, fill_sqlite
from benchmarks.load_events import SHARDS
from benchmarks.report import Bar, Row
from tests.servers import Server

SLOTS = 4
BATCH = 2000
MEMORY_MB = 150.0


@dataclass(frozen=True)
class Scale:
    """How much a run does."""

    rounds: int = 3
    events: int = 200_000
    waiting: int = 1_000_000
    few_waiting: int = 20_000
    held: int = 100_000
    latency_seconds: float = 6.0
    idle_seconds: float = 10.0


QUICK = Scale(
    rounds=3,
    events=40_000,
    waiting=200_000,
    few_waiting=10_000,
    held=20_000,
    latency_seconds=2.0,
    idle_seconds=5.0,
)


class Drains:
    """Runs drains in processes of their own, and checks that each event went to the broker once."""

    def __init__(self, bed: Bed, name: str) -> None:
        self._bed = bed
        self._name = name
        self._topic = bed.topic(name)
        self._sent = 0

    def run(
        self, module: str, events: int, python: Path | None = None, strict: bool = True, **settings: Any
    ) -> dict[str, Any]:
        """One measured process; the answer of :class:`benchmarks.clock.Clock`, and how many messages came of it.
        ``strict`` is for ours: a peer may send more than it settles, and is not stopped for it."""
        told: dict[str, Any] = {
            "servers": self._bed.servers,
            "topic": self._topic,
            "url": self._bed.url,
            "prefix": "outbox",
            "shards": SHARDS,
            "slots": SLOTS,
            "batch": BATCH,
            "keep": True,
            "events": events,
            **settings,
        }
        with Child(module, told, self._bed.folder, python) as child:
            found = child.answer()
        sent = self._bed.messages(self._topic)
        found["messages"] = sent - self._sent
        if found["messages"] < found["settled"] or (strict and found["messages"] > found["settled"]):
            raise RuntimeError(f"{module} settled {found['settled']} events, the broker has {found['messages']}")
        self._sent = sent
        say(
            f"  {self._name}: {module:14} {found['per_second']:8,.0f} events/s, "
            f"{found['cpu_us_per_event']:.1f} us of CPU per event, {found['turns']} turns"
        )
        return found

    def close(self) -> None:
        self._bed.drop_topic(self._topic)


def _row(name: str, bar: Bar, ours: list[dict[str, Any]], floor: list[dict[str, Any]], **extra: Any) -> Row:
    def cpu(found: list[dict[str, Any]]) -> float:
        return float(statistics.median(each["cpu_us_per_event"] for each in found))

    return Row(
        name,
        "events/s",
        bar,
        [each["per_second"] for each in ours],
        [each["per_second"] for each in floor],
        {"ours_cpu_us_per_event": cpu(ours), "floor_cpu_us_per_event": cpu(floor), **extra},
    )


def _against_bare(
    bed: Bed, scale: Scale, name: str, bare: str, load: Callable[[], None], bar: float = 0.85, **settings: Any
) -> Row:
    drains = Drains(bed, name)
    ours, floor = [], []
    for _ in range(scale.rounds):
        load()
        ours.append(drains.run("ours", scale.events, **settings))
        load()
        floor.append(drains.run(bare, scale.events, **settings))
    drains.close()
    return _row(name, Bar(bar), ours, floor, events=scale.events)


def warm_up(bed: Bed, scale: Scale) -> None:
    """Neither side may be the one that meets servers that just started."""
    drains = Drains(bed, "warm-up")
    for module in ("floor_postgres", "ours", "floor_postgres"):
        fill_postgres(bed.url, scale.events)
        drains.run(module, scale.events)
    drains.close()


def postgres(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept."""
    return _against_bare(bed, scale, "postgres-kafka", "floor_postgres", lambda: fill_postgres(bed.url, scale.events))


def postgres_deleted(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows deleted when published."""
    return _against_bare(
        bed,
        scale,
        "postgres-kafka-deleted",
        "floor_postgres",
        lambda: fill_postgres(bed.url, scale.events),
        keep=False,
    )


def sqlite(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, on a SQLite file."""
    events = scale.events // 2
    return _against_bare(
        bed,
        Scale(rounds=scale.rounds, events=events),
        "sqlite-kafka",
        "floor_sqlite",
        lambda: fill_sqlite(bed.sqlite_path, events),
        url=f"sqlite:///{bed.sqlite_path}",
    )


def _mysql(bed: Bed, scale: Scale, server: Server) -> Row:
    few = Scale(rounds=scale.rounds, events=scale.events // 2)
    url, name = server.url, f"{server.name}-kafka"
    # Neither side may be the one that meets a server that just started.
    fill(url, few.events)
    warm = Drains(bed, f"{name}-warm-up")
    warm.run("floor_mysql", few.events, url=url)
    warm.close()
    return _against_bare(bed, few, name, "floor_mysql", lambda: fill(url, few.events), bar=0.8, url=url)


def mysql(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, on MySQL."""
    return _mysql(bed, scale, bed.mysql)


def mariadb(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, on MariaDB."""
    return _mysql(bed, scale, bed.mariadb)


def mongo(bed: Bed, scale: Scale) -> Row:
    """Ordered, documents kept, on MongoDB with majority concerns."""
    few = Scale(rounds=scale.rounds, events=scale.events // 2)
    url = bed.mongo.url
    fill(url, few.events)
    warm = Drains(bed, "mongo-kafka-warm-up")
    warm.run("floor_mongo", few.events, url=url)
    warm.close()
    return _against_bare(bed, few, "mongo-kafka", "floor_mongo", lambda: fill(url, few.events), url=url)


def mongo_one_at_a_time(bed: Bed, scale: Scale) -> Row:
    """Against a loop that claims, sends and marks the oldest event."""
    drains = Drains(bed, "mongo-one-at-a-time")
    url, events = bed.mongo.url, scale.events // 2
    ours, floor = [], []
    for _ in range(scale.rounds):
        fill(url, events)
        ours.append(drains.run("ours", events, url=url))
        fill(url, events)
        floor.append(drains.run("one_at_a_time", events // 50, url=url))
    drains.close()
    return _row("mongo-one-at-a-time", Bar(1.0), ours, floor)


def mongo_many_waiting(bed: Bed, scale: Scale) -> Row:
    """On MongoDB."""
    return _many_waiting(bed, scale, "mongo", bed.mongo.url)


def hot_key(bed: Bed, scale: Scale) -> Row:
    """The other keys while one with many held events is set aside, against the same without it."""
    drains = Drains(bed, "postgres-hot-key")
    events = scale.events // 2
    ours, floor = [], []
    for _ in range(scale.rounds):
        fill_postgres(bed.url, events, held=scale.held)
        ours.append(drains.run("ours", events))
        fill_postgres(bed.url, events)
        floor.append(drains.run("ours", events))
    drains.close()
    return _row("postgres-hot-key", Bar(0.9), ours, floor, held=scale.held)


def many_waiting(bed: Bed, scale: Scale) -> Row:
    """On PostgreSQL."""
    return _many_waiting(bed, scale, "postgres", bed.url)


def mysql_many_waiting(bed: Bed, scale: Scale) -> Row:
    """On MySQL."""
    return _many_waiting(bed, scale, "mysql", bed.mysql.url)


def mariadb_many_waiting(bed: Bed, scale: Scale) -> Row:
    """On MariaDB."""
    return _many_waiting(bed, scale, "mariadb", bed.mariadb.url)


def _many_waiting(bed: Bed, scale: Scale, database: str, url: str) -> Row:
    """The first part of a long backlog, against as many events in short ones; in batches that a short one fills."""
    drains = Drains(bed, f"{database}-backlog-1m")
    few, parts, batch = scale.few_waiting, 4, scale.few_waiting // SHARDS // 3
    # So many more that the last round still has all of them waiting.
    fill(url, scale.waiting + scale.rounds * few * parts, prefix="million")
    ours, floor = [], []
    for _ in range(scale.rounds):
        ours.append(drains.run("ours", few * parts, url=url, prefix="million", batch=batch))
        fill(url, few)
        floor.append(drains.run("ours", few, url=url, batch=batch, refills=parts - 1))
    drains.close()
    return _row(f"{database}-backlog-1m", Bar(0.9), ours, floor, waiting=scale.waiting)


def memory(bed: Bed, scale: Scale) -> Row:
    """The most memory that a relay takes with a long backlog before it."""
    drains = Drains(bed, "postgres-memory")
    events = scale.waiting // 20
    fill_postgres(bed.url, scale.waiting + scale.rounds * events, prefix="million")
    found = [drains.run("ours", events, prefix="million")["peak_mb"] for _ in range(scale.rounds)]
    drains.close()
    return Row("postgres-memory", "MB", Bar(1.0, at_most=True), found, [MEMORY_MB] * len(found))
