"""Rows: how fast a backlog is published into Kafka exactly once."""

import statistics

from confluent_kafka import Consumer, KafkaError, TopicPartition

from benchmarks import arrival
from benchmarks.bed import PARTITIONS, Bed, say
from benchmarks.drains import Drains, against_bare
from benchmarks.load import fill, fill_postgres
from benchmarks.report import Row, percentiles
from benchmarks.scale import Scale

_FIRST_SECONDS = 4.0  # in which every shard opens its producer


class Committed:
    """The bed's Kafka; messages are counted as a consumer does that reads committed ones."""

    def __init__(self, bed: Bed) -> None:
        self.servers, self.topic, self.drop_topic = bed.servers, bed.topic, bed.drop_topic

    def messages(self, topic: str) -> int:
        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "bench",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
        found, ended = 0, 0
        try:
            while ended < PARTITIONS:
                for message in consumer.consume(10_000, 1.0):
                    error = message.error()
                    if error is None:
                        found += 1
                    elif error.code() == KafkaError._PARTITION_EOF:
                        ended += 1
            return found
        finally:
            consumer.close()


def _share(bed: Bed, scale: Scale, row: Row, url: str) -> Row:
    """The same row, with the speed of one drain at least once beside it."""
    drains = Drains(bed, f"{row.name}-share")
    found = drains.run("ours", scale.events, lambda: fill(url, scale.events), url=url)
    drains.close()
    row.extra["at_least_once"] = found["per_second"]
    say(f"  {row.name}: {statistics.median(row.ours) / found['per_second']:.2f} of the speed at least once")
    return row


def _latency(bed: Bed, scale: Scale, row: Row) -> Row:
    """The same row, with the latency from commit to consumer at a steady rate beside it."""
    side = arrival.ours(bed, bed.url, delivery="exactly-once")
    times = arrival.measure(bed, side, f"{row.name}-latency", scale.latency_seconds, _FIRST_SECONDS)
    row.extra.update({"per_second": arrival.PER_SECOND, **percentiles("ours", times)})
    say(f"  {row.name}: {statistics.median(times):.1f} ms in the median at {arrival.PER_SECOND} events a second")
    return row


def postgres(bed: Bed, scale: Scale) -> Row:
    """From PostgreSQL, rows kept."""
    row = against_bare(
        bed,
        scale,
        "postgres-kafka-once",
        "floor_postgres_once",
        lambda: fill_postgres(bed.url, scale.events),
        broker=Committed(bed),
        delivery="exactly-once",
    )
    return _latency(bed, scale, _share(bed, scale, row, bed.url))


def mongo(bed: Bed, scale: Scale) -> Row:
    """From MongoDB, documents kept."""
    url = bed.mongo.url
    row = against_bare(
        bed,
        scale,
        "mongo-kafka-once",
        "floor_mongo_once",
        lambda: fill(url, scale.events),
        broker=Committed(bed),
        delivery="exactly-once",
        url=url,
    )
    return _share(bed, scale, row, url)
