"""Rows: how fast a backlog is published into Kafka exactly once."""

from confluent_kafka import Consumer, KafkaError, TopicPartition

from benchmarks.bed import PARTITIONS, Bed
from benchmarks.drains import Drains, against_bare
from benchmarks.load import fill, fill_postgres
from benchmarks.report import Row
from benchmarks.scale import Scale


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
    return _share(bed, scale, row, bed.url)


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
