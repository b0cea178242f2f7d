"""Deliveries, read from the destination's own log and not from the relay."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Final

import aiormq
import pulsar
from confluent_kafka import Consumer, Message, TopicPartition

from proof.content import fingerprint
from proof.history import Delivery

_READ_SECONDS: Final = 120.0


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


async def from_rabbitmq(url: str, queue: str) -> list[Delivery]:
    """Deliveries to a RabbitMQ queue, from its beginning to its end. They are taken out."""
    found: list[Delivery] = []
    is_complete = asyncio.Event()
    async with aiormq.connect(url) as connection:
        channel = await connection.channel()
        count = (await channel.queue_declare(queue, passive=True)).message_count or 0

        async def take(message: Any) -> None:
            found.append(_from_queue(message, len(found)))
            if len(found) == count:
                is_complete.set()

        if count:
            await channel.basic_consume(queue, take, no_ack=True)
            await asyncio.wait_for(is_complete.wait(), _READ_SECONDS)
    return found


def _from_queue(message: Any, number: int) -> Delivery:
    properties = message.header.properties
    headers: dict[str, Any] = properties.headers
    key = headers.get("event_key")
    sha256 = fingerprint(key, message.body, str(headers.get("proof", "")))
    # The server notes no instant.
    return Delivery(properties.message_id, key, sha256, [0, number], 0.0)


def from_pulsar(url: str, topic: str) -> list[Delivery]:
    """Deliveries to Pulsar: every partition from its beginning to its end."""
    log = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
    client = pulsar.Client(url, stats_interval_in_seconds=0, logger=log)
    found: list[Delivery] = []
    for partition, name in enumerate(client.get_topic_partitions(topic)):
        reader = client.create_reader(name, pulsar.MessageId.earliest)
        place = 0
        while reader.has_message_available():
            message = reader.read_next(30_000)
            headers, key = message.properties(), message.partition_key() or None
            sha256 = fingerprint(key, message.data(), headers.get("proof", ""))
            written_at = message.publish_timestamp() / 1000
            found.append(Delivery(headers["event_id"], key, sha256, [partition, place], written_at))
            place += 1
    client.close()
    return found


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
