"""Looks into a topic from outside of both sides."""

import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Consumer, TopicPartition, admin

from benchmarks.bed import PARTITIONS

# It has types for a part of its names only.
_ADMIN: Any = admin
_NUMBER = re.compile(rb'"number": ?(\d+)')


class Watch:
    """Counts the messages of a topic by the high watermarks of its partitions, about two hundred times a second."""

    def __init__(self, servers: str, topic: str) -> None:
        self._admin = _ADMIN.AdminClient({"bootstrap.servers": servers, "log_level": 2})
        self._places = [TopicPartition(topic, number) for number in range(PARTITIONS)]

    def count(self) -> int:
        asked = self._admin.list_offsets({place: _ADMIN.OffsetSpec.latest() for place in self._places})
        return sum(found.result(10).offset for found in asked.values())

    def until(self, count: int, failure: Callable[[], str | None] = lambda: None, seconds: float = 300) -> float:
        """Wait until the topic has so many messages. Returns that instant on the monotonic clock."""
        deadline = time.monotonic() + seconds
        look_at = time.monotonic() + 2
        while (found := self.count()) < count:
            now = time.monotonic()
            if now > look_at:
                if wrong := failure():
                    raise RuntimeError(wrong)
                look_at = now + 2
            if now > deadline:
                raise RuntimeError(f"after {seconds:g} s the topic has {found} messages instead of {count}")
            time.sleep(0.005)
        return time.monotonic()


class Arrivals:
    """A consumer that notes the instant of each event on the monotonic clock, by number."""

    def __init__(self, servers: str, topic: str) -> None:
        self._consumer: Any = Consumer(
            {"bootstrap.servers": servers, "group.id": "arrivals", "enable.auto.commit": False, "log_level": 2}
        )
        self._consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
        self.at: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="arrivals")

    def _run(self) -> None:
        while not self._ended.is_set():
            message = self._consumer.poll(0.1)
            if message is not None and message.error() is None:
                found = _NUMBER.search(message.value())
                if found:
                    self.at.setdefault(int(found[1]), time.monotonic())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._consumer.close()
