"""Rows: Debezium's outbox event router, in turn with our relay.

Both are measured from outside: from an instant that the harness knows until the broker has the last event.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.failures import peer_side
from benchmarks.load import add_events, fill_postgres
from benchmarks.peers.backlog import BYTES, NUMBERED, load
from benchmarks.report import Row
from benchmarks.rounds import in_turn
from benchmarks.scale import Scale
from benchmarks.watch import Watch
from servers.connect import Connect
from servers.process import wait_until

TABLE = "outbox"
_CREATE = f"""CREATE TABLE IF NOT EXISTS {TABLE} (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL,
    aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload bytea)"""
_FILL = f"INSERT INTO {TABLE} SELECT uuidv7(), 'order', key, 'order.created', {BYTES} FROM {NUMBERED}"
_SETTLE_SECONDS = 0.5


async def _ask(url: str, query: str, *values: Any) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query, *values)
    finally:
        await connection.close()


class Connector:
    """One connector with its own replication slot, so that earlier rounds do not slow it down."""

    _made = 0

    def __init__(self, bed: Bed, connect: Connect, topic: str, changed: Mapping[str, str] | None = None) -> None:
        """``changed``: settings that differ from those for throughput."""
        Connector._made += 1
        self.name = f"outbox_{Connector._made}"
        self._url = bed.logical_url
        self._connect = connect
        self._topic = topic
        self._changed = changed or {}
        asyncio.run(_ask(self._url, _CREATE))

    @property
    def settings(self) -> dict[str, str]:
        """The settings of its documentation for an outbox, with larger batches and queues, a short poll, and five
        requests in flight, as is Kafka's default. Bytes are passed on unchanged."""
        place = urlsplit(self._url)
        return {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "tasks.max": "1",
            "database.hostname": str(place.hostname),
            "database.port": str(place.port),
            "database.user": str(place.username),
            "database.dbname": place.path.strip("/"),
            "topic.prefix": self.name,
            "plugin.name": "pgoutput",
            "slot.name": self.name,
            "publication.name": self.name,
            "publication.autocreate.mode": "filtered",
            "table.include.list": f"public.{TABLE}",
            "snapshot.mode": "no_data",
            "extended.headers.enabled": "false",
            "tombstones.on.delete": "false",
            "max.batch.size": "8192",
            "max.queue.size": "32768",
            "poll.interval.ms": "5",
            "transforms": "outbox",
            "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
            "transforms.outbox.route.topic.replacement": self._topic,
            "value.converter": "io.debezium.converters.BinaryDataConverter",
            "producer.override.acks": "all",
            "producer.override.enable.idempotence": "true",
            "producer.override.max.in.flight.requests.per.connection": "5",
            "producer.override.linger.ms": "5",
            "producer.override.batch.size": "262144",
            **self._changed,
        }

    def put(self) -> None:
        self._connect.put(self.name, self.settings)

    def start(self) -> None:
        """Start it; returns when it streams."""
        self.put()
        self._wait(active=True)

    def remove(self) -> None:
        """Remove it with its slot: the slot would keep and decode the log of the other side's rounds."""
        self._connect.delete(self.name)
        self._wait(active=False)
        asyncio.run(_ask(self._url, "SELECT pg_drop_replication_slot($1)", self.name))
        asyncio.run(_ask(self._url, f"DROP PUBLICATION IF EXISTS {self.name}"))

    def stop_worker(self) -> None:
        """Stop the worker. The slot and the stored offset stay."""
        self._connect.stop()
        self._wait(active=False)

    def start_worker(self) -> None:
        self._connect.start()

    def failure(self) -> str | None:
        return self._connect.failure(self.name)

    def _wait(self, active: bool) -> None:
        query = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1 AND active"

        def reached() -> bool:
            return bool(asyncio.run(_ask(self._url, query, self.name))) == active

        wait_until(reached, seconds=60, what=f"the slot {self.name} to be {'active' if active else 'free'}")


