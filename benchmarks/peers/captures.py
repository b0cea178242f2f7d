"""Rows on MySQL and MongoDB: connectors that capture changes, in turn with our relay.

All sides run and are idle when a backlog is committed. At an everyday rate each event has a transaction of its own, and
what the server spends beyond the writers alone is the cost of the side.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

from benchmarks.arrival import PER_SECOND
from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.everyday import arrived
from benchmarks.failures import peer_side
from benchmarks.peers.places import DEBEZIUM_AT_ONCE, MONGO_AT_ONCE, OnMongo, OnMysql, Place, Settings
from benchmarks.report import Bar, Row, percentiles
from benchmarks.rounds import in_turn
from benchmarks.scale import Scale
from benchmarks.watch import Arrivals, Watch
from servers.connect import Connect
from servers.process import wait_until

_WRITERS = 4
_WARM_UP_SECONDS = 1.0
_SETTLE_SECONDS = 0.5
# Longer than a backlog takes to load while the relay stands still.
_LEASE = "60s"


class Peer(NamedTuple):
    """A connector. at_once: settings that differ where latency counts. bar, late_bar: of ours at the everyday rate."""

    row: str
    settings: Callable[[str, str, str], Settings]
    at_once: Mapping[str, str]
    bar: Bar | None = None
    late_bar: Bar | None = None


class Sides:
    """Ours and connectors, on one server and to one topic."""

    _made = 0

    def __init__(self, bed: Bed, place: Place, connect: Connect, name: str) -> None:
        self.place = place
        self.copies: dict[str, int] = {}
        self._bed = bed
        self._connect = connect
        self._name = name

    @contextmanager
    def ours(self, topic: str, keep: bool = True) -> Iterator[Child]:
        """Our relay on an empty outbox."""
        self.place.clear("ours")
        told = {"servers": self._bed.servers, "topic": topic, "url": self.place.url, "prefix": "outbox"}
        with Child("ours", {**told, "note": False, "keep": keep, "lease": _LEASE}, self._bed.folder) as child:
            child.answer()
            yield child
            child.finish()

    @contextmanager
    def peer(self, peer: Peer, topic: str, changed: Mapping[str, str] | None = None) -> Iterator[str]:
        """A new connector that streams."""
        Sides._made += 1
        connector = f"capture_{Sides._made}"
        self.place.clear("peer")
        self._connect.put(connector, {**peer.settings(connector, topic, self._bed.servers), **(changed or {})})
        self._connect.wait_until_running(connector)
        self._streams(connector, topic)
        yield connector
        self._connect.delete(connector)

    def _streams(self, connector: str, topic: str) -> None:
        """Wait until it publishes: it begins at an instant of its own, and what was committed before is not its
        business."""
        watch, before = Watch(self._bed.servers, topic), 0
        before = watch.count()

        def published() -> bool:
            self._check(connector)
            self.place.add("peer", 1)
            return watch.count() > before

        wait_until(published, seconds=90, what=f"{connector} to publish")
        time.sleep(_SETTLE_SECONDS)

    def _check(self, connector: str) -> None:
        if wrong := self._connect.failure(connector):
            raise RuntimeError(wrong)

    def ours_warm(self, events: int, few: int, keep: bool) -> float:
        """Events per second from the commit of a backlog, or from the instant at which both may go on."""
        topic = self._bed.topic(self._name)
        with self.ours(topic, keep) as child:
            self._timed("ours", topic, few, child.pause, child.resume)
            found = self._timed("ours", topic, events, child.pause, child.resume)
        self._bed.drop_topic(topic)
        return found

    def peer_warm(self, peer: Peer, events: int, few: int) -> float:
        topic = self._bed.topic(self._name)
        with peer_side(), self.peer(peer, topic) as connector:
            stand = (self._connect.pause, self._connect.resume)
            self._timed(peer.row, topic, few, *stand, connector)
            found = self._timed(peer.row, topic, events, *stand, connector)
        self._bed.drop_topic(topic)
        return found

    def _timed(
        self,
        side: str,
        topic: str,
        events: int,
        pause: Callable[[], None],
        resume: Callable[[], None],
        connector: str | None = None,
    ) -> float:
        watch = Watch(self._bed.servers, topic)
        before = watch.count()
        if self.place.freezes:
            pause()
        try:
            self.place.add("ours" if connector is None else "peer", events)
            begun = time.monotonic()
        finally:
            if self.place.freezes:
                resume()
        failure = partial(self._connect.failure, connector) if connector else lambda: None
        found = events / (watch.until(before + events, failure) - begun)
        time.sleep(_SETTLE_SECONDS)
        self.copies[side] = self.copies.get(side, 0) + watch.count() - before - events
        say(f"  {self._name}: {side} {found:8,.0f} events/s of {events:,}")
        return found

    def steady(self, peer: Peer | None, seconds: float) -> "Steady":
        """One round at an everyday rate; None: ours."""
        topic, side = self._bed.topic(self._name), "peer" if peer else "ours"
        serving = self.peer(peer, topic, peer.at_once) if peer else self.ours(topic)
        with peer_side() if peer else nullcontext(), Arrivals(self._bed.servers, topic) as arrivals, serving:
            arrived(arrivals, write(self.place, side, 1_000_000, _WARM_UP_SECONDS))
            before = self._cpu()
            committed = write(self.place, side, 2_000_000, seconds)
            arrived(arrivals, committed)
            spent = self._cpu() - before
        self._bed.drop_topic(topic)
        before = self._cpu()
        write(self.place, side, 3_000_000, seconds)
        alone = self._cpu() - before
        # A consumer may get an event before the writer gets the answer to its commit.
        latencies = [1000 * max(0.0, arrivals.at[number] - at) for number, at in committed.items()]
        found = Steady(latencies, 1e6 * (spent - alone) / len(committed))
        who = peer.row if peer else "ours"
        say(f"  {self._name}: {who} {statistics.median(latencies):.2f} ms, {found.cpu_us:.0f} us of server CPU")
        return found

    def _cpu(self) -> float:
        return self.place.server.cpu_seconds()


class Steady(NamedTuple):
    """latencies: milliseconds from the end of a commit to a consumer. cpu_us: of the server, for each event."""

    latencies: Sequence[float]
    cpu_us: float

    @property
    def late(self) -> float:
        return statistics.quantiles(self.latencies, n=100)[98]


def write(place: Place, side: str, first: int, seconds: float) -> dict[int, float]:
    """Write single events at the everyday rate. Returns by number the instants at which their commits returned."""
    committed: dict[int, float] = {}
    numbers = range(first, first + int(PER_SECOND * seconds))
    start = time.monotonic() + 0.2

    def some(mine: int) -> None:
        with place.writer(side) as one:
            for count in range(mine, len(numbers), _WRITERS):
                time.sleep(max(0.0, start + count / PER_SECOND - time.monotonic()))
                one(numbers[count])
                committed[numbers[count]] = time.monotonic()

    threads = [threading.Thread(target=some, args=(mine,)) for mine in range(_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(committed) < len(numbers):
        raise RuntimeError("a writer failed; see its traceback")
    return committed


def _warm(bed: Bed, scale: Scale, place: Place, peers: Sequence[Peer]) -> list[Row]:
    """Ours keeps what it has published, and in a second row deletes it; each against every peer."""
    few = scale.few_waiting
    with Connect(bed.servers, mongo=True).start() as connect:
        sides = Sides(bed, place, connect, f"{place.name}-captures")
        say("  backlogs that warm up Java:")
        for peer in peers:
            sides.peer_warm(peer, scale.events, few)
        kept, deleted, *theirs = in_turn(
            scale.rounds,
            lambda: sides.ours_warm(scale.events, few, keep=True),
            lambda: sides.ours_warm(scale.events, few, keep=False),
            *(partial(sides.peer_warm, peer, scale.events, few) for peer in peers),
        )
    rows = []
    for peer, found in zip(peers, theirs, strict=True):
        extra = {
            "events": scale.events,
            "ours_copies": sides.copies.get("ours", 0),
            "peer_copies": sides.copies.get(peer.row, 0),
        }
        rows.append(Row(peer.row, "events/s", kept, found, extra, against="peer"))
        rows.append(Row(f"{peer.row}-deleted", "events/s", deleted, found, extra, against="peer"))
    return rows


def _everyday(bed: Bed, scale: Scale, place: Place, peers: Sequence[Peer]) -> list[Row]:
    with Connect(bed.servers, mongo=True).start() as connect:
        sides = Sides(bed, place, connect, f"{place.name}-captures-{PER_SECOND}")
        for peer in peers:
            sides.steady(peer, scale.latency_seconds)
        ours, *theirs = in_turn(
            scale.rounds,
            *(partial(sides.steady, peer, 2 * scale.latency_seconds) for peer in (None, *peers)),
        )
    rows = []
    for peer, found in zip(peers, theirs, strict=True):
        name = f"{peer.row}-{PER_SECOND}"
        extra = {
            "per_second": PER_SECOND,
            **percentiles("ours", [each for one in ours for each in one.latencies]),
            **percentiles("peer", [each for one in found for each in one.latencies]),
        }
        rows += [
            Row(name, "ms", _medians(ours), _medians(found), extra, "peer", peer.bar),
            Row(f"{name}-p99", "ms", _late(ours), _late(found), {}, "peer", peer.late_bar),
            Row(f"{name}-cpu", "us of server CPU/event", _cpu(ours), _cpu(found), {}, "peer"),
        ]
    return rows


def _medians(found: Sequence[Steady]) -> list[float]:
    return [statistics.median(each.latencies) for each in found]


def _late(found: Sequence[Steady]) -> list[float]:
    return [each.late for each in found]


def _cpu(found: Sequence[Steady]) -> list[float]:
    return [each.cpu_us for each in found]


def _on_mysql(bed: Bed) -> tuple[Place, Sequence[Peer]]:
    place = OnMysql(bed)
    return place, [Peer("peer-debezium-mysql", place.debezium, DEBEZIUM_AT_ONCE)]


def _on_mongo(bed: Bed) -> tuple[Place, Sequence[Peer]]:
    place = OnMongo(bed)
    return place, [
        Peer("peer-debezium-mongo", place.debezium, DEBEZIUM_AT_ONCE, late_bar=Bar(1.0, at_most=True)),
        Peer("peer-mongo-connector", place.own, MONGO_AT_ONCE, bar=Bar(4.0, at_most=True)),
    ]


def mysql(bed: Bed, scale: Scale) -> list[Row]:
    """Debezium's connector with its outbox event router."""
    return _warm(bed, scale.with_events(scale.events // 2), *_on_mysql(bed))


def mongo(bed: Bed, scale: Scale) -> list[Row]:
    """Debezium's connector with its outbox event router, and MongoDB's own."""
    return _warm(bed, scale.with_events(scale.events // 2), *_on_mongo(bed))


def mysql_everyday(bed: Bed, scale: Scale) -> list[Row]:
    return _everyday(bed, scale, *_on_mysql(bed))


def mongo_everyday(bed: Bed, scale: Scale) -> list[Row]:
    return _everyday(bed, scale, *_on_mongo(bed))
