"""Deliveries, read from the destination's own log and not from the relay."""

import json
from pathlib import Path

from confluent_kafka import Consumer, Message, TopicPartition

from proof.content import fingerprint
from proof.history import Delivery


def from_ledger(path: Path) -> list[Delivery]:
    """Deliveries to handlers, which append to one file."""
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    found = [Delivery(**json.loads(line)) for line in lines]
    for number, delivery in enumerate(found):
        delivery.place = [0, number]
    return found


def from_kafka(servers: str, topic: str, partitions: int) -> list[Delivery]:
    """Deliveries to Kafka: every partition from its beginning to its end."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "proof", "log_level": 2})
    places = [TopicPartition(topic, number, 0) for number in range(partitions)]
    ends = {place.partition: consumer.get_watermark_offsets(place, timeout=30)[1] for place in places}
    consumer.assign(places)
    found: list[Delivery] = []
    left = {number for number, end in ends.items() if end}
    while left:
        message = consumer.poll(30)
        if message is None or message.error():
            raise RuntimeError(f"the broker's log cannot be read: {message and message.error()}")
        delivery = _delivery(message)
        found.append(delivery)
        partition, offset = delivery.place
        if offset + 1 >= ends[partition]:
            left.discard(partition)
    consumer.close()
    return sorted(found, key=lambda delivery: tuple(delivery.place))


def _delivery(message: Message) -> Delivery:
    headers = {name: _bytes(value) for name, value in _pairs(message)}
    raw = message.key()
    key = None if raw is None else _bytes(raw).decode()
    sha256 = fingerprint(key, _bytes(message.value()), headers.get("proof", b"").decode())
    place = [message.partition() or 0, message.offset() or 0]
    return Delivery(headers["event_id"].decode(), key, sha256, place, message.timestamp()[1] / 1000)


def _pairs(message: Message) -> list[tuple[str, str | bytes | None]]:
    headers = message.headers() or []
    return list(headers.items() if isinstance(headers, dict) else headers)


def _bytes(value: str | bytes | None) -> bytes:
    return value.encode() if isinstance(value, str) else value or b""
