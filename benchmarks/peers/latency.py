"""Rows: latency from a steady writer to a consumer, for ours and for peers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import arrival
from benchmarks.arrival import Side, committed
from benchmarks.bed import Bed
from benchmarks.child import Child
from benchmarks.failures import peer_side
from benchmarks.load_events import payload
from benchmarks.peers.debezium import TABLE, Connector
from benchmarks.peers.drains import TXOUTBOX
from benchmarks.report import Row
from benchmarks.scale import Scale
from benchmarks.steady import key_of
from pillarbox.ids import uuid7
from servers.connect import Connect

_AT_ONCE = {"poll.interval.ms": "1", "producer.override.linger.ms": "0"}
_TO_DEBEZIUM = f"INSERT INTO {TABLE} VALUES ($1, 'order', $2, 'order.created', $3)"
_TO_TXOUTBOX = "INSERT INTO tx_outbox (topic, key, payload, headers) VALUES ($1, $2, $3, '{}')"


def txoutbox(bed: Bed, scale: Scale) -> list[Row]:
    """With LISTEN, as in its throughput row."""
    python = TXOUTBOX.python()

    @contextmanager
    def serving(topic: str) -> Iterator[None]:
        told = {"servers": bed.servers, "topic": topic, "url": bed.url}
        with Child("peers.drive_txoutbox", told, bed.folder, python) as child:
            child.answer()
            yield
            child.finish()

    def values(topic: str, number: int) -> tuple[Any, ...]:
        return topic, key_of(number), payload(number)

    peer = Side(committed(bed.url, _TO_TXOUTBOX, values), serving)
    return arrival.rounds(bed, scale, "peer-txoutbox-latency", arrival.ours(bed, bed.url), peer, "peer")


def debezium(bed: Bed, scale: Scale) -> list[Row]:
    """With settings for latency, in one worker for all rounds."""
    name = "peer-debezium-latency"

    @contextmanager
    def serving(topic: str) -> Iterator[None]:
        connector = Connector(bed, connect, topic, _AT_ONCE)
        connector.start()
        yield
        connector.remove()

    def values(_topic: str, number: int) -> tuple[Any, ...]:
        return uuid7(), key_of(number), payload(number)

    with Connect(bed.servers).start() as connect:
        url = bed.logical_url
        peer = Side(committed(url, _TO_DEBEZIUM, values), serving)
        # Warm up Java with as many events.
        with peer_side():
            arrival.measure(bed, peer, name, scale.latency_seconds)
        return arrival.rounds(bed, scale, name, arrival.ours(bed, url), peer, "peer")
