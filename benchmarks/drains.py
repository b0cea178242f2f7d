"""Rows: how fast a backlog is published."""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.load import fill, fill_postgres, fill_sqlite
from benchmarks.load_events import SHARDS
from benchmarks.report import Row
from benchmarks.rounds import in_turn
from benchmarks.scale import Scale
from servers import Server

SLOTS = 4
BATCH = 2000
# The limit of one turn of ours; the bare loop reads as much.
BATCH_BYTES = 4_000_000


class Broker(Protocol):
    """The other end of a drain. Kafka, the bed's own, unless another one is given."""

    @property
    def servers(self) -> str: ...

    def topic(self, name: str) -> str: ...

    def messages(self, topic: str) -> int: ...

    def drop_topic(self, name: str) -> None: ...


class Drains:
    """Runs drains in their own processes, and checks that each event reached the broker once."""

    def __init__(self, bed: Bed, name: str, broker: Broker | None = None) -> None:
        self._bed = bed
        self._name = name
        self._broker: Broker = broker or bed
        self._topic = self._broker.topic(name)
        self._sent = 0

    def run(
        self,
        module: str,
        events: int,
        load: Callable[[], None] | None = None,
        python: Path | None = None,
        strict: bool = True,
        **settings: Any,
    ) -> dict[str, Any]:
        """Run one measured process. Returns the report of its clock, and the number of messages that arrived.

        load: fills the outbox while the process starts. strict: more messages than settled events are an error; a peer
        may send more.
        """
        told: dict[str, Any] = {
            "servers": self._broker.servers,
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
        with Child(module, None, self._bed.folder, python) as child:
            if load is not None:
                load()
            child.tell(told)
            found = child.answer()
        # Handlers count their calls.
        found["messages"] = found["handled"] if "handled" in found else self._new_messages()
        if found["messages"] < found["settled"] or (strict and found["messages"] > found["settled"]):
            raise RuntimeError(f"{module} settled {found['settled']} events, the other end has {found['messages']}")
        say(
            f"  {self._name}: {module:14} {found['per_second']:8,.0f} events/s, "
            f"{found['cpu_us_per_event']:.1f} us of CPU per event, {found['turns']} turns"
        )
        return found

    def _new_messages(self) -> int:
        before, self._sent = self._sent, self._broker.messages(self._topic)
        return self._sent - before

    def close(self) -> None:
        self._broker.drop_topic(self._topic)


def cpu(found: list[dict[str, Any]]) -> float:
    return float(statistics.median(each["cpu_us_per_event"] for each in found))


def speeds(found: list[dict[str, Any]]) -> list[float]:
    return [each["per_second"] for each in found]


def row(name: str, ours: list[dict[str, Any]], floor: list[dict[str, Any]], **extra: Any) -> Row:
    spent = {"ours_cpu_us_per_event": cpu(ours), "floor_cpu_us_per_event": cpu(floor)}
    return Row(name, "events/s", speeds(ours), speeds(floor), {**spent, **extra})


def against_bare(
    bed: Bed,
    scale: Scale,
    name: str,
    bare: str,
    load: Callable[[], None],
    bare_settings: dict[str, Any] | None = None,
    broker: Broker | None = None,
    **settings: Any,
) -> Row:
    """Ours and a bare script in turn. broker: in place of the bed's Kafka."""
    drains, of_bare = Drains(bed, name, broker), {**settings, **(bare_settings or {})}
    ours, floor = in_turn(
        scale.rounds,
        lambda: drains.run("ours", scale.events, load, **settings),
        lambda: drains.run(bare, scale.events, load, **of_bare),
    )
    drains.close()
    return row(name, ours, floor, events=scale.events)


def warm_up(bed: Bed, scale: Scale) -> None:
    """Warm up the servers, so that they slow down neither side."""
    drains = Drains(bed, "warm-up")
    for module in ("floor_postgres", "ours", "floor_postgres"):
        drains.run(module, scale.events, lambda: fill_postgres(bed.url, scale.events))
    drains.close()


def postgres(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept."""
    return against_bare(bed, scale, "postgres-kafka", "floor_postgres", lambda: fill_postgres(bed.url, scale.events))


def pulsar(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, to Pulsar in batches of one key."""
    few = scale.with_events(scale.events // 2)
    warm = Drains(bed, "postgres-pulsar-warm-up", bed.pulsar)
    warm.run("floor_pulsar", few.events, lambda: fill_postgres(bed.url, few.events))
    warm.close()
    return against_bare(
        bed,
        few,
        "postgres-pulsar",
        "floor_pulsar",
        lambda: fill_postgres(bed.url, few.events),
        broker=bed.pulsar,
        to="pulsar",
    )


def postgres_deleted(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows deleted when published."""
    return against_bare(
        bed,
        scale,
        "postgres-kafka-deleted",
        "floor_postgres",
        lambda: fill_postgres(bed.url, scale.events),
        keep=False,
    )


def handlers(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, to a handler that does nothing."""
    return against_bare(
        bed,
        scale,
        "postgres-handlers",
        "floor_handlers",
        lambda: fill_postgres(bed.url, scale.events),
        to="handlers",
    )


def metrics(bed: Bed, scale: Scale) -> Row:
    """The relay's CPU with the metrics of Prometheus, against the same relay without."""
    name = "postgres-kafka-metrics"
    drains = Drains(bed, name)

    def load() -> None:
        fill_postgres(bed.url, scale.events)

    on, off = in_turn(
        scale.rounds,
        lambda: drains.run("ours", scale.events, load, metrics=True),
        lambda: drains.run("ours", scale.events, load),
    )
    drains.close()
    with_metrics, without = ([each["cpu_us_per_event"] for each in side] for side in (on, off))
    return Row(name, "us of CPU/event", with_metrics, without, {"events": scale.events}, "without metrics")


def rabbitmq(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, to a quorum queue of RabbitMQ."""
    few = scale.with_events(scale.events // 10)
    return against_bare(
        bed,
        few,
        "postgres-rabbitmq",
        "floor_rabbitmq",
        lambda: fill_postgres(bed.url, few.events),
        broker=bed.queues,
        to="rabbitmq",
    )


def nats(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, to a stream of NATS that syncs each message."""
    few = scale.with_events(scale.events // 5)
    return against_bare(
        bed,
        few,
        "postgres-nats",
        "floor_nats",
        lambda: fill_postgres(bed.url, few.events),
        broker=bed.jetstreams,
        to="nats",
    )


def redis(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, to a stream of Valkey that syncs each transaction."""
    return against_bare(
        bed,
        scale,
        "postgres-redis",
        "floor_redis",
        lambda: fill_postgres(bed.url, scale.events),
        broker=bed.redis_streams,
        to="redis",
    )


def http(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, to one URL."""
    few = scale.with_events(scale.events // 10)
    return against_bare(
        bed,
        few,
        "postgres-http",
        "floor_http",
        lambda: fill_postgres(bed.url, few.events),
        broker=bed.hooks,
        to="http",
    )


def hanging_endpoint(bed: Bed, scale: Scale) -> Row:
    """The other endpoints beside one that never answers, against the same without that one."""
    drains, others = Drains(bed, "http-hanging-endpoint", bed.hooks), 19
    events = scale.events // others * others  # long enough that one wait for it is a small part
    with_it = events // others * (others + 1)

    def run(loaded: int, endpoints: int, hangs: bool) -> dict[str, Any]:
        load = partial(fill_postgres, bed.url, loaded)
        return drains.run("ours", events, load, strict=False, to="http", endpoints=endpoints, hangs=hangs)

    ours, floor = in_turn(scale.rounds, lambda: run(with_it, others + 1, True), lambda: run(events, others, False))
    drains.close()
    return row("http-hanging-endpoint", ours, floor, endpoints=others + 1)


def _large(bed: Bed, scale: Scale, name: str, size: int) -> Row:
    events = scale.payload_bytes // size
    return against_bare(
        bed,
        scale.with_events(events),
        name,
        "floor_postgres",
        lambda: fill_postgres(bed.url, events, size=size),
        {"batch": BATCH_BYTES // size},
    )


def payload_10kb(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, with payloads of 10 kB."""
    return _large(bed, scale, "postgres-10kb", 10_000)


def payload_200kb(bed: Bed, scale: Scale) -> Row:
    """The same with 200 kB."""
    return _large(bed, scale, "postgres-200kb", 200_000)


def sqlite(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, on a SQLite file."""
    events = scale.events // 2
    return against_bare(
        bed,
        scale.with_events(events),
        "sqlite-kafka",
        "floor_sqlite",
        lambda: fill_sqlite(bed.sqlite_path, events),
        url=f"sqlite:///{bed.sqlite_path}",
    )


def _other_server(bed: Bed, scale: Scale, name: str, bare: str, url: str) -> Row:
    # Warm up the server, so that it slows down neither side.
    warm = Drains(bed, f"{name}-warm-up")
    warm.run(bare, scale.events // 2, lambda: fill(url, scale.events // 2), url=url)
    warm.close()
    return against_bare(bed, scale, name, bare, lambda: fill(url, scale.events), url=url)


def _mysql(bed: Bed, scale: Scale, server: Server) -> Row:
    few = scale.with_events(scale.events // 2)
    return _other_server(bed, few, f"{server.name}-kafka", "floor_mysql", server.url)


def mysql(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, on MySQL."""
    return _mysql(bed, scale, bed.mysql)


def mariadb(bed: Bed, scale: Scale) -> Row:
    """Ordered, rows kept, on MariaDB."""
    return _mysql(bed, scale, bed.mariadb)


def mongo(bed: Bed, scale: Scale) -> Row:
    """Ordered, documents kept, on MongoDB with majority concerns."""
    return _other_server(bed, scale, "mongo-kafka", "floor_mongo", bed.mongo.url)


def mongo_one_at_a_time(bed: Bed, scale: Scale) -> Row:
    """Against a loop that claims, sends and marks one event at a time."""
    drains = Drains(bed, "mongo-one-at-a-time")
    url, events = bed.mongo.url, scale.events // 2
    ours, floor = in_turn(
        scale.rounds,
        lambda: drains.run("ours", events, lambda: fill(url, events), url=url),
        lambda: drains.run("one_at_a_time", events // 50, lambda: fill(url, events), url=url),
    )
    drains.close()
    return row("mongo-one-at-a-time", ours, floor)


def hot_key(bed: Bed, scale: Scale) -> Row:
    """The other keys beside one held key with many events, against the same without that key."""
    drains = Drains(bed, "postgres-hot-key")
    events = scale.events // 2
    ours, floor = in_turn(
        scale.rounds,
        lambda: drains.run("ours", events, lambda: fill_postgres(bed.url, events, held=scale.held)),
        lambda: drains.run("ours", events, lambda: fill_postgres(bed.url, events)),
    )
    drains.close()
    return row("postgres-hot-key", ours, floor, held=scale.held)
