"""Deliveries, read from the destination's own log and not from the relay."""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import aiormq
import nats
import pulsar
from confluent_kafka import Consumer, IsolationLevel, KafkaError, Message, TopicPartition
from confluent_kafka import admin as confluent_admin
from redis import Redis

from proof.content import fingerprint
from proof.history import Delivery
from servers import Receiver

_READ_SECONDS: Final = 120.0

kafka_admin: Any = confluent_admin  # its types leave out what it exports


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
    """Committed deliveries to Kafka: every partition from its beginning to its end. Waits until each transaction has
    ended."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "proof",
            "log_level": 2,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    places = [TopicPartition(topic, number, 0) for number in range(partitions)]
    ends = _ends(servers, places)
    consumer.assign(places)
    found: list[Delivery] = []
    left = {number for number, end in ends.items() if end}
    while left:
        message = consumer.poll(30)
        if message is None:
            raise RuntimeError("the broker's log cannot be read to its end")
        error = message.error()
        if error is None:
            found.append(_delivery(message))
        elif error.code() != KafkaError._PARTITION_EOF:
            raise RuntimeError(f"the broker's log cannot be read: {error}")
        # The last places may be of aborted messages, or of the markers of transactions.
        elif (message.offset() or 0) >= ends[message.partition() or 0]:
            left.discard(message.partition() or 0)
    consumer.close()
    return sorted(found, key=lambda delivery: tuple(delivery.place))


def _ends(servers: str, places: Sequence[TopicPartition]) -> dict[int, int]:
    """The ends of partitions, behind transactions that are open: those of a consumer lie before them."""
    admin = kafka_admin.AdminClient({"bootstrap.servers": servers, "log_level": 2})
    asked = {place: kafka_admin.OffsetSpec.latest() for place in places}
    answers = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=30)
    return {place.partition: answer.result().offset for place, answer in answers.items()}


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


async def from_nats(url: str, stream: str) -> list[Delivery]:
    """Deliveries to a stream of NATS, from its first message to its last."""
    client = await nats.connect(url)
    jetstream = client.jetstream()
    left = (await jetstream.stream_info(stream)).state.messages
    found: list[Delivery] = []
    reader = await jetstream.subscribe(">", stream=stream, ordered_consumer=True)
    while len(found) < left:
        message = await reader.next_msg(timeout=_READ_SECONDS)
        headers = {name: unquote(value) for name, value in (message.headers or {}).items()}
        key, about = headers.get("event_key"), message.metadata
        sha256 = fingerprint(key, message.data, headers.get("proof", ""))
        place = [0, about.sequence.stream]
        found.append(Delivery(headers["event_id"], key, sha256, place, about.timestamp.timestamp()))
    await client.close()
    return found


def from_redis(url: str, stream: str) -> list[Delivery]:
    """Deliveries to a stream of Redis, from its first entry to its last."""
    found: list[Delivery] = []
    with Redis.from_url(url) as client:
        entries: Any = client.xrange(stream)
    for place, (identity, fields) in enumerate(entries):
        key = fields[b"event_key"].decode() if b"event_key" in fields else None
        sha256 = fingerprint(key, fields[b"payload"], fields.get(b"proof", b"").decode())
        written_at = int(identity.partition(b"-")[0]) / 1000
        found.append(Delivery(fields[b"event_id"].decode(), key, sha256, [0, place], written_at))
    return found


def from_receiver(receiver: Receiver) -> list[Delivery]:
    """Deliveries to a receiver of webhooks, from its own notes."""
    found: list[Delivery] = []
    for place, (at, _, headers, body) in enumerate(receiver.taken()):
        key = headers.get("event-key")
        sha256 = fingerprint(key, body, headers.get("proof", ""))
        found.append(Delivery(headers["webhook-id"], key, sha256, [0, place], at))
    return found


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
