"""Every row of the benchmark: its bar, whether a default run has it, and how long it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import (
    arrival,
    backlogs,
    consumed,
    drains,
    endpoint,
    everyday,
    grid,
    idempotent,
    idle,
    inbox,
    latency,
    once,
    sessions,
    writers,
)
from benchmarks.bed import Bed
from benchmarks.peers import captures, debezium
from benchmarks.peers import drains as peers
from benchmarks.peers import latency as peers_latency
from benchmarks.report import Bar, Row
from benchmarks.scale import Scale
from benchmarks.workers import workers

# Fourteen minutes, less the time to close the servers and to draw.
DEFAULT_SECONDS = 810
NO_BAR = None


@dataclass(frozen=True)
class Entry:
    """One row, or several that are measured together."""

    measure: Callable[[Bed, Scale], Row | list[Row]]
    bar: Bar | None
    """Of all its rows; ``NO_BAR``: they have no limit."""
    seconds: int = 0
    """About what it takes in a default run on two cores; 0: it is measured on request only."""
    late_bar: Bar | None = None
    """Of its row for the 99th percentile."""
    deleted_bar: Bar | None = None
    """Of its row in which ours deletes what it has published."""
    promised: bool = False
    """Whether it has more rounds, because the documentation makes a promise about it."""

    def bar_of(self, row: Row) -> Bar | None:
        if row.bar is not None:
            return row.bar
        if row.name.endswith("-deleted"):
            return self.deleted_bar or self.bar
        return self.late_bar if row.name.endswith("-p99") else self.bar


def _at_most(limit: float) -> Bar:
    return Bar(limit, at_most=True)


# In the order of a run: rows with bars first, then the other default rows while there is time. The seconds have a
# margin; those of the memory include loading the backlog.
ROWS: dict[str, Entry] = {
    "postgres-kafka": Entry(drains.postgres, Bar(0.9), 50, promised=True),
    "peer-debezium": Entry(debezium.warm, Bar(1.2), 97, deleted_bar=Bar(1.5)),
    "peer-txoutbox": Entry(peers.txoutbox, Bar(3.5), 40, deleted_bar=Bar(4.8)),
    "mongo-kafka": Entry(drains.mongo, Bar(0.9), 85),
    "postgres-to-consumer": Entry(arrival.to_consumer, Bar(5.0, difference=True), 32, NO_BAR),
    "peer-txoutbox-latency": Entry(peers_latency.txoutbox, _at_most(1.0), 54, _at_most(1.0), promised=True),
    "postgres-backlog-1m": Entry(backlogs.postgres, Bar(0.9), 69),
    "mysql-kafka": Entry(drains.mysql, Bar(0.8), 43),
    "sqlite-kafka": Entry(drains.sqlite, Bar(0.85), 25),
    "add": Entry(writers.drivers, _at_most(1.25), 19),
    "add-django": Entry(writers.django, _at_most(1.11), 6),
    "inbox-record": Entry(inbox.rows("record"), Bar(0.95), 18),
    "inbox-batch": Entry(inbox.rows("batch"), Bar(0.9), 16),
    "inbox-newer": Entry(inbox.rows("newer"), Bar(0.9), 14),
    "consumer-batch": Entry(consumed.against_bare("batch"), Bar(0.85), 30),
    "consumer-single": Entry(consumed.against_bare("single"), Bar(0.8), 30),
    "consumer-plain": Entry(consumed.against_bare("plain"), Bar(0.8), 30),
    "idempotent-run": Entry(idempotent.runs, Bar(0.8), 5),
    "idempotent-endpoint": Entry(endpoint.endpoint, Bar(0.8), 6),
    "session-without-aggregates": Entry(sessions.sessions, Bar(0.98), 5),
    "postgres-rabbitmq": Entry(drains.rabbitmq, Bar(0.8), 45),
    "peer-loop": Entry(peers.loop, Bar(1.0), 28),
    "postgres-idle": Entry(idle.ROWS["postgres-idle"], _at_most(1.0), 32),
    **{name: Entry(everyday.ROWS[name], NO_BAR, 26) for name in everyday.ROWS if not name.endswith("-1000")},
    "postgres-handlers": Entry(drains.handlers, NO_BAR, 18),
    "postgres-kafka-once": Entry(once.postgres, Bar(0.75)),
    "mongo-kafka-once": Entry(once.mongo, Bar(0.75)),
    "postgres-latency-200": Entry(latency.LATENCIES["postgres-latency-200"], _at_most(3.0)),
    "postgres-memory": Entry(backlogs.memory, _at_most(1.0)),
    "postgres-hot-key": Entry(drains.hot_key, Bar(0.9)),
    "postgres-10kb": Entry(drains.payload_10kb, NO_BAR),
    "postgres-200kb": Entry(drains.payload_200kb, NO_BAR),
    "postgres-latency-1000": Entry(latency.LATENCIES["postgres-latency-1000"], NO_BAR),
    "postgres-latency-50": Entry(latency.LATENCIES["postgres-latency-50"], NO_BAR),
    "postgres-workers": Entry(workers, NO_BAR),
    "peer-debezium-latency": Entry(peers_latency.debezium, _at_most(1.0), 0, _at_most(1.0)),
    "postgres-nats": Entry(drains.nats, Bar(0.8)),
    "postgres-redis": Entry(drains.redis, Bar(0.8)),
    "postgres-pulsar": Entry(drains.pulsar, Bar(0.8)),
    "postgres-http": Entry(drains.http, Bar(0.8)),
    "http-hanging-endpoint": Entry(drains.hanging_endpoint, Bar(0.9)),
    "postgres-kafka-deleted": Entry(drains.postgres_deleted, Bar(0.85)),
    "postgres-kafka-metrics": Entry(drains.metrics, _at_most(1.04), promised=True),
    "postgres-backlog-5m": Entry(backlogs.postgres_most, Bar(0.9)),
    "peer-debezium-cold": Entry(debezium.cold, Bar(1.0)),
    "peer-faststream-outbox": Entry(peers.faststream_outbox, Bar(1.0)),
    "consumer-latency": Entry(consumed.to_commit, NO_BAR),
    "peer-faststream-consumer-batch": Entry(consumed.against_faststream("batch"), Bar(1.0)),
    "peer-faststream-consumer-single": Entry(consumed.against_faststream("single"), Bar(1.0)),
    "peer-omni-box": Entry(peers.omni_box, Bar(1.0)),
    "peer-mysql": Entry(captures.mysql, Bar(1.0)),
    "peer-mongo": Entry(captures.mongo, Bar(1.0)),
    "peer-mysql-200": Entry(captures.mysql_everyday, NO_BAR),
    "peer-mongo-200": Entry(captures.mongo_everyday, NO_BAR),
    "postgres-grid": Entry(grid.grid, NO_BAR),
    "mysql-backlog-1m": Entry(backlogs.mysql, Bar(0.9)),
    "mariadb-kafka": Entry(drains.mariadb, Bar(0.8)),
    "mariadb-backlog-1m": Entry(backlogs.mariadb, Bar(0.9)),
    "mongo-one-at-a-time": Entry(drains.mongo_one_at_a_time, Bar(1.0)),
    "mongo-backlog-1m": Entry(backlogs.mongo, Bar(0.9)),
    **{name: Entry(everyday.ROWS[name], NO_BAR) for name in everyday.ROWS if name.endswith("-1000")},
    **{name: Entry(idle.ROWS[name], NO_BAR) for name in idle.ROWS if name != "postgres-idle"},
}
GROUPS: dict[str, list[str]] = {
    "peers": [name for name in ROWS if name.startswith("peer-")],
    "everyday": list(everyday.ROWS),
    "idle": list(idle.ROWS),
    "inbox": [name for name in ROWS if name.startswith("inbox-")],
    "consumer": [name for name in ROWS if "consumer-" in name],
    "idempotent": [name for name in ROWS if name.startswith("idempotent-")],
}
"""A name that stands for several rows."""


def named(names: Sequence[str]) -> list[str]:
    """The rows of these names and groups, each once."""
    return list(dict.fromkeys(row for name in names for row in GROUPS.get(name, [name])))


def chosen(only: Sequence[str] | None, everything: bool = False) -> list[str]:
    """The rows to measure: by name or group, all of them, or those of a default run."""
    if only is None:
        return [name for name, entry in ROWS.items() if everything or entry.seconds]
    return named(only)
