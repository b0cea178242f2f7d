"""The producer of the bare scripts: the same settings, headers and bytes as ours by default."""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import Producer

Headers = list[tuple[str, bytes]]

PRODUCER_SETTINGS = {
    "acks": "all",
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,
    "message.timeout.ms": 0,
    "partitioner": "murmur2_random",
    "linger.ms": 50,
    "batch.size": 1_048_076,
    "message.max.bytes": 1_049_612,
    "log_level": 2,
}
CONSTANT_HEADERS: Headers = [
    ("event_type", b"order.created"),
    ("tenant", b"default"),
    ("content_type", b"application/json"),
    ("aggregate_type", b"order"),
]


class BareProducer:
    """A producer that waits for all confirmations."""

    def __init__(self, servers: str, topic: str, settings: Mapping[str, Any] = PRODUCER_SETTINGS) -> None:
        self.topic = topic
        self.errors: list[Any] = []
        self.producer: Any = Producer({**settings, "bootstrap.servers": servers})
        self.producer.list_topics(topic, timeout=10)

    def send(self, rows: list[Any]) -> None:
        """Send rows of id, key, instant and payload in order; returns when all are confirmed."""
        produce, topic, report = self.producer.produce, self.topic, self.report
        for event_id, key, occurred_at, payload in rows:
            name = key.encode()
            headers = [
                ("event_id", str(event_id).encode()),
                *CONSTANT_HEADERS,
                ("occurred_at", occurred_at.isoformat().encode()),
                ("aggregate_id", name),
            ]
            produce(topic, payload, name, -1, report, headers=headers)
        if self.producer.flush(60) or self.errors:
            raise RuntimeError(f"not everything was confirmed: {self.errors[:1]}")

    def report(self, error: Any, _message: Any) -> None:
        if error is not None:
            self.errors.append(error)