class Sides:
    """Ours and Debezium, on the same server and to the same topic."""

    def __init__(self, bed: Bed, name: str, connect: Connect) -> None:
        self._bed = bed
        self._name = name
        self._connect = connect
        self._url = bed.logical_url
        self._topic = bed.topic(name)
        self._watch = Watch(bed.servers, self._topic)
        self.copies = {"ours": 0, "peer": 0}

    def close(self) -> None:
        self._bed.drop_topic(self._topic)

    def ours_warm(self, events: int, few: int, keep: bool = True) -> float:
        """Events per second from the commit of a backlog. The relay has drained a short backlog before and is idle."""
        fill_postgres(self._url, 0, settled=few)
        with self._relay(keep) as child:
            child.answer()
            self._timed("ours", few)
            found = self._timed("ours", events)
            child.finish()
        return found

    def ours_cold(self, events: int) -> float:
        """Events per second from the start of the relay's process. The backlog is there before."""
        fill_postgres(self._url, events)
        before, begun = self._watch.count(), time.monotonic()
        with self._relay() as child:
            found = self._rate("ours", events, before, begun)
            child.answer()
            child.finish()
        return found

    def debezium_warm(self, events: int, few: int) -> float:
        """Events per second from the commit of a backlog, by a connector that has published backlogs before."""
        connector = Connector(self._bed, self._connect, self._topic)
        asyncio.run(load(self._url, TABLE, _FILL, few))
        connector.start()
        self._timed("peer", few, connector)
        found = self._timed("peer", events, connector)
        connector.remove()
        return found

    def debezium_cold(self, events: int, few: int) -> float:
        """Events per second from the start of the connector in a new worker. The backlog is there before."""
        connector = Connector(self._bed, self._connect, self._topic)
        asyncio.run(load(self._url, TABLE, _FILL, 0))
        connector.start()
        # An offset is stored only after something was sent; without one the connector starts at the end.
        self._timed("peer", few, connector)
        connector.stop_worker()
        asyncio.run(load(self._url, TABLE, _FILL, events))
        connector.start_worker()
        before, begun = self._watch.count(), time.monotonic()
        connector.put()
        found = self._rate("peer", events, before, begun, connector)
        connector.remove()
        return found

    def _relay(self, keep: bool = True) -> Child:
        told = {
            "servers": self._bed.servers,
            "topic": self._topic,
            "url": self._url,
            "prefix": "outbox",
            "note": False,
            "keep": keep,
        }
        return Child("ours", told, self._bed.folder)

    def _timed(self, side: str, events: int, connector: Connector | None = None) -> float:
        before = self._watch.count()
        return self._rate(side, events, before, asyncio.run(self._commit(side, events)), connector)

    async def _commit(self, side: str, events: int) -> float:
        """Commit so many new events. Returns the instant of the commit."""
        connection = await asyncpg.connect(self._url)
        try:
            await connection.execute("CHECKPOINT")
            if side == "ours":
                await add_events(connection, "outbox", events)
            else:
                await connection.execute(_FILL, events)
            return time.monotonic()
        finally:
            await connection.close()

    def _rate(self, side: str, events: int, before: int, begun: float, connector: Connector | None = None) -> float:
        failure = connector.failure if connector else lambda: None
        found = events / (self._watch.until(before + events, failure) - begun)
        time.sleep(_SETTLE_SECONDS)
        self.copies[side] += self._watch.count() - before - events
        say(f"  {self._name}: {side:4} {found:8,.0f} events/s of {events:,}")
        return found


def _row(name: str, scale: Scale, sides: Sides, ours: list[float], peer: list[float]) -> Row:
    extra = {f"{side}_copies": found for side, found in sides.copies.items()}
    return Row(name, "events/s", ours, peer, {"events": scale.events, **extra}, against="peer")


def _of_peer(measure: Callable[[int, int], float], events: int, few: int) -> float:
    with peer_side():
        return measure(events, few)


def warm(bed: Bed, scale: Scale) -> list[Row]:
    """Events per second from the commit of a backlog. Both sides run and are idle. Ours keeps what it has
    published, and in a second row deletes it."""
    name = "peer-debezium"
    with Connect(bed.servers).start() as connect:
        sides = Sides(bed, name, connect)
        say("  backlogs that warm up Java:")
        for _ in range(2):
            _of_peer(sides.debezium_warm, scale.events, scale.few_waiting)
        ours, deleted, peer = in_turn(
            scale.rounds,
            lambda: sides.ours_warm(scale.events, scale.few_waiting),
            lambda: sides.ours_warm(scale.events, scale.few_waiting, keep=False),
            lambda: _of_peer(sides.debezium_warm, scale.events, scale.few_waiting),
        )
        sides.close()
    return [_row(name, scale, sides, ours, peer), _row(f"{name}-deleted", scale, sides, deleted, peer)]


def cold(bed: Bed, scale: Scale) -> list[Row]:
    """Events per second from the start of our process, and of the connector in a running worker, with a backlog."""
    name = "peer-debezium-cold"
    with Connect(bed.servers).start() as connect:
        sides = Sides(bed, name, connect)
        ours, peer = in_turn(
            scale.rounds,
            lambda: sides.ours_cold(scale.events),
            lambda: _of_peer(sides.debezium_cold, scale.events, scale.few_waiting // 10),
        )
        sides.close()
    return [_row(name, scale, sides, ours, peer)]
