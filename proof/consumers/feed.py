"""The messages of a run: written to the broker all the time, and read from its log at the end."""

import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Protocol
from uuid import UUID

from confluent_kafka import Consumer, Producer, TopicPartition

from pillarbox.ids import uuid7
from proof.consumers.history import Message

TYPE: Final = "proof.event"
_OTHER_TYPE: Final = "proof.other"  # no handler is registered for it
_FATES: Final = (("reject", 0.01), ("flaky", 0.03), ("other", 0.01))
_HOT: Final = 0.1  # of events: on the first key
_COPIES: Final = 0.03  # of messages: an event once more
_KEYS: Final = 60


class Writer(Protocol):
    """Writes to a broker that may be away. The messages of a key keep their order; some may be written twice."""

    def send(self, key: str, headers: Mapping[str, str], body: bytes) -> None: ...

    def flush(self, seconds: float) -> int:
        """Write what is on its way. Returns how many messages the broker did not take."""
        ...


class KafkaWriter:
    """Idempotent, so that the log of a key is in the order of its numbers."""

    def __init__(self, servers: str, topic: str) -> None:
        self._producer = Producer({
            "bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 5, "log_level": 2,
            "message.timeout.ms": 0,
        })  # fmt: skip
        self._topic = topic

    def send(self, key: str, headers: Mapping[str, str], body: bytes) -> None:
        fields: dict[str, str | bytes | None] = {**headers}
        while True:
            try:
                self._producer.produce(self._topic, body, key, headers=fields)
            except BufferError:  # the broker is away
                self._producer.poll(0.2)
                continue
            self._producer.poll(0)
            return

    def flush(self, seconds: float) -> int:
        return self._producer.flush(seconds)


class Feed:
    """Writes messages until it is stopped, in a thread."""

    def __init__(self, writer: Writer, seed: int, per_second: float) -> None:
        self._writer, self._pause = writer, 1 / per_second
        self._chance = random.Random(seed)
        self._numbers: dict[str, int] = {}
        self._recent: deque[tuple[str, UUID, int, str]] = deque(maxlen=300)
        self._stop = threading.Event()
        self.written = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what is on its way, and end."""
        self._stop.set()
        self._thread.join(60)
        left = self._writer.flush(60)
        if left:
            raise RuntimeError(f"the broker did not take {left} messages")

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            self._write()
            due = max(due + self._pause, time.monotonic() - 1.0)
            self._stop.wait(max(0.0, due - time.monotonic()))

    def _write(self) -> None:
        chance = self._chance
        if self._recent and chance.random() < _COPIES:
            self._send(*chance.choice(self._recent))
            return
        key = "key-0" if chance.random() < _HOT else f"key-{chance.randrange(_KEYS)}"
        n = self._numbers[key] = self._numbers.get(key, 0) + 1
        draw, fate = chance.random(), "deliver"
        for name, share in _FATES:
            if draw < share:
                fate = name
                break
            draw -= share
        event = key, uuid7(), n, fate
        self._recent.append(event)
        self._send(*event)

    def _send(self, key: str, event_id: UUID, n: int, fate: str) -> None:
        kind = _OTHER_TYPE if fate == "other" else TYPE
        headers = {"event_id": str(event_id), "event_type": kind, "n": str(n), "fate": fate}
        self._writer.send(key, headers, b'{"n": %d}' % n)
        self.written += 1


def read(servers: str, topic: str, partitions: int) -> list[Message]:
    """The broker's log, from its beginning to its end."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "checker", "log_level": 2})
    places = [TopicPartition(topic, number, 0) for number in range(partitions)]
    ends = {place.partition: consumer.get_watermark_offsets(place, timeout=30)[1] for place in places}
    consumer.assign(places)
    found: list[Message] = []
    left = {number for number, end in ends.items() if end}
    while left:
        raw = consumer.poll(30)
        if raw is None or raw.error():
            raise RuntimeError(f"the broker's log cannot be read: {raw and raw.error()}")
        found.append(_message(raw))
        if found[-1].offset + 1 >= ends[found[-1].partition]:
            left.discard(found[-1].partition)
    consumer.close()
    return sorted(found, key=lambda message: (message.partition, message.offset))


def _message(raw: Any) -> Message:
    headers = {name: value.decode() for name, value in raw.headers()}
    place = raw.partition(), raw.offset()
    return Message(headers["event_id"], raw.key().decode(), int(headers["n"]), headers["fate"], *place)


class Group:
    """Asks the broker how far the group is."""

    def __init__(self, servers: str, topic: str, partitions: int, group: str) -> None:
        self._consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "log_level": 2})
        self._places = [TopicPartition(topic, number) for number in range(partitions)]

    def unfinished(self) -> dict[str, int]:
        """By partition: the messages that are not committed, where there are any."""
        found = {}
        for place in self._consumer.committed(self._places, timeout=30):
            _, end = self._consumer.get_watermark_offsets(place, timeout=30)
            left = end - max(0, place.offset)
            if left:
                found[str(place.partition)] = left
        return found

    def close(self) -> None:
        self._consumer.close()
